// Sums of what a convolution's epilogue has on the way, of all elements or of each channel:
//
//   results[s][i] = sum over pixels (and channels) of Sums[s](value, residual, offset, saved)
//
// A block adds the pixels of its tile that are in the image, and leaves one part of each sum; `add`
// adds the parts. All of it is float, in an order that depends on the configuration alone, and is
// rounded once.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/hopper_async.h"
#include "cuda/launch.h"
#include "cuda/sums.h"
#include "cuda/vector.h"

namespace plantune {

/// The sum of an expression: one number, or one of each channel; a float, or of the kernel's T.
template <class X, bool kChannels, bool kAsFloat = false>
struct SumOf {
  using Expression = X;
  static constexpr bool kOfChannels = kChannels, kFloat = kAsFloat;
};

template <class... Sum>
struct SumsOf {
  static constexpr int kCount = sizeof...(Sum);
  static constexpr bool kOfChannels[] = {Sum::kOfChannels..., false};
  static constexpr bool kFloat[] = {Sum::kFloat..., false};

  static __device__ __forceinline__ void evaluate(float2 value, float2 residual, float offset,
                                                  float2 saved, float2* of) {
    int i = 0;
    ((of[i++] = plantune::evaluate<typename Sum::Expression>(value, residual, offset, saved)),
     ...);
  }

  /// How many results come before the sum i, if a tile makes so many of each channel's.
  static constexpr int before(int i, int channels) {
    return i == 0 ? 0 : before(i - 1, channels) + (kOfChannels[i - 1] ? channels : 1);
  }
};

/// What a tile adds: kWarps warps have kOwn channels each, 16 pixels of a warp.
template <class Sums, int kWarps, int kOwn>
class TileSums {
 public:
  static constexpr int kCount = Sums::kCount;
  static constexpr int kResults = Sums::before(kCount, kOwn);
  static constexpr int kBytes = kWarps * kResults * int(sizeof(float));

  __device__ __forceinline__ explicit TileSums(uint32_t shared) : shared_(shared) {}

  /// Two channels of a pixel.
  __device__ __forceinline__ void take(bool inside, float2 value, float2 residual, float offset,
                                       float2 saved) {
    float2 of[kCount + 1];
    Sums::evaluate(value, residual, offset, saved, of);
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      pair_[s].x += inside ? of[s].x : 0.f;
      pair_[s].y += inside ? of[s].y : 0.f;
    }
  }

  /// After this thread's pixels of its two channels of the eight from 8 * j on.
  __device__ __forceinline__ void end_pair(int j) {
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      if (Sums::kOfChannels[s]) {
#pragma unroll
        for (int other = 4; other < 32; other *= 2) {
          pair_[s].x += __shfl_xor_sync(~0u, pair_[s].x, other);
          pair_[s].y += __shfl_xor_sync(~0u, pair_[s].y, other);
        }
        const int lane = threadIdx.x % 32;
        if (lane < 4) {
          store_word(at(s, warp(), 8 * j + 2 * lane), __float_as_uint(pair_[s].x));
          store_word(at(s, warp(), 8 * j + 2 * lane + 1), __float_as_uint(pair_[s].y));
        }
      } else {
        totals_[s] += pair_[s].x + pair_[s].y;
      }
      pair_[s] = {};
    }
  }

  /// After all of them.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      if (Sums::kOfChannels[s]) continue;
      totals_[s] = sum_of_warp(totals_[s]);
      if (threadIdx.x % 32 == 0) store_word(at(s, warp(), 0), __float_as_uint(totals_[s]));
    }
  }

  /// The tile's sum s of channel i, once all warps have come to their end.
  static __device__ __forceinline__ float whole(uint32_t shared, int s, int i) {
    const TileSums sums(shared);
    float sum = 0.f;
#pragma unroll 4
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += __uint_as_float(load_word(sums.at(s, warp, i)));
    }
    return sum;
  }

 private:
  uint32_t shared_;
  float2 pair_[kCount + 1] = {};
  float totals_[kCount + 1] = {};

  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }

  __device__ __forceinline__ uint32_t at(int s, int warp, int i) const {
    return shared_ + (warp * kResults + Sums::before(s, kOwn) + i) * 4;
  }
};

