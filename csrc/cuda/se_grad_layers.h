// The gradients of the two layers of squeeze-and-excite, of all images: for c < kChannels and
// j < kHidden
//
//   weight1 (j, c) = sum over images of dsqueeze j * mean c      bias1 j = sum of dsqueeze j
//   weight2 (c, j) = sum over images of dexcite c * hidden j     bias2 c = sum of dexcite c
//
// kByRows1 and kByRows2 say that a weight is stored so, else it is transposed; each result may be
// null. A block adds its split of the images for a tile of 32 channels and 8 hidden ones; the last
// block of a tile to arrive adds what all have. Deterministic: all sums have a fixed order.

#pragma once

#include "cuda/vector.h"

namespace plantune {

/// The largest power of two that divides a number.
constexpr int power_in(int value) { return value & -value; }

template <typename T, typename Gradient, int kChannels, int kHidden, int kThreads, bool kByRows1,
          bool kByRows2>
struct SeGradLayers {
  static constexpr int kColumns = 8, kColumnTiles = ceil_div(kHidden, kColumns);
  static constexpr int kTiles = ceil_div(kChannels, 32) * kColumnTiles;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kSums = 2 * kColumns + 2;  // weight1, weight2, bias2, bias1
  static constexpr int kTileSums = kSums * 32;
  static constexpr int kWidth = smaller(power_in(kHidden), smaller(kColumns, 16 / int(sizeof(T))));
  static constexpr int kWords = kColumns / kWidth;
  static constexpr int kBatch = 4;  // images whose values a warp asks for at once
  static constexpr int kOfThread = ceil_div(kSums * 32, kThreads);
  using Word = Vector<T, kWidth>;
  using Row = Word[kWords];

  template <typename Arguments>
  static __device__ __forceinline__ void add(const Arguments& a, int tile, int split) {
    __shared__ float parts[kWarps][kSums][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int channel = tile / kColumnTiles * 32 + lane, column = tile % kColumnTiles * kColumns;
    float sums[kSums] = {};
    const bool aligned = ((unsigned long long)(a.hidden) | (unsigned long long)(a.dsqueeze)) % 16 == 0;
    if (aligned) {
      add_images<true>(a, split, channel, column, sums);
    } else {
      add_images<false>(a, split, channel, column, sums);
    }
#pragma unroll
    for (int k = 0; k < kSums; ++k) parts[warp][k][lane] = sums[k];
    __syncthreads();
    float* const own = a.layers + (tile * a.splits + split) * (kSums * 32);
    for (int i = threadIdx.x; i < kSums * 32; i += kThreads) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += parts[w][i / 32][i % 32];
      own[i] = sum;
    }
    if (is_last(a, tile)) finish(a, tile);
  }

  /// Whether all other blocks of the tile have stored their parts.
  template <typename Arguments>
  static __device__ __forceinline__ bool is_last(const Arguments& a, int tile) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(a.arrived + tile, 1u) + 1 == unsigned(a.splits);
    __syncthreads();
    __threadfence();
    return last;
  }

 private:
  template <bool kAligned, typename Arguments>
  static __device__ __forceinline__ void add_images(const Arguments& a, int split, int channel,
                                                    int column, float (&sums)[kSums]) {
    const long long first = a.images * split / a.splits, last = a.images * (split + 1) / a.splits;
    const bool there = channel < kChannels;
    const int own = column + threadIdx.x % kColumns;
#pragma unroll 1
    for (long long base = first + threadIdx.x / 32; base < last; base += kBatch * kWarps) {
      T dexcite[kBatch], mean[kBatch], dsqueezed[kBatch];
      Row hidden[kBatch], dsqueeze[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const long long n = base + i * kWarps;
        const bool found = n < last;
        load<kAligned>(a.hidden + n * kHidden, column, found, hidden[i]);
        load<kAligned>(a.dsqueeze + n * kHidden, column, found, dsqueeze[i]);
        dexcite[i] = found && there ? a.dexcite[n * kChannels + channel] : from_float<T>(0.f);
        mean[i] = found && there ? a.mean[n * kChannels + channel] : from_float<T>(0.f);
        const bool owned = found && own < kHidden;
        dsqueezed[i] = owned ? a.dsqueeze[n * kHidden + own] : from_float<T>(0.f);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          sums[k] += dsqueeze[i][k / kWidth][k % kWidth] * to_float(mean[i]);
          sums[kColumns + k] += to_float(dexcite[i]) * hidden[i][k / kWidth][k % kWidth];
        }
        sums[2 * kColumns] += to_float(dexcite[i]);
        sums[2 * kColumns + 1] += to_float(dsqueezed[i]);
      }
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void load(const T* row, int column, bool found, Row& to) {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      to[k].clear();
      const int at = column + k * kWidth;
      if (found && at < kHidden) to[k].template load<kAligned>(row + at);
    }
  }

  template <typename Arguments>
  static __device__ __forceinline__ void finish(const Arguments& a, int tile) {
    const float* const parts = a.layers + tile * a.splits * (kSums * 32);
    const int first = tile / kColumnTiles * 32, column = tile % kColumnTiles * kColumns;
    float sums[kOfThread] = {};
#pragma unroll 8
    for (int split = 0; split < a.splits; ++split) {
#pragma unroll
      for (int j = 0; j < kOfThread; ++j) {
        const int i = threadIdx.x + j * kThreads;
        if (i < kSums * 32) sums[j] += __ldcg(parts + split * (kSums * 32) + i);
      }
    }
#pragma unroll
    for (int j = 0; j < kOfThread; ++j) {
      const int i = threadIdx.x + j * kThreads, k = i / 32, lane = i % 32;
      if (i >= kSums * 32 || first + lane >= kChannels) continue;
      store(a, first + lane, column, k, lane, from_float<Gradient>(sums[j]));
    }
  }

  template <typename Arguments>
  static __device__ __forceinline__ void store(const Arguments& a, int channel, int column, int k,
                                               int lane, Gradient sum) {
    const int j = column + k % kColumns;
    if (k < kColumns) {
      const int at = kByRows1 ? j * kChannels + channel : channel * kHidden + j;
      if (j < kHidden && a.weight1 != nullptr) a.weight1[at] = sum;
    } else if (k < 2 * kColumns) {
      const int at = kByRows2 ? channel * kHidden + j : j * kChannels + channel;
      if (j < kHidden && a.weight2 != nullptr) a.weight2[at] = sum;
    } else if (k == 2 * kColumns) {
      if (column == 0 && a.bias2 != nullptr) a.bias2[channel] = sum;
    } else if (channel < kColumns && lane < kColumns && column + lane < kHidden) {
      if (a.bias1 != nullptr) a.bias1[column + lane] = sum;
    }
  }
};

}  // namespace plantune
