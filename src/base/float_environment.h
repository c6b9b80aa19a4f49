// The floating-point environment that all arithmetic of the library assumes: round to nearest, denormals kept.
#pragma once

#if !defined(__x86_64__)
#include <cfenv>
#endif

namespace tidegate {

// Set while it lives, the caller's is put back afterwards. Tasks get it from run_parallel; an operator needs one too,
// because what it computes before and after its tasks (rates, packed parameters, final sums) must not flush either.
// Not inline: arithmetic must not move across it.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace tidegate
