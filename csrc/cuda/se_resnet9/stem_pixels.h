// The pixels that a stem reads, of whichever type, as the floats that its operands are made of.

#pragma once

#include "cuda/vector.h"

namespace plantune {

/// What the pixels are, and whether each channel has a scale and a shift.
template <typename In_, bool kScaled_>
struct StemPixels {
  using In = In_;
  static constexpr bool kScaled = kScaled_;
};

/// Pixels of type In that are operands of type T as they are stored.
template <typename T, typename Pixels>
struct AreOperands {
  static constexpr bool kValue = false;
};
template <typename T>
struct AreOperands<T, StemPixels<T, false>> {
  static constexpr bool kValue = true;
};

template <>
__device__ __forceinline__ unsigned char from_float<unsigned char>(float value) {
  return static_cast<unsigned char>(value);
}

template <typename In>
__device__ __forceinline__ void widen_run(float (&values)[4], const Vector<In, 4>& run) {
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = run[i];
}
/// A byte after the digits of 2^23 is a float; a conversion would take four times as long.
__device__ __forceinline__ void widen_run(float (&values)[4],
                                          const Vector<unsigned char, 4>& run) {
  const unsigned bytes = *reinterpret_cast<const unsigned*>(run.values);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = __uint_as_float(__byte_perm(bytes, 0x4B000000u, 0x7540 + i)) - 8388608.f;
  }
}

}  // namespace plantune
