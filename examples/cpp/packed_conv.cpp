// Convolves three packed sequences, then each one alone, and compares the bits. No torch, no Python.
#include <tidegate/tidegate.h>

#include <cstdio>
#include <cstring>
#include <vector>

int main() {
  constexpr std::int64_t D = 96;
  constexpr std::int64_t W = 4;
  const std::vector<std::int64_t> cu = {0, 5, 5, 70};  // the second sequence is empty
  const std::int64_t T = cu.back();
  std::vector<float> x(static_cast<std::size_t>(T * D));
  std::vector<float> weight(static_cast<std::size_t>(D * W));
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i * 7919 % 1000) / 500.0f - 1.0f;
  }
  for (std::size_t i = 0; i < weight.size(); ++i) {
    weight[i] = static_cast<float>(i * 104729 % 1000) / 1000.0f - 0.5f;
  }
  using tidegate::contiguous;
  using tidegate::DType;
  const auto taps = contiguous(weight.data(), DType::kF32, {D, W});
  tidegate::CausalConv1dOptions options;
  options.activation = tidegate::Activation::kSilu;
  options.layout = tidegate::Layout::kTND;

  std::vector<float> packed(x.size());
  tidegate::causal_conv1d_fwd(contiguous(x.data(), DType::kF32, {T, D}), taps, {}, {},
                              contiguous(packed.data(), DType::kF32, {T, D}), {}, tidegate::SeqLens::from_cu(cu, T),
                              options);

  std::vector<float> alone(x.size());
  for (std::size_t n = 0; n + 1 < cu.size(); ++n) {
    const std::int64_t length = cu[n + 1] - cu[n];
    const auto at = static_cast<std::size_t>(cu[n] * D);
    tidegate::causal_conv1d_fwd(contiguous(x.data() + at, DType::kF32, {length, D}), taps, {}, {},
                                contiguous(alone.data() + at, DType::kF32, {length, D}), {},
                                tidegate::SeqLens::dense(1, length), options);
  }
  const bool same = std::memcmp(packed.data(), alone.data(), packed.size() * sizeof(float)) == 0;
  std::printf("tidegate %s on %s: packed and separate results %s\n", TIDEGATE_VERSION,
              tidegate::isa_name(tidegate::active_isa()).data(), same ? "have the same bits" : "DIFFER");

  try {  // a wrong call says what is wrong
    tidegate::SeqLens::from_cu(std::vector<std::int64_t>{0, 12, 8, 16}, 16);
  } catch (const tidegate::Error& error) {
    std::printf("a wrong call: %s\n", error.what());
  }
  return same ? 0 : 1;
}
