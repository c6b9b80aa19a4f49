#include "ep/agreement.h"

#include <algorithm>
#include <cstring>

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

std::vector<std::string> gather_nodes(Wire& wire, const Config& config, NodeSums sums, const std::string& failure) {
  struct Fact {
    std::string_view name;
    std::int64_t value;
  };
  constexpr std::string_view op = "ep_nodes";
  constexpr std::size_t kFacts = 6;
  const std::vector<std::int64_t> shares = expert_shares(config, wire.size());
  const Fact mine[kFacts] = {
      {"experts", config.experts},
      {"slots", config.slots},
      {"row_bytes", config.row_bytes},
      {"max_tokens", config.max_tokens},
      {"sums", static_cast<std::int64_t>(sums)},
      {"hash of expert_begin", static_cast<std::int64_t>(hash_bytes(shares.data(), 8 * shares.size(), 1) >> 1)}};
  struct Word {
    std::int64_t facts[kFacts];
    char node[256], failure[kTextBytes];
  } word{};
  for (std::size_t i = 0; i < kFacts; ++i) {
    word.facts[i] = mine[i].value;
  }
  const std::string node = node_id(config.node_id);
  node.copy(word.node, sizeof word.node - 1);
  failure.copy(word.failure, sizeof word.failure - 1);
  const std::vector<std::string> all = wire.all_gather({reinterpret_cast<const char*>(&word), sizeof word});
  std::vector<std::string> nodes;
  const std::string prefix = std::string(op) + ": group " + config.name + ": rank ";
  for (std::size_t r = 0; r < all.size(); ++r) {
    Word theirs;
    std::memcpy(&theirs, all[r].data(), sizeof theirs);
    if (theirs.failure[0] != '\0' && failure.empty()) {
      throw Failure(prefix + std::to_string(r) + " failed: " + theirs.failure);
    }
    for (std::size_t i = 0; i < kFacts && failure.empty(); ++i) {
      if (theirs.facts[i] != mine[i].value) {
        throw Failure(prefix + std::to_string(wire.rank()) + " and rank " + std::to_string(r) +
                      " disagree: " + std::string(mine[i].name) + " is " + std::to_string(mine[i].value) + " and " +
                      std::to_string(theirs.facts[i]));
      }
    }
    nodes.emplace_back(theirs.node);
  }
  return nodes;
}

void announce(Wire& wire, const std::string& failure) {
  Word word;
  word.count = -1;
  exchange_words(wire, std::vector<Word>(static_cast<std::size_t>(wire.size()), word));
  gather_texts(wire, failure);
}

}  // namespace tidegate::ep
