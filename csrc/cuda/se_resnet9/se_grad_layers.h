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

template <typename T, int kChannels, int kHidden, int kThreads, bool kByRows1, bool kByRows2>
struct SeGradLayers {
  static constexpr int kColumns = 8, kColumnTiles = ceil_div(kHidden, kColumns);
  static constexpr int kTiles = ceil_div(kChannels, 32) * kColumnTiles;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kSums = 2 * kColumns + 2;  // weight1, weight2, bias2, bias1
  static constexpr int kWidth = kHidden % kColumns == 0 ? 16 / int(sizeof(T)) : 1;
  using Word = Vector<T, kWidth>;
  using Row = float[kColumns];

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

 private:
  template <bool kAligned, typename Arguments>
  static __device__ __forceinline__ void add_images(const Arguments& a, int split, int channel,
                                                    int column, float (&sums)[kSums]) {
    const long long first = a.images * split / a.splits, last = a.images * (split + 1) / a.splits;
    const bool there = channel < kChannels;
    const int own = column + threadIdx.x % kColumns;
#pragma unroll 4
    for (long long n = first + threadIdx.x / 32; n < last; n += kWarps) {
      const float dexcite = there ? to_float(a.dexcite[n * kChannels + channel]) : 0.f;
      const float mean = there ? to_float(a.mean[n * kChannels + channel]) : 0.f;
      Row hidden, dsqueeze;
      load<kAligned>(a.hidden + n * kHidden, column, hidden);
      load<kAligned>(a.dsqueeze + n * kHidden, column, dsqueeze);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        sums[k] += dsqueeze[k] * mean;
        sums[kColumns + k] += dexcite * hidden[k];
      }
      sums[2 * kColumns] += dexcite;
      sums[2 * kColumns + 1] += own < kHidden ? to_float(a.dsqueeze[n * kHidden + own]) : 0.f;
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void load(const T* row, int column, Row& to) {
#pragma unroll
    for (int k = 0; k < kColumns; k += kWidth) {
      Word word;
      word.clear();
      if (column + k < kHidden) word.template load<kAligned>(row + column + k);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) to[k + e] = word[e];
    }
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

  template <typename Arguments>
  static __device__ __forceinline__ void finish(const Arguments& a, int tile) {
    const float* const parts = a.layers + tile * a.splits * (kSums * 32);
    const int first = tile / kColumnTiles * 32, column = tile % kColumnTiles * kColumns;
    for (int i = threadIdx.x; i < kSums * 32; i += kThreads) {
      float sum = 0.f;
#pragma unroll 8
      for (int split = 0; split < a.splits; ++split) sum += __ldcg(parts + split * (kSums * 32) + i);
      const int k = i / 32, lane = i % 32;
      if (first + lane < kChannels) store(a, first + lane, column, k, lane, from_float<T>(sum));
    }
  }

  template <typename Arguments>
  static __device__ __forceinline__ void store(const Arguments& a, int channel, int column, int k,
                                               int lane, T sum) {
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
