#include "ep/agreement.h"

#include <algorithm>

namespace tidegate::ep {
namespace {

struct Word {
  std::int64_t count = 0;  // -1: this rank failed
  Terms terms;
};
constexpr std::size_t kTextBytes = 512;  // engines may want the same length from all ranks

std::vector<Word> exchange_words(Wire& wire, const std::vector<Word>& mine) {
  std::vector<Word> theirs(mine.size());
  const std::vector<std::int64_t> bytes(mine.size(), sizeof(Word));
  wire.all_to_all(reinterpret_cast<const char*>(mine.data()), bytes, reinterpret_cast<char*>(theirs.data()), bytes);
  return theirs;
}

std::vector<std::string> gather_texts(Wire& wire, std::string mine) {
  mine.resize(kTextBytes);
  std::vector<std::string> texts = wire.all_gather(mine);
  for (std::string& text : texts) {
    text.resize(std::min(text.find('\0'), text.size()));
  }
  return texts;
}

}  // namespace

std::vector<std::int64_t> agree(std::string_view op, const std::string& group, Wire& wire, const Terms& terms,
                                const std::vector<std::int64_t>& counts) {
  std::vector<Word> mine;
  mine.reserve(counts.size());
  for (const std::int64_t n : counts) {
    mine.push_back({n, terms});
  }
  const std::vector<Word> theirs = exchange_words(wire, mine);
  const std::string prefix = std::string(op) + ": group " + group + ": ";
  const auto failed = std::find_if(theirs.begin(), theirs.end(), [](const Word& w) { return w.count < 0; });
  if (failed != theirs.end()) {
    const auto rank = static_cast<std::size_t>(failed - theirs.begin());
    throw Failure(prefix + "rank " + std::to_string(rank) + " failed: " + gather_texts(wire, {})[rank]);
  }
  std::vector<std::int64_t> came;
  for (std::size_t r = 0; r < theirs.size(); ++r) {
    compare_terms(prefix, wire.rank(), terms, static_cast<int>(r), theirs[r].terms);
    came.push_back(theirs[r].count);
  }
  return came;
}

void announce(Wire& wire, const std::string& failure) {
  Word word;
  word.count = -1;
  exchange_words(wire, std::vector<Word>(static_cast<std::size_t>(wire.size()), word));
  gather_texts(wire, failure);
}

}  // namespace tidegate::ep