/// What a thread adds of two channels of many pixels, where lanes % 4 have the same ones.
template <class Sums>
class ThreadSums {
 public:
  /// Two channels of a pixel.
  __device__ __forceinline__ void take(float2 value, float2 residual, float offset, float2 saved) {
    float2 of[Sums::kCount + 1];
    Sums::evaluate(value, residual, offset, saved, of);
#pragma unroll
    for (int s = 0; s < Sums::kCount; ++s) sums_[s].x += of[s].x, sums_[s].y += of[s].y;
  }

  /// Of the threads with the same channels.
  template <int s>
  __device__ __forceinline__ float2 of_pair() const {
    float2 sum = sums_[s];
#pragma unroll
    for (int other = 1; other < 4; other *= 2) {
      sum.x += __shfl_xor_sync(~0u, sum.x, other);
      sum.y += __shfl_xor_sync(~0u, sum.y, other);
    }
    return sum;
  }

  template <int s>
  __device__ __forceinline__ float of_warp() const {
    return sum_of_warp(sums_[s].x + sums_[s].y);
  }

 private:
  float2 sums_[Sums::kCount + 1] = {};
};

/// The parts that kTiles tiles of pixels leave, each in kTileParts blocks of some channels.
template <class T, class Sums, int kTiles, int kTileParts, int kChannels>
class SumParts {
 public:
  static constexpr int kThreads = 512;

  struct Results {
    void* of[Sums::kCount + 1];
  };

  /// Parts of the sum s: so many rows of so many results, which begin there.
  static constexpr int rows(int s) { return Sums::kOfChannels[s] ? kTiles : kTiles * kTileParts; }
  static constexpr int columns(int s) { return Sums::kOfChannels[s] ? kChannels : 1; }
  static constexpr int start(int s) {
    return s == 0 ? 0 : start(s - 1) + rows(s - 1) * columns(s - 1);
  }

  /// In each row of the grid one sum, in each column kAtOnce channels.
  static __device__ __forceinline__ void add(const float* parts, const Results& results) {
    release_successor();
    wait_for_predecessor();
    add_from<0>(parts, results);
  }

 private:
  static constexpr int kAtOnce = 8;

  template <int s>
  static __device__ __forceinline__ void add_from(const float* parts, const Results& results) {
    if constexpr (s < Sums::kCount) {
      if (blockIdx.y == s) {
        add_one<rows(s), columns(s), Sums::kFloat[s]>(parts + start(s), results.of[s]);
      } else {
        add_from<s + 1>(parts, results);
      }
    }
  }

  template <int kRows, int kColumns, bool kFloat>
  static __device__ __forceinline__ void add_one(const float* parts, void* results) {
    constexpr int kWide = kColumns == 1 ? 1 : kAtOnce, kWays = kThreads / kWide;
    __shared__ float sums[kThreads];
    const int column = blockIdx.x * kWide + threadIdx.x % kWide, way = threadIdx.x / kWide;
    if (blockIdx.x * kWide >= kColumns) return;
    float sum = 0.f;
    if (column < kColumns) {
#pragma unroll 8
      for (int row = way; row < kRows; row += kWays) sum += parts[size_t(row) * kColumns + column];
    }
    sums[threadIdx.x] = sum;
    for (int half = kThreads / 2; half >= kWide; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (way != 0 || column >= kColumns) return;
    if constexpr (kFloat) {
      static_cast<float*>(results)[column] = sums[threadIdx.x];
    } else {
      static_cast<T*>(results)[column] = from_float<T>(sums[threadIdx.x]);
    }
  }
};

}  // namespace plantune
