#include "fuzz/drivers.h"

#include "tidegate/cpu.h"

namespace tidegate::fuzz {

const std::vector<Driver>& all_drivers() {
  static const std::vector<Driver> all = [] {
    std::vector<Driver> list;
    for (const auto& group :
         {row_drivers(), rope_drivers(), conv_drivers(), rule_drivers(), stage_drivers(), decode_drivers(),
          routing_drivers(), moe_drivers(), quant_drivers(), ep_drivers(), error_drivers()}) {
      list.insert(list.end(), group.begin(), group.end());
    }
    return list;
  }();
  return all;
}

Line default_line(const Driver& driver) {
  std::vector<Key> keys = driver.keys;
  for (const char* name : {"in=f32", "mem=dense", "thr=2", "isa=scalar", "seed=1"}) {
    const std::string_view text(name);
    const std::size_t sign = text.find('=');
    keys.push_back({std::string(text.substr(0, sign)), std::string(text.substr(sign + 1))});
  }
  return {driver.name, keys};
}

Line draw_line(const Driver& driver, Random& random, std::string_view isa) {
  Line line = default_line(driver);
  line.set("in", pick_text(random, {"f32", "f32", "bf16", "bf16", "f16"}));
  line.set("mem", pick_text(random, {"dense", "low", "padded", "reversed"}));
  line.set("thr", pick_text(random, {"1", "2", "2", "3", "8"}));
  const std::vector<Isa> isas = available_isas();
  const Isa drawn = isas[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(isas.size()) - 1))];
  line.set("isa", std::string(isa.empty() ? isa_name(drawn) : isa));
  line.set("seed", random.integer(1, 1 << 30));
  driver.draw(random, line);
  return line;
}

Line parse_line(std::string_view text) {
  const std::size_t space = std::min(text.find(' '), text.size());
  const std::string_view name = text.substr(0, space);
  for (const Driver& driver : all_drivers()) {
    if (driver.name == name) {
      Line line = default_line(driver);
      line.set("isa", std::string(isa_name(active_isa())));
      line.read(text.substr(space));
      return line;
    }
  }
  std::string known;
  for (const Driver& driver : all_drivers()) {
    known += (known.empty() ? "" : ", ") + driver.name;
  }
  throw LineError("unknown driver " + std::string(name) + "; expected " + known);
}

const Driver& driver_of(const Line& line) {
  for (const Driver& driver : all_drivers()) {
    if (driver.name == line.driver()) {
      return driver;
    }
  }
  throw LineError("unknown driver " + line.driver());
}

}  // namespace tidegate::fuzz
