// A problem as one line of text: `driver key=value ...`. The line is the test and the repro.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "guarded.h"

namespace tidegate::fuzz {

using test::Random;
using test::Sizes;

// What is wrong with a line.
class LineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Key {
  std::string name, value;
  std::string of = {};  // words that it may be, with | between them; empty: whoever reads the value checks it
};

class Line {
 public:
  Line(std::string driver, std::vector<Key> defaults) : driver_(std::move(driver)), keys_(std::move(defaults)) {}

  const std::string& driver() const { return driver_; }
  const std::string& text(std::string_view key) const;
  bool is(std::string_view key, std::string_view value) const { return text(key) == value; }
  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high) const;
  std::int64_t size(std::string_view key, std::int64_t low = 1) const { return integer(key, low, 4096); }
  bool flag(std::string_view key) const { return integer(key, 0, 1) == 1; }
  Sizes list(std::string_view key) const;
  Sizes lengths(std::string_view cu = "cu") const;  // of cu=0,3,3,7: 3, 0, 4
  DType dtype(std::string_view key = "in") const;   // f32, bf16, f16
  Layout layout(std::string_view key = "layout") const;
  test::Form form() const;  // mem= dense, low, padded, reversed

  void set(std::string_view key, std::string value);
  void set(std::string_view key, std::int64_t value) { set(key, std::to_string(value)); }
  std::string print() const;  // with every key, also those that have their default

  // Applies "key=value key=value" to the line.
  void read(std::string_view arguments);

 private:
  Key& at(std::string_view key);
  [[noreturn]] void wrong(std::string_view key, std::string_view expected) const;

  std::string driver_;
  std::vector<Key> keys_;
};

// Ways to draw values.
template <class T>
T pick(Random& random, std::initializer_list<T> from) {
  return *(from.begin() + random.integer(0, static_cast<std::int64_t>(from.size()) - 1));
}
std::string pick_text(Random& random, std::initializer_list<const char*> from);
// Offsets of packed sequences of 0 to about 130 tokens, together at most `most`.
std::string draw_cu(Random& random, std::int64_t most);
// The same for `rows` equal ones.
std::string equal_cu(std::int64_t rows, std::int64_t length);
// A size that is one of a vector's, a neighbour of one, or anything else; at most `most`.
std::int64_t draw_width(Random& random, std::int64_t most, std::int64_t least = 1);
// Different slots of a pool in random order, one row of M for every sequence.
Sizes draw_slots(Random& random, std::int64_t slots, std::size_t count);

}  // namespace tidegate::fuzz
