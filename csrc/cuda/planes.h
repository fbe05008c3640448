// Factors of products in 16 bits, made of floats that are read from shared memory.
//
// One plane is a float rounded. Three planes of bfloat16 together are the float itself:
//
//   x = x0 + x1 + x2,  x * w ~ x2 w0 + x1 w1 + x0 w2 + x1 w0 + x0 w1 + x0 w0
//
// What is left out is 2^-24 of the product. x0 is what a float has in its upper half, so that it
// never overflows; the others are rounded.
//
// NaN and infinities are in the last plane alone, which meets nothing but w0: an infinity stays one
// of the right sign, as w0 has the sign of w. In x0 it would meet planes of w that are zero, or
// have the other sign, and leave NaN. Of two infinities the product is NaN.

#pragma once

#include <cuda/std/cstdint>

#include "cuda/vector.h"

namespace plantune {

template <class T>
__device__ __forceinline__ float2 unpacked(uint32_t word) {
  Vector<T, 2> two;
  *reinterpret_cast<uint32_t*>(two.values) = word;
  return {two[0], two[1]};
}

template <class T>
__device__ __forceinline__ uint32_t packed(float2 v) {
  Vector<T, 2> two;
  const float values[2] = {v.x, v.y};
  two.round(values);
  return *reinterpret_cast<const uint32_t*>(two.values);
}

/// The upper halves of two floats, as two bfloat16.
__device__ __forceinline__ uint32_t upper_halves(float2 v) {
  return __byte_perm(__float_as_uint(v.x), __float_as_uint(v.y), 0x7632);
}

/// Ones for each half of a word that is finite as a bfloat16, zeros for others.
__device__ __forceinline__ uint32_t finite_halves(uint32_t word) {
  const uint32_t sizes = word & 0x7FFF7FFF, infinities = 0x7F807F80;
  return __hlt2_mask(reinterpret_cast<const __nv_bfloat162&>(sizes),
                     reinterpret_cast<const __nv_bfloat162&>(infinities));
}

/// The planes of two neighbours, a word each.
template <class T, int kPlanes>
__device__ __forceinline__ void split(float2 v, uint32_t (&planes)[kPlanes]) {
  static_assert(kPlanes == 1 || sizeof(T) == 2, "a word has two factors");
  if constexpr (kPlanes == 1) {
    planes[0] = packed<T>(v);
  } else {
    planes[0] = upper_halves(v);
    const uint32_t finite = finite_halves(planes[0]);
#pragma unroll
    for (int i = 1; i < kPlanes; ++i) {
      planes[i - 1] &= finite;
      const float2 taken = unpacked<__nv_bfloat16>(planes[i - 1]);
      v.x -= taken.x, v.y -= taken.y;
      planes[i] = packed<__nv_bfloat16>(v);
    }
  }
}

}  // namespace plantune
