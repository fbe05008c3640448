// Parts of parameters and of what belongs to them, one a block.

#pragma once

#include "cuda/sums.h"
#include "cuda/vector.h"

namespace plantune {

constexpr int kStepThreads = 256, kStepEach = 8;
constexpr int kStepChunk = kStepThreads * kStepEach;

struct Partial {
  float squares;
  float finite;  // 0 or 1
};

/// `count` elements of a parameter, from element `first` on, which is at `parameter`; their state
/// is at `start`. An item is a parameter; a table has its `chunks` side by side.
struct alignas(32) Chunk {
  void* parameter;
  unsigned long long start;
  unsigned item, first, count, chunks;
};

__device__ __forceinline__ float sum_of_block(float value) {
  __shared__ float sums[kStepThreads / 32];
  value = sum_of_warp(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kStepThreads / 32; ++warp) sum += sums[warp];
  return sum;
}

/// A thread's elements of a chunk, as words; those of neighbours are side by side.
template <typename T>
struct Share {
  using Word = Vector<T>;
  static constexpr int kWords = kStepEach / Word::kSize;
  static_assert(kStepEach % Word::kSize == 0, "a thread moves whole words");

  Word words[kWords];

  __device__ __forceinline__ float operator[](int i) const {
    return words[i / Word::kSize][i % Word::kSize];
  }

  /// 0 after the end. `kWhole`: there are kStepChunk elements, aligned to words.
  template <bool kWhole>
  __device__ __forceinline__ void load(const T* from, unsigned count) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const unsigned at = place(w);
      if constexpr (kWhole) {
        words[w].template load<true>(from + at);
      } else {
#pragma unroll
        for (int e = 0; e < Word::kSize; ++e) {
          words[w].values[e] = at + e < count ? from[at + e] : from_float<T>(0.f);
        }
      }
    }
  }

  template <bool kWhole>
  static __device__ __forceinline__ void store(T* to, unsigned count,
                                               const float (&values)[kStepEach]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const unsigned at = place(w);
      Word word;
      word.round(values + w * Word::kSize);
      if constexpr (kWhole) {
        word.store(to + at);
      } else {
#pragma unroll
        for (int e = 0; e < Word::kSize; ++e) {
          if (at + e < count) to[at + e] = word.values[e];
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ unsigned place(int word) {
    return (word * kStepThreads + threadIdx.x) * Word::kSize;
  }
};

/// Whether a chunk and what is stored like it `beside` can be moved by words, without an end.
__device__ __forceinline__ bool is_whole(const Chunk& chunk, const void* beside) {
  const size_t both = reinterpret_cast<size_t>(beside) | reinterpret_cast<size_t>(chunk.parameter);
  return chunk.count == kStepChunk && both % kWordBytes == 0;
}

}  // namespace plantune
