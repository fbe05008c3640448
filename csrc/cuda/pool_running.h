// What a pool has of a window so far, for a vector of channels: the largest, the largest and its
// place, or the sum.
//
// The largest is PyTorch's: NaN wins, the last one of several; else the first of equals. What
// outside() says counts for nothing.

#pragma once

#include "cuda/operands.h"

namespace plantune {

/// The larger of two numbers, NaN if one of them is.
__device__ __forceinline__ float larger_of(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return b > a || b != b ? b : a;
#endif
}

/// The same for each element, in the elements' own type: to compare rounds nothing.
template <typename T, int kSize>
__device__ __forceinline__ void take_larger(Vector<T, kSize>& best, const Vector<T, kSize>& x) {
#pragma unroll
  for (int k = 0; k < kSize; ++k) best.values[k] = from_float<T>(larger_of(best[k], x[k]));
}

#if __CUDA_ARCH__ >= 800
#define PLANTUNE_TAKE_LARGER(T, pair)                                                            \
  template <int kSize>                                                                           \
  __device__ __forceinline__ void take_larger(Vector<T, kSize>& best, const Vector<T, kSize>& x) { \
    if constexpr (kSize % 2 != 0) {                                                              \
      best.values[0] = from_float<T>(larger_of(best[0], x[0]));                                  \
    } else {                                                                                     \
      unsigned* to = reinterpret_cast<unsigned*>(best.values);                                   \
      const unsigned* from = reinterpret_cast<const unsigned*>(x.values);                        \
      _Pragma("unroll") for (int i = 0; i < kSize / 2; ++i) {                                    \
        asm("max.NaN." pair " %0, %0, %1;" : "+r"(to[i]) : "r"(from[i]));                        \
      }                                                                                          \
    }                                                                                            \
  }
PLANTUNE_TAKE_LARGER(__half, "f16x2")
PLANTUNE_TAKE_LARGER(__nv_bfloat16, "bf16x2")
#undef PLANTUNE_TAKE_LARGER
#endif

template <typename T, int kSize>
struct Larger {
  using Word = Vector<T, kSize>;
  static __device__ __forceinline__ float outside() { return __int_as_float(0xFF800000); }
  Word best;

  __device__ __forceinline__ void begin(int) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) best.values[k] = from_float<T>(outside());
  }
  __device__ __forceinline__ void take(const Word& x, int) { take_larger(best, x); }
  __device__ __forceinline__ void merge(const Larger& other, int) {
    take_larger(best, other.best);
  }
  /// What is made of it, in the elements of an output.
  template <typename Made>
  __device__ __forceinline__ Neighbours<Made, kSize> made(float) const {
    Neighbours<Made, kSize> to;
    leave(to);
    return to;
  }

 private:
  __device__ __forceinline__ void leave(Neighbours<T, kSize>& to) const { to.words[0] = best; }
  template <typename Made>
  __device__ __forceinline__ void leave(Neighbours<Made, kSize>& to) const {
    float largest[kSize];
#pragma unroll
    for (int k = 0; k < kSize; ++k) largest[k] = best[k];
    to.round(largest);
  }
};

template <typename T, int kSize>
struct Winner {
  using Word = Vector<T, kSize>;
  static __device__ __forceinline__ float outside() { return __int_as_float(0xFF800000); }
  float best[kSize];
  int place[kSize];

  /// `first` is the place if all are the least.
  __device__ __forceinline__ void begin(int first) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) best[k] = outside(), place[k] = first;
  }
  __device__ __forceinline__ void take(const Word& x, int at) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) take(k, x[k], at);
  }
  /// Takes what won among other elements, whose places are counted from `start`.
  __device__ __forceinline__ void merge(const Winner& other, int start) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) take(k, other.best[k], start + other.place[k]);
  }
  template <typename Made>
  __device__ __forceinline__ Neighbours<Made, kSize> made(float) const {
    Neighbours<Made, kSize> rounded;
    rounded.round(best);
    return rounded;
  }

 private:
  __device__ __forceinline__ void take(int k, float value, int at) {
    if (value > best[k] || value != value) best[k] = value, place[k] = at;
  }
};

template <typename T, int kSize>
struct Added {
  using Word = Vector<T, kSize>;
  static __device__ __forceinline__ float outside() { return 0.f; }
  float sum[kSize];

  __device__ __forceinline__ void begin(int) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) sum[k] = 0.f;
  }
  __device__ __forceinline__ void take(const Word& x, int) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) sum[k] += x[k];
  }
  __device__ __forceinline__ void merge(const Added& other, int) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) sum[k] += other.sum[k];
  }
  template <typename Made>
  __device__ __forceinline__ Neighbours<Made, kSize> made(float divisor) const {
    const float part = 1.f / divisor;
    float mean[kSize];
#pragma unroll
    for (int k = 0; k < kSize; ++k) mean[k] = sum[k] * part;
    Neighbours<Made, kSize> rounded;
    rounded.round(mean);
    return rounded;
  }
};

}  // namespace plantune
