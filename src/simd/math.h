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

}  // namespace tidegate::TIDEGATE_ISA
