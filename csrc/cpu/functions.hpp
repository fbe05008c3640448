// The functions of the table in plantune/graph/ops/functions.py that are no expressions of C, and
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
