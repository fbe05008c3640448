// The elements of a tensor in another order, such as the windows of an image, and a sum:
//
//   y[i] = x[Map::place(i)] + other[i]   =      other only if Map::kAdds
//
// A vector's elements stay beside each other. A thread has kVectors of them, each one block's width
// further on. Deterministic.

#pragma once

#include "cuda/launch.h"
#include "cuda/vector.h"

namespace plantune {

template <typename Map>
struct Rearrange {
  using T = typename Map::T;
  using Index = typename Map::Index;
  static constexpr int kVectors = Map::kVectors, kWidth = Map::kWidth, kThreads = Map::kThreads;
  using Word = Vector<T, kWidth>;

  struct Arguments {
    const T *x, *other;
    T* y;
    long long count;
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const Index first = (Index(blockIdx.x) * (kThreads * kVectors) + threadIdx.x) * kWidth;
    Word x[kVectors], other[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Index i = first + Index(v) * (kThreads * kWidth);
      if (i >= Index(a.count)) break;
      x[v].template load<kAligned>(a.x + Map::place(i));
      if constexpr (Map::kAdds) other[v].template load<kAligned>(a.other + i);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Index i = first + Index(v) * (kThreads * kWidth);
      if (i >= Index(a.count)) break;
      if constexpr (Map::kAdds) {
        float sums[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; ++e) sums[e] = x[v][e] + other[v][e];
        x[v].round(sums);
      }
      x[v].store(a.y + i);
    }
  }
};

}  // namespace plantune
