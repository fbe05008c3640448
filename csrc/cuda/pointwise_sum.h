// A chain of pointwise ops and a sum of what it makes, in one pass over memory.
//
//   result[c] = scale * sum over rows of the last element of Chain::evaluate(...)
//
// The chain's elements are kRows rows of kChannels; the sum is of each channel (kImages: of each
// image, that is of each kRowsOfBlock rows), or of everything (kAll). What else the chain makes is
// stored on the way, as `pointwise.h` does: each operand has an element type of its own. A block adds kRowsOfBlock rows; where there are more
// blocks than results, `add` adds what they have. Sums are float, in an order that depends on the
// configuration alone; the result is rounded once.

#pragma once

#include "cuda/pointwise.h"
#include "cuda/sums.h"

namespace plantune {

template <typename Chain>
struct PointwiseSum : Pointwise<Chain> {
  using Base = Pointwise<Chain>;
  using typename Base::Index, typename Base::Read;
  using Base::evaluate, Base::kInputs, Base::kOutputs, Base::kVectors, Base::kWidth;
  static constexpr int kStored = kOutputs - 1, kThreads = Chain::kThreads;
  static constexpr int kChannels = Chain::kChannels, kOfRow = kChannels / kWidth;
  static constexpr int kLanes = kThreads / kOfRow;  // rows that a block reads at once
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kParts = int(ceil_div(Chain::kRows, Chain::kRowsOfBlock));
  static constexpr bool kOnePass = Chain::kImages || kParts == 1;

  static_assert(kChannels % kWidth == 0 && kLanes > 0, "a row is read by threads of one block");

  using Result = typename Base::template Output<kStored>;

  /// After what is stored comes the result.
  struct Arguments {
    const void* in[kInputs];
    void* out[kOutputs];
    float* parts;
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const int column = threadIdx.x % kOfRow * kWidth, lane = threadIdx.x / kOfRow;
    const long long first = blockIdx.x * (long long)(Chain::kRowsOfBlock);
    const long long end = first + Chain::kRowsOfBlock;
    const long long last = end < Chain::kRows ? end : Chain::kRows;
    float sums[kWidth] = {};
    if (lane < kLanes) {
      for (long long row = first + lane; row < last; row += kLanes * kVectors) {
        add_rows<kAligned>(a, row, last, column, sums);
      }
    }
    if constexpr (Chain::kAll) {
      float sum = 0.f;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum += sums[e];
      sum = whole(sum);
      if (threadIdx.x == 0) leave(a, 0, 1, sum);
    } else {
      add_lanes(a, column, lane, sums);
    }
  }

  /// The sum of all blocks' parts; as many blocks as there are 32 channels, or one.
  static __device__ __forceinline__ void add(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    float sum = 0.f;
    if constexpr (Chain::kAll) {
      for (int i = threadIdx.x; i < kParts; i += kThreads) sum += a.parts[i];
      sum = whole(sum);
      if (threadIdx.x == 0) put(a, 0, sum);
    } else {
      __shared__ float parts[kWarps][32];
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
      if (c < kChannels) {
#pragma unroll 8
        for (int i = warp; i < kParts; i += kWarps) sum += a.parts[i * (long long)(kChannels) + c];
      }
      parts[warp][lane] = sum;
      __syncthreads();
      if (warp > 0 || c >= kChannels) return;
      for (int i = 1; i < kWarps; ++i) sum += parts[i][lane];
      put(a, c, sum);
    }
  }

 private:
  static __device__ __forceinline__ void put(const Arguments& a, long long at, float sum) {
    static_cast<Result*>(a.out[kStored])[at] = from_float<Result>(sum * Chain::kScale);
  }

  template <bool kAligned>
  static __device__ __forceinline__ void add_rows(const Arguments& a, long long row,
                                                  long long last, int column,
                                                  float (&sums)[kWidth]) {
    Read in[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (row + v * kLanes >= last) continue;
      const Index i = Index(row + v * kLanes) * kChannels + column;
      each<kInputs>([&](auto number) {
        constexpr int k = decltype(number)::kValue;
        Base::template load<kAligned, k>(a.in[k], i, kWidth, in[v]);
      });
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (row + v * kLanes >= last) continue;
      const Index i = Index(row + v * kLanes) * kChannels + column;
      float out[kOutputs][kWidth];
      evaluate(in[v], out);
      each<kStored>([&](auto number) {
        constexpr int j = decltype(number)::kValue;
        Base::template store<j>(a.out[j], i, kWidth, out[j]);
      });
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sums[e] += out[kStored][e];
    }
  }

  static __device__ __forceinline__ void add_lanes(const Arguments& a, int column, int lane,
                                                   const float (&sums)[kWidth]) {
    __shared__ float parts[kLanes][kChannels];
    if (lane < kLanes) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) parts[lane][column + e] = sums[e];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < kChannels; c += kThreads) {
      float sum = parts[0][c];
#pragma unroll 8
      for (int i = 1; i < kLanes; ++i) sum += parts[i][c];
      leave(a, c, kChannels, sum);
    }
  }

  static __device__ __forceinline__ void leave(const Arguments& a, int c, int channels,
                                               float sum) {
    const long long at = blockIdx.x * (long long)(channels) + c;
    if constexpr (kOnePass) {
      put(a, at, sum);
    } else {
      a.parts[at] = sum;
    }
  }

  /// The sum over the block's threads, in thread 0.
  static __device__ __forceinline__ float whole(float sum) {
    __shared__ float parts[kWarps];
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return 0.f;
    sum = parts[0];
    for (int i = 1; i < kWarps; ++i) sum += parts[i];
    return sum;
  }
};

}  // namespace plantune
