#include "fuzz/line.h"

#include <algorithm>
#include <charconv>

namespace tidegate::fuzz {

Key& Line::at(std::string_view key) {
  for (Key& k : keys_) {
    if (k.name == key) {
      return k;
    }
  }
  std::string known;
  for (const Key& k : keys_) {
    known += (known.empty() ? "" : ", ") + k.name;
  }
  throw LineError(driver_ + ": unknown key " + std::string(key) + "; expected " + known);
}
const std::string& Line::text(std::string_view key) const { return const_cast<Line*>(this)->at(key).value; }

void Line::wrong(std::string_view key, std::string_view expected) const {
  throw LineError(driver_ + ": " + std::string(key) + ": expected " + std::string(expected) + ", got " + text(key));
}

namespace {

bool parse(std::string_view text, std::int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t next = text.find(at);
    parts.push_back(text.substr(0, next));
    if (next == std::string_view::npos) {
      return parts;
    }
    text.remove_prefix(next + 1);
  }
}

}  // namespace

std::int64_t Line::integer(std::string_view key, std::int64_t low, std::int64_t high) const {
  std::int64_t value = 0;
  if (!parse(text(key), value) || value < low || value > high) {
    wrong(key, "an integer from " + std::to_string(low) + " to " + std::to_string(high));
  }
  return value;
}

Sizes Line::list(std::string_view key) const {
  Sizes values;
  for (const std::string_view part : split(text(key), ',')) {
    std::int64_t value = 0;
    if (!parse(part, value)) {
      wrong(key, "integers with commas between them");
    }
    values.push_back(value);
  }
  return values;
}

Sizes Line::lengths(std::string_view key) const {
  const Sizes cu = list(key);
  Sizes lengths;
  for (std::size_t i = 1; i < cu.size(); ++i) {
    lengths.push_back(cu[i] - cu[i - 1]);
  }
  if (cu[0] != 0 || lengths.empty() || *std::min_element(lengths.begin(), lengths.end()) < 0 || cu.back() > 4096) {
    wrong(key, "offsets from 0 on that do not fall, at most 4096");
  }
  return lengths;
}

DType Line::dtype(std::string_view key) const {
  const std::string& name = text(key);
  if (name != "f32" && name != "bf16" && name != "f16") {
    wrong(key, "f32, bf16 or f16");
  }
  return name == "f32" ? DType::kF32 : name == "bf16" ? DType::kBF16 : DType::kF16;
}

Layout Line::layout(std::string_view key) const {
  const std::string& name = text(key);
  if (name != "tnd" && name != "ntd" && name != "bsnd" && name != "bnsd") {
    wrong(key, "tnd, ntd, bsnd or bnsd");
  }
  return name == "tnd" ? Layout::kTND : name == "ntd" ? Layout::kNTD : name == "bsnd" ? Layout::kBSND : Layout::kBNSD;
}

test::Form Line::form() const {
  const std::string& name = text("mem");
  if (name != "dense" && name != "low" && name != "padded" && name != "reversed") {
    wrong("mem", "dense, low, padded or reversed");
  }
  return name == "dense"    ? test::Form{}
         : name == "low"    ? test::low()
         : name == "padded" ? test::padded()
                            : test::low(test::reversed());
}

void Line::set(std::string_view key, std::string value) { at(key).value = std::move(value); }

std::string Line::print() const {
  std::string out = driver_;
  for (const Key& k : keys_) {
    out += " " + k.name + "=" + k.value;
  }
  return out;
}

void Line::read(std::string_view arguments) {
  for (const std::string_view part : split(arguments, ' ')) {
    if (part.empty()) {
      continue;
    }
    const std::size_t sign = part.find('=');
    if (sign == std::string_view::npos) {
      throw LineError(driver_ + ": expected key=value, got " + std::string(part));
    }
    const std::string_view name = part.substr(0, sign);
    set(name, std::string(part.substr(sign + 1)));
    const std::vector<std::string_view> words = split(at(name).of, '|');
    if (!at(name).of.empty() && std::find(words.begin(), words.end(), text(name)) == words.end()) {
      wrong(name, at(name).of);
    }
  }
}

std::string pick_text(Random& random, std::initializer_list<const char*> from) { return pick(random, from); }

std::string draw_cu(Random& random, std::int64_t most) {
  // One and two tokens, what a convolution remembers, and the edges of chunks of 16, 32 and 64.
  constexpr std::int64_t kEdges[] = {0, 0, 1, 1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
  std::string text = "0";
  std::int64_t end = 0;
  const std::int64_t count = random.integer(1, 5);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t length =
        random.uniform() < 0.7 ? kEdges[random.integer(0, std::size(kEdges) - 1)] : random.integer(0, 80);
    end = std::min(end + length, most);
    text += "," + std::to_string(end);
  }
  return text;
}

std::string equal_cu(std::int64_t rows, std::int64_t length) {
  std::string text = "0";
  for (std::int64_t i = 1; i <= rows; ++i) {
    text += "," + std::to_string(i * length);
  }
  return text;
}

std::int64_t draw_width(Random& random, std::int64_t most, std::int64_t least) {
  constexpr std::int64_t kUsual[] = {1, 2, 3, 8, 15, 16, 17, 24, 32, 33, 60, 64, 83, 100, 128, 130, 256};
  std::int64_t width = 0;
  do {
    width = random.uniform() < 0.7 ? kUsual[random.integer(0, std::size(kUsual) - 1)] : random.integer(1, most);
  } while (width > most || width < least);
  return width;
}

Sizes draw_slots(Random& random, std::int64_t slots, std::size_t count) {
  Sizes all(static_cast<std::size_t>(slots));
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::int64_t>(i);
  }
  for (std::size_t i = all.size(); i > 1; --i) {
    std::swap(all[i - 1], all[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
  }
  all.resize(count);
  return all;
}

}  // namespace tidegate::fuzz
