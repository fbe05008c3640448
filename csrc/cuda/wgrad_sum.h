// Adds the parts of a weight's gradient, and rounds the sum once:
//
//   dw[o][c][r, s] or dw[o][r, s][c] = sum over splits of sums[split][r, s][o][c]
//
// A block makes kSumChannels channels of all taps of kSumRows o. kSumWays threads share an element:
// each adds every kSumWays-th part, then one adds what they have, always in the same order.

#pragma once

#include "cuda/launch.h"
#include "cuda/vector.h"

namespace plantune {

template <class C>
class WgradSum {
  using Result = typename C::Result;

  static constexpr int kTaps = C::kR * C::kS;
  static constexpr int kColumns = kTaps * C::kSumChannels / 4;  // of 4 elements
  static constexpr int kElements = kTaps * C::kSumChannels;
  static constexpr int kOfRow = kColumns * C::kSumWays;  // threads

 public:
  static constexpr int kThreads = kColumns * C::kSumWays * C::kSumRows;

  static __device__ __forceinline__ void run(const float* sums, Result* dw) {
    __shared__ float4 parts[C::kSumRows][C::kSumWays][kColumns];
    __shared__ float whole[C::kSumRows][kElements];
    release_successor();
    constexpr int kChunks = ceil_div(C::kC, C::kSumChannels);
    const int first = blockIdx.x % kChunks * C::kSumChannels;
    const int column = threadIdx.x % kColumns, way = threadIdx.x / kColumns % C::kSumWays;
    const int row = threadIdx.x / (kColumns * C::kSumWays);
    const int o = blockIdx.x / kChunks * C::kSumRows + row;
    const int tap = column / (C::kSumChannels / 4), c = column % (C::kSumChannels / 4) * 4;
    wait_for_predecessor();
    const bool inside = o < C::kO && first + c < C::kC;
    parts[row][way][column] = inside ? sum_of(sums, tap, o, first + c, way) : float4{};
    __syncthreads();
    if (way == 0) {
      float4 sum = parts[row][0][column];
#pragma unroll
      for (int i = 1; i < C::kSumWays; ++i) add(sum, parts[row][i][column]);
      const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) whole[row][place(tap, c + i)] = values[i];
    }
    __syncthreads();
    if (o < C::kO) store(whole[row], dw, o, first);
  }

 private:
  static __device__ __forceinline__ float4 sum_of(const float* sums, int tap, int o, int c,
                                                  int way) {
    constexpr size_t kPart = size_t(kTaps) * C::kO * C::kC;
    const float* from = sums + (size_t(tap) * C::kO + o) * C::kC + c;
    float4 sum = {};
#pragma unroll 8
    for (int split = way; split < C::kSplitK; split += C::kSumWays) {
      add(sum, *reinterpret_cast<const float4*>(from + split * kPart));
    }
    return sum;
  }

  static __device__ __forceinline__ void add(float4& to, float4 v) {
    to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
  }

  /// Where a block has an element: in the order of dw.
  static __device__ __forceinline__ int place(int tap, int c) {
    return C::kChannelsLast ? tap * C::kSumChannels + c : c * kTaps + tap;
  }

  static __device__ __forceinline__ void store(const float* whole, Result* dw, int o, int first) {
    const int channels = min(C::kSumChannels, C::kC - first);
    Result* row = dw + size_t(o) * C::kC * kTaps;
    for (int i = threadIdx.x % kOfRow; i < kElements; i += kOfRow) {
      if constexpr (C::kChannelsLast) {
        const int c = i % C::kSumChannels, tap = i / C::kSumChannels;
        if (c < channels) row[tap * C::kC + first + c] = from_float<Result>(whole[i]);
      } else {
        if (i < channels * kTaps) row[first * kTaps + i] = from_float<Result>(whole[i]);
      }
    }
  }
};

}  // namespace plantune
