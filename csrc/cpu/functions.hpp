// The functions of the table in plantune/graph/ops/functions.py that are not expressions of C, and
// the one that a unit is compiled with: ReLU in what wheels carry, else what is defined.

#pragma once

#include <math.h>

#include <cstddef>

namespace plantune {

// NaN stays.
template <typename T>
inline T relu(T x) {
  return x < T{} ? T{} : x;
}
inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
inline float silu(float x) { return x * sigmoid(x); }
inline float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }
inline float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}
// NaN stays.
inline float hardsigmoid(float x) {
  const float six = x + 3.0f <= 0.0f ? 0.0f : x + 3.0f >= 6.0f ? 6.0f : x + 3.0f;
  return six / 6.0f;
}
inline float hardswish(float x) { return x * hardsigmoid(x); }
inline float elu(float x) { return x > 0.0f ? x : expm1f(x); }
inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
inline float mish(float x) { return x * tanhf(log1pf(expf(x))); }

#ifdef PLANTUNE_FUNCTION
struct Function {
  static float of(float x) { return PLANTUNE_FUNCTION(x); }
  // Each of several numbers.
  template <typename T>
  static T of(T x) {
    for (size_t i = 0; i < sizeof x / sizeof x[0]; ++i) x[i] = of(float(x[i]));
    return x;
  }
};
#else
struct Function {
  template <typename T>
  static T of(T x) {
    return relu(x);
  }
};
#endif

}  // namespace plantune
