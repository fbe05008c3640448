// The gradients of a norm's weight and bias from what each block summed for itself:
//
//   dweight[i] = sum over parts of part[0][i],  dbias[i] = sum over parts of part[1][i]   =
//
// A part has kSums by kSize floats. They are added in a fixed order: deterministic.

#pragma once

#include "cuda/launch.h"
#include "cuda/vector.h"

namespace plantune {

constexpr int kCollected = 32;  // elements of a block

/// Each way adds every other part of an element, then one way adds what all have. What is not
/// wanted is null.
template <int kSize, int kSums, int kThreads, typename T>
__device__ __forceinline__ void collect_affine(const float* parts, long long count, T* dweight,
                                               T* dbias) {
  constexpr int kWays = kThreads / kCollected;
  __shared__ float ways[kWays][kCollected];
  release_successor();
  wait_for_predecessor();
  const int column = threadIdx.x % kCollected, way = threadIdx.x / kCollected;
  const int element = blockIdx.x * kCollected + column;
  float sum = 0.f;
  if (element < kSums * kSize) {
#pragma unroll 8
    for (long long part = way; part < count; part += kWays) {
      sum += parts[part * (kSums * kSize) + element];
    }
  }
  ways[way][column] = sum;
  __syncthreads();
  if (way != 0 || element >= kSums * kSize) return;
#pragma unroll
  for (int i = 1; i < kWays; ++i) sum += ways[i][column];
  T* to = element < kSize ? dweight : dbias;
  if (to != nullptr) to[element % kSize] = from_float<T>(sum);
}

}  // namespace plantune
