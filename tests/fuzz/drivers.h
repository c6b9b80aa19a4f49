// Every operator's driver: which keys its lines have, how random ones are drawn, and the problem that a line means.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "fuzz/problem.h"

namespace tidegate::fuzz {

struct Driver {
  std::string name;
  std::string about;
  std::vector<Key> keys;  // with their defaults
  void (*draw)(Random& random, Line& line);
  Problem (*make)(const Line& line);
};

std::vector<Driver> conv_drivers();
std::vector<Driver> decode_drivers();
std::vector<Driver> ep_drivers();
std::vector<Driver> error_drivers();
std::vector<Driver> moe_drivers();
std::vector<Driver> quant_drivers();
std::vector<Driver> rope_drivers();
std::vector<Driver> routing_drivers();
std::vector<Driver> row_drivers();
std::vector<Driver> rule_drivers();
std::vector<Driver> stage_drivers();

const std::vector<Driver>& all_drivers();
// A line with every key that all drivers have: in, mem, thr, isa, seed.
Line default_line(const Driver& driver);
Line draw_line(const Driver& driver, Random& random, std::string_view isa = "");
// Throws LineError.
Line parse_line(std::string_view text);
const Driver& driver_of(const Line& line);

// What a line's numbers are drawn from.
inline Random numbers(const Line& line) {
  return Random(static_cast<std::uint64_t>(line.integer("seed", 0, std::int64_t{1} << 40)));
}

// Expert ids int32 [T,k]: ids= random, one (all pairs to one expert) or none (nothing is routed).
Tensor draw_ids(Random& random, const Line& line, std::int64_t T, std::int64_t k, std::int64_t E);

}  // namespace tidegate::fuzz
