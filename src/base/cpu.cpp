#include "tidegate/cpu.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "tidegate/error.h"

namespace tidegate {
namespace {

constexpr std::string_view kNames[kIsaCount] = {"scalar", "avx2", "avx512", "avx512_bf16"};

#if defined(__x86_64__)
// Asked by hand: clang 16 does not know the name "f16c". The operating system saves its registers if it saves AVX's.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

bool supported(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") && has_f16c();
#ifdef TIDEGATE_EMULATE_AVX512
  const bool avx512 = avx2;
  const bool bf16 = avx2;
#else
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#endif
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx512Bf16:
      return bf16;
  }
  return false;
#else
  return isa == Isa::kScalar;
#endif
}

std::string names(const std::vector<Isa>& isas) {
  std::string list;
  for (const Isa isa : isas) {
    list += (list.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  return list;
}

Isa parse(std::string_view source, std::string_view name) {
  const auto* found = std::find(kNames, kNames + kIsaCount, name);
  const auto all = available_isas();
  check(found != kNames + kIsaCount, source, ": expected one of ", names(all), ", got ", name);
  const auto isa = static_cast<Isa>(found - kNames);
  check(std::find(all.begin(), all.end(), isa) != all.end(), source, ": expected one of ", names(all),
        " (what this CPU supports), got ", name);
  return isa;
}

// -1 = not chosen yet. Relaxed is enough: the value stands for itself.
std::atomic<int> chosen{-1};

}  // namespace

std::string_view isa_name(Isa isa) {
  const int i = static_cast<int>(isa);
  return i < kIsaCount ? kNames[i] : "unknown";
}

std::vector<Isa> available_isas() {
  std::vector<Isa> list;
  for (int i = 0; i < kIsaCount; ++i) {
    if (supported(static_cast<Isa>(i))) {
      list.push_back(static_cast<Isa>(i));
    }
  }
  return list;
}

Isa active_isa() {
  const int known = chosen.load(std::memory_order_relaxed);
  if (known >= 0) [[likely]] {
    return static_cast<Isa>(known);
  }
  const char* wanted = std::getenv("TIDEGATE_ISA");
  const Isa isa = wanted != nullptr && *wanted != '\0' ? parse("TIDEGATE_ISA", wanted) : available_isas().back();
  int earlier = -1;  // a set_isa that came in between wins
  const bool first = chosen.compare_exchange_strong(earlier, static_cast<int>(isa), std::memory_order_relaxed);
  return first ? isa : static_cast<Isa>(earlier);
}

void set_isa(Isa isa) { set_isa(isa_name(isa)); }
void set_isa(std::string_view name) {
  chosen.store(static_cast<int>(parse("set_isa", name)), std::memory_order_relaxed);
}

}  // namespace tidegate
