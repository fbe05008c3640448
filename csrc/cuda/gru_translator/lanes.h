// Rows that a warp holds together: lane l has the vectors of 4 floats from 4 l, 4 l + 128, ... on.

#pragma once

#include "cuda/vector.h"

namespace plantune {

constexpr int kLaneSpan = 128;  // floats of one vector of each lane

template <int kVectors>
__device__ __forceinline__ void load_lanes(float4 (&to)[kVectors], const float* from, int lane) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    to[j] = __ldg(reinterpret_cast<const float4*>(from + j * kLaneSpan) + lane);
  }
}

/// The lane's vector `j` of a row in shared memory.
__device__ __forceinline__ float4 read_lane(const float* from, int j, int lane) {
  return reinterpret_cast<const float4*>(from + j * kLaneSpan)[lane];
}

/// As load_lanes, from shared memory.
template <int kVectors>
__device__ __forceinline__ void read_lanes(float4 (&to)[kVectors], const float* from, int lane) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) to[j] = read_lane(from, j, lane);
}

template <int kVectors>
__device__ __forceinline__ void store_lanes(float* to, const float4 (&from)[kVectors], int lane) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    reinterpret_cast<float4*>(to + j * kLaneSpan)[lane] = from[j];
  }
}

/// Brings a row into L2.
template <int kFloats>
__device__ __forceinline__ void prefetch_lanes(const float* from, int lane) {
  constexpr int kLine = 32;  // floats
  for (int at = lane * kLine; at < kFloats; at += 32 * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
  }
}

__device__ __forceinline__ float dot(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

/// `sum` and the lane's part of the product of two rows.
template <int kVectors>
__device__ __forceinline__ float dot(
    const float4 (&a)[kVectors], const float4 (&b)[kVectors], float sum) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) sum = dot(a[j], b[j], sum);
  return sum;
}

/// As dot, with a row in shared memory.
template <int kVectors>
__device__ __forceinline__ float dot_lanes(
    const float4 (&a)[kVectors], const float* row, int lane, float sum) {
  float4 b[kVectors];
  read_lanes(b, row, lane);
  return dot(a, b, sum);
}

/// Each value summed over the warp, the same in all lanes.
template <int kValues>
__device__ __forceinline__ void sum_lanes(float (&values)[kValues]) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] += __shfl_xor_sync(~0u, values[i], other);
  }
}

/// kCount values summed over the warp: those of value `i` come to lanes from 32 / kCount * i on. A
/// lane passes on the half of the values that it does not end with, so there are few shuffles.
template <int kCount>
__device__ __forceinline__ float fold_lanes(float (&values)[kCount]) {
  static_assert(kCount == power_below(kCount) && kCount <= 32, "values divide evenly among lanes");
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int left = kCount / 2, other = 16; other > 0; left /= 2, other /= 2) {
    if (left == 0) {
      values[0] += __shfl_xor_sync(~0u, values[0], other);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i >= left) break;
      const bool upper = lane & other;
      const float kept = upper ? values[i + left] : values[i];
      const float passed = upper ? values[i] : values[i + left];
      values[i] = kept + __shfl_xor_sync(~0u, passed, other);
    }
  }
  return values[0];
}

/// Rows of kCount samples summed over the warp: a lane gets all rows of sample `at`.
template <int kCount, int kRows>
__device__ __forceinline__ void sum_rows(float (&sums)[kCount][kRows], int at, float (&to)[kRows]) {
  constexpr int kPadded = kRows > 2 ? 4 : kRows;
  static_assert(kRows <= 4, "a sample's rows are padded to at most four");
  float values[kCount * kPadded] = {};
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) values[s * kPadded + i] = sums[s][i];
  }
  const float sum = fold_lanes(values);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    to[i] = __shfl_sync(~0u, sum, (at * kPadded + i) * (32 / (kCount * kPadded)));
  }
}

#if __CUDA_ARCH__ >= 800  // whose warps reduce integers in one instruction
/// The largest key of the warp, and the smallest place that has it.
__device__ __forceinline__ void first_of_largest(unsigned int& key, unsigned int& at) {
  const unsigned int largest = __reduce_max_sync(~0u, key);
  at = __reduce_min_sync(~0u, key == largest ? at : ~0u);
  key = largest;
}
#endif

/// An integer that grows with the number; NaN is above all, as torch has it.
__device__ __forceinline__ unsigned int ordered(float value) {
  if (value != value) return ~0u;
  const unsigned int bits = __float_as_uint(value + 0.f);  // -0 and 0 are equal
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

/// Its error is absolute, about 1e-7.
__device__ __forceinline__ float tanh_of(float x) {
  return 1.f - __fdividef(2.f, 1.f + expf(2.f * x));
}

/// Waits at barrier `kName` until so many threads of the block have come.
template <int kName, int kThreads>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
}

/// Tells barrier `kName` that this warp has come, and goes on.
template <int kName, int kThreads>
__device__ __forceinline__ void come() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kName), "n"(kThreads) : "memory");
}

}  // namespace plantune
