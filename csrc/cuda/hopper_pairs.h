// Products whose rows are channels and whose columns are pixels. Row 16 a + 8 b + c of 64 is
// channel 16 a + 2 c + b: the two rows of a thread are neighbouring channels, a word of an NHWC
// image.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace plantune {

/// Two neighbouring channels of a pixel.
template <typename T>
struct Pair;
template <>
struct Pair<__half> {
  using Type = __half2;
  static constexpr unsigned kLeast = 0xFC00FC00u;  // -infinity, twice
  static __device__ __forceinline__ Type of(float a, float b) { return __floats2half2_rn(a, b); }
  static __device__ __forceinline__ float2 floats(Type v) { return __half22float2(v); }
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static constexpr unsigned kLeast = 0xFF80FF80u;
  static __device__ __forceinline__ Type of(float a, float b) {
    return __floats2bfloat162_rn(a, b);
  }
  static __device__ __forceinline__ float2 floats(Type v) { return __bfloat1622float2(v); }
};

/// NaN wins.
template <typename Two>
__device__ __forceinline__ Two larger(Two a, Two b) {
  return __hmax2_nan(a, b);
}

template <typename T>
__device__ __forceinline__ typename Pair<T>::Type least() {
  const unsigned bits = Pair<T>::kLeast;
  return *reinterpret_cast<const typename Pair<T>::Type*>(&bits);
}

/// The first of a thread's two channels, of the 64 that its warpgroup has.
__device__ __forceinline__ int pair_of(int thread) {
  return thread % 128 / 32 * 16 + thread % 32 / 4 * 2;
}

/// Where a thread's pair of a pixel is in a tile that tensor copies bring and take: a row of 128
/// bytes for each pixel, whose 16-byte pieces are swizzled.
__device__ __forceinline__ unsigned pair_place(int pixel) {
  const int byte = pair_of(threadIdx.x) * 2;
  return pixel * 128 + ((byte / 16) ^ (pixel % 8)) * 16 + byte % 16;
}

template <typename T>
__device__ __forceinline__ float2 pair_in(unsigned word) {
  return Pair<T>::floats(*reinterpret_cast<const typename Pair<T>::Type*>(&word));
}

template <typename T>
__device__ __forceinline__ unsigned word_of(float2 v) {
  const typename Pair<T>::Type two = Pair<T>::of(v.x, v.y);
  return *reinterpret_cast<const unsigned*>(&two);
}

/// Of each 8 columns a thread has numbers 2 * (lane % 4) and the next: `which` says which.
/// They are scaled where kScale says so, and get a bias.
template <bool kScale, int kSize>
__device__ __forceinline__ float2 pair_at(const float (&sums)[kSize], int eight, int which,
                                          const float (&scale)[2], const float (&bias)[2]) {
  const float a = sums[4 * eight + which], b = sums[4 * eight + 2 + which];
  if constexpr (kScale) return {fmaf(a, scale[0], bias[0]), fmaf(b, scale[1], bias[1])};
  return {a + bias[0], b + bias[1]};
}

}  // namespace plantune
