// A small constant matrix times a few vectors, by the tensor cores of one block: 16-bit elements,
// from Ampere on.
//
// weight is (kRows, kColumns padded with zeros to whole 16), as a parameter has it. Of 16 columns
// lane 4 * g + t brings columns 4 * t up to 3 more of rows g and g + 8: which columns a product takes
// for which of its 16 terms is free, as long as matrix and vectors agree.
//
// A vector is the sum of two of 16 bits, the second one what the first leaves: neighbour columns of
// one product, which has eight. Sums are float, in a fixed order: deterministic.

#pragma once

#include "cuda/mma.h"
#include "cuda/vector.h"

namespace plantune {

/// A finite number within the finite ones of a type.
__device__ __forceinline__ float bounded(float value, __half) {
  return fminf(fmaxf(value, -65504.f), 65504.f);
}
__device__ __forceinline__ float bounded(float value, __nv_bfloat16) { return value; }

template <typename T, typename Bias, int kRows, int kColumns, int kImages, int kThreads>
struct SmallMatrixMma {
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kTiles = ceil_div(kRows, 16);
  static constexpr int kSteps = ceil_div(kColumns, 16);
  // Warps that share a row of tiles, each with its part of the columns.
  static constexpr int kSplit =
      kTiles >= kWarps ? 1 : power_below(smaller(kSteps, kWarps / kTiles));
  static constexpr int kStepsOfWarp = ceil_div(kSteps, kSplit);
  static constexpr int kRounds = ceil_div(kTiles * kSplit, kWarps);
  static constexpr int kResults = kRows * kImages;
  // 32 KiB in the registers of a block.
  static constexpr bool kKept = kRounds * kStepsOfWarp * kThreads <= 2048;
  static constexpr int kBiases = kSplit > 1 ? ceil_div(kResults, kThreads) : 2 * kRounds;
  // Elements of a vector in shared memory: four of them begin eight banks apart.
  static constexpr int kStride = 16 * kSteps + 2 * ((40 - 8 * kSteps % 32) % 32);

  static_assert(sizeof(T) == 2, "tensor cores take 16-bit elements here");
  static_assert(kImages <= 4, "a product has eight columns, two for each image");

  struct Vectors {
    alignas(16) T parts[2 * kImages][kStride];

    /// Zeros after the first columns: they meet zeros of the matrix, but must be finite.
    __device__ __forceinline__ void clear_from(int column) {
      const int most = kStride - column;
#pragma unroll 1
      for (int i = threadIdx.x; i < kImages * most; i += kThreads) {
        put(i / most, column + i % most, 0.f);
      }
    }

    __device__ __forceinline__ void put(int image, int column, float value) {
      const bool finite = fabsf(value) < __int_as_float(0x7f800000);
      const T high = from_float<T>(finite ? bounded(value, T()) : value);
      const float rest = finite ? bounded(value - to_float(high), T()) : 0.f;
      parts[2 * image][column] = high;
      parts[2 * image + 1][column] = from_float<T>(rest);
    }

    /// Elements 4 * place up to 3 more of the product's column.
    __device__ __forceinline__ uint2 get(int column, int place) const {
      if (column >= 2 * kImages) return {0, 0};
      return reinterpret_cast<const uint2*>(parts[column])[place];
    }
  };

  struct Scratch {
    alignas(16) float sums[kSplit][kImages][16 * kTiles];
  };

  const T* weight;
  uint4 kept[kKept ? kRounds : 1][kStepsOfWarp];
  float bias[kBiases];

  __device__ __forceinline__ SmallMatrixMma(const T* weight, const Bias* biases) : weight(weight) {
    if constexpr (kKept) {
#pragma unroll
      for (int round = 0; round < kRounds; ++round) load(round, round);
    }
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      const int result = threadIdx.x + i * kThreads;
      const int row = kSplit > 1 ? result % kRows : row_of(i / 2, i % 2);
      const bool there = kSplit > 1 ? result < kResults : row < kRows;
      bias[i] = biases != nullptr && there ? to_float(biases[row]) : 0.f;
    }
  }

  /// The warp's place among those that work on all tiles.
  static __device__ __forceinline__ int job_of(int round) {
    return threadIdx.x / 32 + round * kWarps;
  }

  static __device__ __forceinline__ int row_of(int round, int half) {
    return job_of(round) / kSplit * 16 + threadIdx.x % 32 / 4 + 8 * half;
  }

  __device__ __forceinline__ void load(int round, int slot) {
    const int tile = job_of(round) / kSplit, first = job_of(round) % kSplit * kStepsOfWarp;
#pragma unroll
    for (int i = 0; i < kStepsOfWarp; ++i) {
      if (tile >= kTiles || first + i >= kSteps) continue;
      const uint2 upper = four_of(tile * 16 + threadIdx.x % 32 / 4, first + i);
      const uint2 lower = four_of(tile * 16 + threadIdx.x % 32 / 4 + 8, first + i);
      kept[slot][i] = {upper.x, lower.x, upper.y, lower.y};
    }
  }

  /// The lane's columns of a row in one step.
  __device__ __forceinline__ uint2 four_of(int row, int step) const {
    if (row >= kRows) return {0, 0};
    const T* const from = weight + row * (16 * kSteps) + step * 16 + threadIdx.x % 4 * 4;
    return *reinterpret_cast<const uint2*>(from);
  }

  /// Calls `take(image, row, value)` once for each, by some thread; all threads come here together.
  template <typename Take>
  __device__ __forceinline__ void multiply(const Vectors& vectors, Scratch& scratch, Take take) {
    const int group = threadIdx.x % 32 / 4, image = threadIdx.x % 4;
#pragma unroll(kKept ? kRounds : 1)
    for (int round = 0; round < kRounds; ++round) {
      const int slot = kKept ? round : 0, part = job_of(round) % kSplit;
      if (job_of(round) >= kTiles * kSplit) continue;
      if constexpr (!kKept) load(round, slot);
      float sums[2][4] = {};  // two, so that products wait less for each other
#pragma unroll
      for (int i = 0; i < kStepsOfWarp; ++i) {
        const int step = part * kStepsOfWarp + i;
        if (step >= kSteps) continue;
        const uint2 b = vectors.get(group, step * 4 + image);
        mma_16x8x16(sums[i % 2], kept[slot][i], b.x, b.y, T());
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (image >= kImages) continue;
        const int row = row_of(round, half), at = 2 * half;
        const float sum = (sums[0][at] + sums[1][at]) + (sums[0][at + 1] + sums[1][at + 1]);
        if constexpr (kSplit > 1) {
          scratch.sums[part][image][row] = sum;
        } else if (row < kRows) {
          take(image, row, sum + bias[2 * round + half]);
        }
      }
    }
    if constexpr (kSplit > 1) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kBiases; ++i) {
        const int result = threadIdx.x + i * kThreads;
        if (result >= kResults) continue;
        const int row = result % kRows, of = result / kRows;
        float sum = bias[i];
#pragma unroll
        for (int k = 0; k < kSplit; ++k) sum += scratch.sums[k][of][row];
        take(of, row, sum);
      }
    }
  }
};

}  // namespace plantune
