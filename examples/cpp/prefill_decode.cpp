// One layer's gated delta rule as a server uses it: a prompt in one call (prefill), then tokens one by one on the state
// that stays where it is (decode). No torch, no Python.
#include <tidegate/tidegate.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr std::int64_t kKeyHeads = 2, kHeads = 4, kKeys = 64, kValues = 64;  // HK, HV, K, V
constexpr std::int64_t kPrompt = 100, kTokens = 108;

// Numbers that look random and are the same everywhere.
std::vector<float> numbers(std::int64_t count, unsigned seed, float low, float high) {
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& x : out) {
    seed = seed * 1664525u + 1013904223u;
    x = low + (high - low) * static_cast<float>(seed >> 8) / 16777216.0f;
  }
  return out;
}

// Tokens [begin, end) of a buffer whose tokens have `sizes` each.
tidegate::TensorView tokens(std::vector<float>& data, std::int64_t begin, std::int64_t end, std::int64_t heads,
                            std::int64_t width) {
  float* at = data.data() + begin * heads * (width > 0 ? width : 1);
  return width > 0 ? tidegate::contiguous(at, tidegate::DType::kF32, {end - begin, heads, width})
                   : tidegate::contiguous(at, tidegate::DType::kF32, {end - begin, heads});
}

}  // namespace

int main() {
  using tidegate::contiguous;
  using tidegate::DType;
  using tidegate::SeqLens;
  std::vector<float> q = numbers(kTokens * kKeyHeads * kKeys, 1, -1, 1);
  std::vector<float> k = numbers(kTokens * kKeyHeads * kKeys, 2, -1, 1);
  std::vector<float> v = numbers(kTokens * kHeads * kValues, 3, -1, 1);
  std::vector<float> g = numbers(kTokens * kHeads, 4, -0.2f, 0);  // log of the decay, never positive
  std::vector<float> beta = numbers(kTokens * kHeads, 5, 0, 1);   // how strongly a token writes
  std::vector<float> o(v.size()), whole(v.size());

  // Prefill: the state of the prompt goes to slot 2 of a pool of four.
  std::vector<float> pool(4 * kHeads * kKeys * kValues);
  const auto state = contiguous(pool.data(), DType::kF32, {4, kHeads, kKeys, kValues});
  const std::vector<std::int64_t> slot = {2};
  tidegate::ChunkGatedDeltaRuleOptions prefill;
  prefill.layout = tidegate::Layout::kTND;
  prefill.use_qk_l2norm = true;
  prefill.state_indices = slot;
  tidegate::chunk_gated_delta_rule_pool(tokens(q, 0, kPrompt, kKeyHeads, kKeys),
                                        tokens(k, 0, kPrompt, kKeyHeads, kKeys), tokens(v, 0, kPrompt, kHeads, kValues),
                                        tokens(g, 0, kPrompt, kHeads, 0), tokens(beta, 0, kPrompt, kHeads, 0), state,
                                        tokens(o, 0, kPrompt, kHeads, kValues), SeqLens::dense(1, kPrompt), prefill);

  // Decode: one token a call; the state in the slot moves on.
  tidegate::RecurrentGatedDeltaRuleOptions decode;
  decode.use_qk_l2norm = true;
  decode.state_indices = slot;
  for (std::int64_t t = kPrompt; t < kTokens; ++t) {
    tidegate::recurrent_gated_delta_rule(tokens(q, t, t + 1, kKeyHeads, kKeys), tokens(k, t, t + 1, kKeyHeads, kKeys),
                                         tokens(v, t, t + 1, kHeads, kValues), tokens(g, t, t + 1, kHeads, 0), {},
                                         tokens(beta, t, t + 1, kHeads, 0), state, tokens(o, t, t + 1, kHeads, kValues),
                                         SeqLens::dense(1, 1), decode);
  }

  // The same in one call over all tokens.
  prefill.state_indices = {};
  tidegate::chunk_gated_delta_rule_fwd(
      tokens(q, 0, kTokens, kKeyHeads, kKeys), tokens(k, 0, kTokens, kKeyHeads, kKeys),
      tokens(v, 0, kTokens, kHeads, kValues), tokens(g, 0, kTokens, kHeads, 0), tokens(beta, 0, kTokens, kHeads, 0), {},
      tokens(whole, 0, kTokens, kHeads, kValues), {}, {}, SeqLens::dense(1, kTokens), prefill);
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < o.size(); ++i) {
    difference += (o[i] - whole[i]) * (o[i] - whole[i]);
    size += whole[i] * whole[i];
  }
  const double relative = std::sqrt(difference / size);
  std::printf("tidegate %s on %s: %lld tokens of prefill, %lld of decode, off by %.1e from all at once\n",
              TIDEGATE_VERSION, tidegate::isa_name(tidegate::active_isa()).data(), static_cast<long long>(kPrompt),
              static_cast<long long>(kTokens - kPrompt), relative);
  return relative < 1e-5 ? 0 : 1;
}
