// tidegate_fuzz: problems drawn at random, or given as lines, against plain loops in fp64.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>

#include "fuzz/drivers.h"
#include "tidegate/cpu.h"
#include "tidegate/version.h"

namespace tidegate::fuzz {
namespace {

constexpr int kWrong = 1, kUsage = 2;

constexpr const char* kHelp =
    "usage: tidegate_fuzz [--seconds N] [--count N] [--seed S] [--isa NAME] [--only a,b] [--repeat N] [--errors]\n"
    "                     [--line \"driver key=value ...\"]... [--file PATH] [--list]\n"
    "Exit code 0: nothing found; 1: a problem failed, its line is printed; 2: the call is wrong.\n";

struct Options {
  double seconds = 0.0;
  std::int64_t count = 0, repeat = 1, seed = 1;
  std::string isa, only, file;
  std::vector<std::string> lines;
  bool list = false, errors = false;
};

class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

std::int64_t number(const std::string& name, const std::string& text) {
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < 0) {
    throw UsageError(name + ": expected a number, got " + text);
  }
  return value;
}

Options parse(const std::vector<std::string>& arguments) {
  Options o;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    if (name == "--list" || name == "--errors") {
      (name == "--list" ? o.list : o.errors) = true;
      continue;
    }
    if (i + 1 == arguments.size()) {
      throw UsageError(name + ": unknown, or its value is missing");
    }
    const std::string& value = arguments[++i];
    if (name == "--seconds") {
      o.seconds = static_cast<double>(number(name, value));
    } else if (name == "--count") {
      o.count = number(name, value);
    } else if (name == "--repeat") {
      o.repeat = number(name, value);
    } else if (name == "--seed") {
      o.seed = number(name, value);
    } else if (name == "--isa") {
      o.isa = value;
      set_isa(value);  // an unknown one is refused here
    } else if (name == "--only") {
      o.only = value;
    } else if (name == "--file") {
      o.file = value;
    } else if (name == "--line") {
      o.lines.push_back(value);
    } else {
      throw UsageError(name + ": unknown option");
    }
  }
  return o;
}

std::vector<Driver> chosen(const std::string& only) {
  std::vector<Driver> list;
  std::string rest = "," + only + ",";
  for (const Driver& d : all_drivers()) {
    const std::size_t at = rest.find("," + d.name + ",");
    if (only.empty() || at != std::string::npos) {
      list.push_back(d);
      rest = at == std::string::npos ? rest : rest.erase(at, d.name.size() + 1);
    }
  }
  if (!only.empty() && rest != ",") {
    throw UsageError("--only: unknown driver in " + only);
  }
  return list;
}

// A line of a file: comments and empty lines are none.
std::vector<std::string> read_lines(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    throw UsageError("--file: cannot read " + path);
  }
  std::vector<std::string> lines;
  for (std::string text; std::getline(file, text);) {
    if (!text.empty() && text[0] != '#') {
      lines.push_back(text);
    }
  }
  if (lines.empty()) {  // random ones would be drawn in their place
    throw UsageError("--file: " + path + ": expected at least one problem, got none; write one a line, as --list does");
  }
  return lines;
}

bool passes(const Line& line, Tally& tally, std::int64_t repeats) {
  std::string wrong;
  try {
    wrong = judge(line, driver_of(line).make(line), tally, repeats);
  } catch (const LineError&) {
    throw;
  } catch (const std::exception& error) {
    wrong = std::string("exception: ") + error.what();
  }
  if (!wrong.empty()) {
    std::printf("FAILED  %s\n        %s\n", line.print().c_str(), wrong.c_str());
    std::fflush(stdout);
  }
  return wrong.empty();
}

int run(const Options& o) {
  if (o.list) {
    for (const Driver& d : all_drivers()) {
      std::printf("%-16s %s\n    %s\n", d.name.c_str(), d.about.c_str(), default_line(d).print().c_str());
    }
    return 0;
  }
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  Tally tally;
  std::vector<std::string> lines = o.file.empty() ? std::vector<std::string>() : read_lines(o.file);
  lines.insert(lines.end(), o.lines.begin(), o.lines.end());
  std::int64_t done = 0, failed = 0;
  for (const std::string& text : lines) {
    const Line line = parse_line(text);
    ++done;
    failed += passes(line, tally, o.repeat) ? 0 : 1;
    if (o.file.empty()) {
      std::printf("%s  %s\n", failed == 0 ? "ok    " : "      ", line.print().c_str());
    }
  }
  const std::vector<Driver> drivers = chosen(o.only);
  const double seconds = o.seconds > 0.0 ? o.seconds : o.count > 0 || !lines.empty() ? 0.0 : 30.0;
  Random random(static_cast<std::uint64_t>(o.seed));
  const bool draw = seconds > 0.0 || o.count > 0;
  for (std::int64_t i = 0; draw && (o.count == 0 || i < o.count) && (seconds == 0.0 || elapsed() < seconds); ++i) {
    const Driver& driver = drivers[static_cast<std::size_t>(i) % drivers.size()];
    const Line line = draw_line(driver, random, o.isa);
    ++done;
    failed += passes(line, tally, o.repeat) ? 0 : 1;
    if (failed >= 20) {
      std::printf("stopped after %lld failures\n", static_cast<long long>(failed));
      break;
    }
  }
  const bool within = !o.errors || tally.print("  ");
  std::printf("tidegate %s: %lld problems, seed %lld, %.0f s: %lld failed\n", TIDEGATE_VERSION,
              static_cast<long long>(done), static_cast<long long>(o.seed), elapsed(), static_cast<long long>(failed));
  return failed == 0 && within ? 0 : kWrong;
}

}  // namespace
}  // namespace tidegate::fuzz

int main(int count, char** arguments) {
  try {
    const std::vector<std::string> given(arguments + 1, arguments + count);
    if (!given.empty() && (given[0] == "--help" || given[0] == "-h")) {
      std::fputs(tidegate::fuzz::kHelp, stdout);
      return 0;
    }
    return tidegate::fuzz::run(tidegate::fuzz::parse(given));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tidegate_fuzz: %s\n%s", error.what(), tidegate::fuzz::kHelp);
    return tidegate::fuzz::kUsage;
  }
}
