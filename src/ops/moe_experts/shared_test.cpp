// A shared expert whose gate and up lie differently in memory or have different types: each product reads its own.
#include "ops/moe_experts/test_case.h"

namespace tidegate::test {
namespace {

Tensor copied(const Tensor& t, DType dtype, const Form& form) {
  Tensor out(dtype, t.sizes(), form);
  for (std::int64_t i = 0; i < t.view().numel(); ++i) {
    out.set(i, t.get(i));
  }
  return out;
}

TEST(MoeExpertsShared, UnlikeWeights) {
  for_each_isa([] {
    for (const DType dtype : kKernelTypes) {
      Random random;
      const ExpertsCase e = make_experts(random, {20, 64, 40, 4, 2, 48, dtype, dtype});
      const Form turned = permuted({1, 0});
      const double limit = dtype == DType::kF32 ? 1e-5 : 2e-2;
      const Tensor want = forward(e);
      const ExpertsGradients gradients = backward(e);
      for (int kind = 0; kind < 4; ++kind) {
        ExpertsCase other = e;
        Tensor& weight = kind % 2 == 0 ? other.shared_gate : other.shared_up;
        weight = kind < 2 ? copied(weight, dtype, turned) : copied(weight, DType::kF32, {});
        const Tensor got = forward(other);
        for (std::int64_t i = 0; i < want.view().numel(); ++i) {
          ASSERT_NEAR(got.get(i), want.get(i), limit * (1.0 + std::abs(want.get(i)))) << kind;
        }
        const ExpertsGradients found = backward(other);
        for (const int g : {0, 4, 5, 6, 7}) {  // dx and those of the shared expert
          double scale = 0.0;
          for (const double x : values(gradients.g[g])) {
            scale = std::max(scale, std::abs(x));
          }
          for (std::int64_t i = 0; i < gradients.g[g].view().numel(); ++i) {
            ASSERT_NEAR(found.g[g].get(i), gradients.g[g].get(i), limit * scale) << kGradientNames[g] << " " << kind;
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace tidegate::test
