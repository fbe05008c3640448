// A small constant matrix times a few vectors, by one block: the layers of squeeze-and-excite.
//
// SmallMatrix multiplies in float on any chip, SmallMatrixMma of small_matrix_mma.h on tensor
// cores; both have one face. The matrix is fetched into registers before the vectors are there; one
// that does not fit is read when it is used. Sums are float, in a fixed order: deterministic.

#pragma once

#include "cuda/image_tile.h"
#include "cuda/vector.h"

namespace plantune {

/// weight (kRows, kColumns) row-major; a few lanes share a row.
template <typename T, typename Bias, int kRows, int kColumns, int kImages, int kThreads>
struct SmallMatrix {
  using Word = Vector<T, kColumns % Vector<T>::kSize == 0 ? Vector<T>::kSize : 4>;
  using Input = Columns<kColumns, Word::kSize>;

  static constexpr int kWords = kColumns / Word::kSize;
  static constexpr int kWanted = power_below(2 * kWords - 1);  // a lane for each word of a row
  static constexpr int kLanes = smaller(smaller(32, kWanted), power_below(kThreads / kRows));
  static constexpr int kWordsOfLane = ceil_div(kWords, kLanes);
  static constexpr int kRowsAtOnce = kThreads / kLanes;
  static constexpr int kRounds = ceil_div(kRows, kRowsAtOnce);
  static constexpr int kChains = 4;  // of additions that wait for each other
  // 32 KiB in the registers of a block.
  static constexpr bool kKept = kRounds * kWordsOfLane * kThreads <= 2048;

  /// The vectors that it multiplies, in shared memory.
  struct Vectors {
    alignas(16) float values[kImages][kColumns];

    /// Zeros after the first columns: they meet zeros of the matrix, but must be finite.
    __device__ __forceinline__ void clear_from(int column) {
      const int most = kColumns - column;
#pragma unroll 1
      for (int i = threadIdx.x; i < kImages * most; i += kThreads) {
        put(i / most, column + i % most, 0.f);
      }
    }

    __device__ __forceinline__ void put(int image, int column, float value) {
      values[image][Input::place_of(column)] = value;
    }
  };

  struct Scratch {
    alignas(16) float none[4];
  };

  const T* weight;
  const Bias* biases;
  Word kept[kKept ? kRounds : 1][kWordsOfLane];
  float bias[kKept ? kRounds : 1];

  __device__ __forceinline__ SmallMatrix(const T* weight, const Bias* biases)
      : weight(weight), biases(biases) {
    if constexpr (kKept) {
#pragma unroll
      for (int round = 0; round < kRounds; ++round) load_row(round, round);
    }
  }

  static __device__ __forceinline__ int row(int round) {
    return round * kRowsAtOnce + threadIdx.x / kLanes;
  }

  __device__ __forceinline__ void load_row(int round, int slot) {
    const int lane = threadIdx.x % kLanes;
    bias[slot] = biases != nullptr && row(round) < kRows ? to_float(biases[row(round)]) : 0.f;
#pragma unroll
    for (int i = 0; i < kWordsOfLane; ++i) {
      const int word = lane + i * kLanes;
      kept[slot][i].clear();
      if (row(round) < kRows && word < kWords) {
        kept[slot][i].template load<true>(weight + row(round) * kColumns + word * Word::kSize);
      }
    }
  }

  /// Calls `take(image, row, value)` once for each, by some thread; all threads come here together.
  template <typename Take>
  __device__ __forceinline__ void multiply(const Vectors& vectors, Scratch&, Take take) {
#pragma unroll(kKept ? kRounds : 1)
    for (int round = 0; round < kRounds; ++round) {
      const int slot = kKept ? round : 0;
      if constexpr (!kKept) load_row(round, slot);
      float sums[kImages][kChains] = {};
#pragma unroll
      for (int i = 0; i < kWordsOfLane; ++i) {
        const int word = threadIdx.x % kLanes + i * kLanes;
#pragma unroll
        for (int image = 0; image < kImages; ++image) {
          float x[Word::kSize] = {};
          if (word < kWords) Input::load(vectors.values[image], word, x);
#pragma unroll
          for (int k = 0; k < Word::kSize; ++k) sums[image][k % kChains] += kept[slot][i][k] * x[k];
        }
      }
#pragma unroll
      for (int image = 0; image < kImages; ++image) {
        float sum = (sums[image][0] + sums[image][1]) + (sums[image][2] + sums[image][3]);
#pragma unroll
        for (int lane = 1; lane < kLanes; lane *= 2) {
          sum += __shfl_xor_sync(0xffffffffu, sum, lane);
        }
        const bool mine = threadIdx.x % kLanes == 0 && row(round) < kRows;
        if (mine) take(image, row(round), sum + bias[slot]);
      }
    }
  }
};

}  // namespace plantune
