// The gradient of average and max pooling, and a chain of pointwise ops that it goes through.
//
//   dy      (N, kOutHeight, kOutWidth, kChannels) or (N, kChannels, kOutHeight, kOutWidth)
//   places  like dy: the row * kWidth + column that won each window; of a max pool alone
//   in      what else the chain reads, as `pointwise.h` says; out (N, kHeight, kWidth, kChannels) =
//           in the same order of axes, what leaves of the chain
//   totals  = the sums of what else the chain makes, one value each
//
// Each element of the gradient gathers from the windows that it is in, in float and in a fixed order,
// and is rounded before the chain. Blocks leave parts of the totals, which `add` adds in a fixed
// order: deterministic.

#pragma once

#include "cuda/launch.h"
#include "cuda/pointwise.h"
#include "cuda/pool_window.h"

namespace plantune {

/// A thread makes kVector channels of one pixel; the chain's input kGathered is the gradient, its
/// last kTotals outputs are added.
template <typename Window, typename Chain>
struct PoolGrad : PoolWindow<Window> {
  using Base = PoolWindow<Window>;
  using Pointwise = plantune::Pointwise<Chain>;
  using typename Base::Index, typename Base::T, typename Base::Word;
  using Base::kVector, Base::kMax, Base::kRows, Base::kColumns;
  using Base::kOutHeight, Base::kOutWidth;
  static constexpr int kInputs = Chain::kInputs, kTotals = Chain::kTotals;
  static constexpr int kStored = Chain::kOutputs - kTotals, kWarps = Window::kThreads / 32;
  // Windows that one pixel may be in, along each axis.
  static constexpr int kOverRows = ceil_div(kRows, Base::kRowStride);
  static constexpr int kOverColumns = ceil_div(kColumns, Base::kColumnStride);
  static constexpr bool kAtOnce = kOverRows * kOverColumns <= 16;
  using PlaceOfX = typename Base::PlaceOfX;

  static_assert(Chain::kWidth == kVector, "the chain takes what a thread gathers");

  struct Arguments {
    const T* in[kInputs];
    const long long* places;
    T* out[Chain::kOutputs];  // the totals at last
    float* parts;             // (totals, blocks)
    long long count;          // vectors of the gradient
    long long blocks;
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const long long vector = blockIdx.x * (long long)(Window::kThreads) + threadIdx.x;
    float made[Chain::kOutputs][kVector] = {};
    if (vector < a.count) make<kAligned>(a, vector, made);
    if constexpr (kTotals > 0) leave_totals(a, made);
  }

  /// A block adds all parts of one total.
  static __device__ __forceinline__ void add(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const float* parts = a.parts + blockIdx.x * a.blocks;
    float sum = 0.f;
#pragma unroll 8
    for (long long i = threadIdx.x; i < a.blocks; i += blockDim.x) sum += parts[i];
    __shared__ float whole[32];
    sum = of_warp(sum);
    if (threadIdx.x % 32 == 0) whole[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < int(blockDim.x) / 32; ++i) sum += whole[i];
#pragma unroll
    for (int t = 0; t < kTotals; ++t) {
      if (t == blockIdx.x) a.out[kStored + t][0] = from_float<T>(sum);
    }
  }

 private:
  template <bool kAligned>
  static __device__ __forceinline__ void make(const Arguments& a, long long vector,
                                              float (&made)[Chain::kOutputs][kVector]) {
    const Index i = Index(vector) * kVector;
    Word in[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      if (k != Chain::kGathered) {
        Pointwise::template load<kAligned>(a.in[k], k, i, kVector, in[k]);
      }
    }
    float sum[kVector] = {};
    const PlaceOfX at{Index(vector)};
    if constexpr (kAtOnce) {
      gather_at_once<kAligned>(a, at, sum);
    } else {
      for (int w = 0; w < kOverRows * kOverColumns; ++w) gather<kAligned>(a, at, w, sum);
    }
    in[Chain::kGathered].round(sum);
    Pointwise::evaluate(in, made);
#pragma unroll
    for (int j = 0; j < kStored; ++j) Pointwise::store(a.out[j] + i, kVector, made[j]);
  }

  /// A window that the pixel may be in: its pixel of dy, and whether it is there.
  struct Over {
    int p, q;
    bool there;

    __device__ __forceinline__ Over(const PlaceOfX& at, int window) {
      // From the last window on that begins at the pixel or before it.
      p = (at.row + Base::kRowPadding) / Base::kRowStride - window / kOverColumns;
      q = (at.column + Base::kColumnPadding) / Base::kColumnStride - window % kOverColumns;
      const int top = p * Base::kRowStride - Base::kRowPadding;
      const int left = q * Base::kColumnStride - Base::kColumnPadding;
      there = p >= 0 && p < kOutHeight && q >= 0 && q < kOutWidth && top + kRows > at.row &&
              left + kColumns > at.column;
    }

    __device__ __forceinline__ Index in(const PlaceOfX& at) const {
      return at.first(kOutHeight * kOutWidth) + Index(p * kOutWidth + q) * Base::kPixelStride;
    }
  };

  template <bool kAligned>
  static __device__ __forceinline__ void gather_at_once(const Arguments& a, const PlaceOfX& at,
                                                        float (&sum)[kVector]) {
    Word dy[kOverRows * kOverColumns];
#pragma unroll
    for (int w = 0; w < kOverRows * kOverColumns; ++w) {
      const Over over(at, w);
      if (over.there) dy[w].template load<kAligned>(a.in[Chain::kGathered] + over.in(at));
    }
#pragma unroll
    for (int w = 0; w < kOverRows * kOverColumns; ++w) {
      const Over over(at, w);
      if (over.there) add_window(a, at, over, dy[w], sum);
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void gather(const Arguments& a, const PlaceOfX& at, int w,
                                                float (&sum)[kVector]) {
    const Over over(at, w);
    if (!over.there) return;
    Word dy;
    dy.template load<kAligned>(a.in[Chain::kGathered] + over.in(at));
    add_window(a, at, over, dy, sum);
  }

  static __device__ __forceinline__ void add_window(const Arguments& a, const PlaceOfX& at,
                                                    const Over& over, const Word& dy,
                                                    float (&sum)[kVector]) {
    const float part = kMax ? 1.f : 1.f / Base::divisor(over.p, over.q);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      if constexpr (kMax) {
        const int won = a.places[over.in(at) + k];
        if (won == at.row * Base::kWidth + at.column) sum[k] += dy[k];
      } else {
        sum[k] = fmaf(dy[k], part, sum[k]);
      }
    }
  }

  static __device__ __forceinline__ float of_warp(float sum) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, i);
    return sum;
  }

  static __device__ __forceinline__ void leave_totals(
      const Arguments& a, const float (&made)[Chain::kOutputs][kVector]) {
    __shared__ float parts[kTotals > 0 ? kTotals : 1][kWarps];
#pragma unroll
    for (int t = 0; t < kTotals; ++t) {
      float sum = 0.f;
#pragma unroll
      for (int k = 0; k < kVector; ++k) sum += made[kStored + t][k];
      sum = of_warp(sum);
      if (threadIdx.x % 32 == 0) parts[t][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= kTotals) return;
    float sum = parts[threadIdx.x][0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) sum += parts[threadIdx.x][i];
    a.parts[threadIdx.x * a.blocks + blockIdx.x] = sum;
  }
};

}  // namespace plantune
