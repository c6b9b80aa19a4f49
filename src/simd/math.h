// Functions of the model over the vocabulary. Relative error below 1e-7 for exp, 1.8e-7 for sigmoid and silu, 2.3e-7
// for softplus; denormal results are off by one of their units at most, silu by 1.1. No step overflows where the result
// does not.
#pragma once

namespace tidegate::TIDEGATE_ISA {

// e^x (kSign = 1) or e^-x (kSign = -1) as mantissa * 2^exponent, the mantissa within [0.7, 1.42].
struct Power {
  F32 mantissa;
  F32 exponent;
};

// x = kSign n ln2 + r, |r| <= ln2/2; e^r = 1 + r + r^2 q(r), q minimax of degree 4, relative error 3.1e-9. For e^-r the
// odd coefficients change their sign.
template <int kSign>
TIDEGATE_INLINE Power exp_parts(F32 x) {
  const F32 n = round(x * set1(kSign * 1.44269504f));
  // ln2 in two parts; the first has 15 trailing zero bits, so n times it is exact.
  const F32 r = fma(n, set1(kSign * 2.12194440e-4f), fma(n, set1(kSign * -0.693359375f), x));
  F32 q = set1(1.381461326e-3f);
  q = fma(q, r, set1(kSign * 8.368709824e-3f));
  q = fma(q, r, set1(4.166838736e-2f));
  q = fma(q, r, set1(kSign * 1.666652069e-1f));
  q = fma(q, r, set1(4.999999345e-1f));
  q = fma(q, r, set1(kSign * 1.0f));
  return {fma(q, r, set1(1.0f)), n};
}

TIDEGATE_INLINE F32 exp(F32 x) {
  // Below -104 the result is 0 in fp32, above 89 it is inf; the bounds come first so that NaN passes.
  const Power e = exp_parts<1>(max(set1(-104.0f), min(set1(89.0f), x)));
  return scale_by_power(e.mantissa, e.exponent);
}

// numerator / (1 + e^-x). From 80 on the sum is 1; at the lower bound n is 255, where the quotient is 0 for any finite
// numerator. An infinite one gives NaN there, as inf / inf does.
TIDEGATE_INLINE F32 over_one_plus_exp(F32 numerator, F32 x) {
  const Power e = exp_parts<-1>(max(set1(-176.75f), min(set1(80.0f), x)));
  return over_one_plus(numerator, e.mantissa, e.exponent);
}

TIDEGATE_INLINE F32 sigmoid(F32 x) { return over_one_plus_exp(set1(1.0f), x); }

TIDEGATE_INLINE F32 silu(F32 x) { return over_one_plus_exp(x, x); }

// Derivative of silu at x, s = sigmoid(x). Absolute error below 1e-6.
TIDEGATE_INLINE F32 silu_slope(F32 x, F32 s) { return s * fma(x, set1(1.0f) - s, set1(1.0f)); }

// ln(1 + e) for 0 <= e <= 1 as 2 atanh(s/2) with s = 2e / (2 + e), which is e itself for the smallest e.
TIDEGATE_INLINE F32 log1p_unit(F32 e) {
  const F32 s = (e + e) / (set1(2.0f) + e);
  const F32 t = s * s;
  F32 p = set1(5.473527143e-4f);
  p = fma(p, t, set1(2.187432895e-3f));
  p = fma(p, t, set1(1.250678096e-2f));
  p = fma(p, t, set1(8.333301641e-2f));
  return fma(p * t, s, s);
}

TIDEGATE_INLINE F32 softplus(F32 x) { return max(zero(), x) + log1p_unit(exp(zero() - abs(x))); }

// rate * value of a gate. An infinite rate times 0 is 0: a gate that is closed stays closed. NaN stays NaN.
TIDEGATE_INLINE F32 times_rate(F32 rate, F32 value) {
  const F32 infinite = select(equal(value, zero()), zero(), rate * value);
  return select(equal(rate, set1(__builtin_inff())), infinite, rate * value);
}

TIDEGATE_INLINE F32x2 operator*(F32x2 x, F32x2 y) { return {x.a * y.a, x.b * y.b}; }
template <class T>
TIDEGATE_INLINE F32x2 round_to(F32x2 v, const T* like) {
  return {round_to(v.a, like), round_to(v.b, like)};
}

// Which of 2 * kLanes neighbours in memory of type T stands at place i of an F32x2 that was loaded there.
template <class T>
static constexpr int pair_element(int i, const T*) {
  return i;
}
[[maybe_unused]] static constexpr int pair_element(int i, const bf16*) { return i % kLanes * 2 + i / kLanes; }

TIDEGATE_INLINE constexpr bool is_bf16(const bf16*) { return true; }
TIDEGATE_INLINE constexpr bool is_bf16(const f16*) { return false; }

// sigmoid and silu for results of 16 bits, several vectors step by step so that their chains overlap: an out-of-order
// core holds only about two of these chains at a time by itself. x is replaced by numerator / (1 + e^-x). The relative
// error is 3e-6 for bf16 and 2e-6 for f16, a hundredth of their rounding at the least; from -87 down the value of -87
// stands.
template <bool kSilu, int N, class T>
TIDEGATE_INLINE void gate_group(F32 (&x)[N], const T* type) {
  const F32 log2e = set1(-1.44269504f);
  const F32 magic = set1(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  F32 v[N];
  F32 shifted[N];
  F32 r[N];
  F32 q[N];
  for (int i = 0; i < N; ++i) x[i] = max(set1(-87.0f), x[i]);
  for (int i = 0; i < N; ++i) v[i] = min(set1(87.0f), x[i]);
  for (int i = 0; i < N; ++i) shifted[i] = fma(v[i], log2e, magic);
  for (int i = 0; i < N; ++i) r[i] = magic - shifted[i];
  for (int i = 0; i < N; ++i) r[i] = fma(v[i], log2e, r[i]);  // -x log2(e) = n + r, |r| <= 1/2
  // 2^r, minimax: degree 4 has relative error 2.6e-6, degree 5 7.5e-8.
  if (is_bf16(type)) {
    for (int i = 0; i < N; ++i) q[i] = fma(set1(9.5701018633e-3f), r[i], set1(5.59178603406e-2f));
    for (int i = 0; i < N; ++i) q[i] = fma(q[i], r[i], set1(2.40247448315e-1f));
    for (int i = 0; i < N; ++i) q[i] = fma(q[i], r[i], set1(6.93121814743e-1f));
    for (int i = 0; i < N; ++i) q[i] = fma(q[i], r[i], set1(9.99999261442e-1f));
  } else {
    for (int i = 0; i < N; ++i) q[i] = fma(set1(1.3276472632e-3f), r[i], set1(9.67554134312e-3f));
    for (int i = 0; i < N; ++i) q[i] = fma(q[i], r[i], set1(5.55071327186e-2f));
    for (int i = 0; i < N; ++i) q[i] = fma(q[i], r[i], set1(2.40221197237e-1f));
    for (int i = 0; i < N; ++i) q[i] = fma(q[i], r[i], set1(6.93146967065e-1f));
    for (int i = 0; i < N; ++i) q[i] = fma(q[i], r[i], set1(1.00000007165f));
  }
  for (int i = 0; i < N; ++i) q[i] = set1(1.0f) + add_exponent(q[i], shifted[i]);
  for (int i = 0; i < N; ++i) x[i] = (kSilu ? x[i] : set1(1.0f)) / q[i];
}
// fp32 results keep the accuracy of silu and sigmoid.
template <bool kSilu, int N>
TIDEGATE_INLINE void gate_group(F32 (&x)[N], const float*) {
  for (int i = 0; i < N; ++i) x[i] = kSilu ? silu(x[i]) : sigmoid(x[i]);
}

// softplus of several vectors step by step, with the accuracy of softplus.
template <int N>
TIDEGATE_INLINE void softplus_group(F32 (&x)[N]) {
  Power e[N];
  F32 s[N];
  F32 t[N];
  F32 p[N];
  for (int i = 0; i < N; ++i) e[i] = exp_parts<1>(max(set1(-104.0f), zero() - abs(x[i])));
  for (int i = 0; i < N; ++i) s[i] = scale_by_power(e[i].mantissa, e[i].exponent);
  for (int i = 0; i < N; ++i) s[i] = (s[i] + s[i]) / (set1(2.0f) + s[i]);
  for (int i = 0; i < N; ++i) t[i] = s[i] * s[i];
  for (int i = 0; i < N; ++i) p[i] = fma(set1(5.473527143e-4f), t[i], set1(2.187432895e-3f));
  for (int i = 0; i < N; ++i) p[i] = fma(p[i], t[i], set1(1.250678096e-2f));
  for (int i = 0; i < N; ++i) p[i] = fma(p[i], t[i], set1(8.333301641e-2f));
  for (int i = 0; i < N; ++i) x[i] = max(zero(), x[i]) + fma(p[i] * t[i], s[i], s[i]);
}

}  // namespace tidegate::TIDEGATE_ISA
