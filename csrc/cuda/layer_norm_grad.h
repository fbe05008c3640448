// The gradients of a layer norm of rows:
//
//   g = dy[row][i] * weight[i],  h = (x[row][i] - mean[row]) * rstd[row]
//   dx[row][i] = (g - mean of g over i - h * mean of g * h over i) * rstd[row]       =
//   dweight[i] = sum over rows of dy * h,  dbias[i] = sum over rows of dy            =
//
// x, dy, dx, the weight, and its gradient with that of the bias have element types of their own. Rows
// are contiguous and stay in the registers of kLanes threads, as in layer_norm.h; what is not wanted is
// null. A block takes every gridDim.x-th group of rows and leaves what it summed over them in `parts`,
// blocks by sums by elements, which `collect` adds. All arithmetic is float, in a fixed order:
// deterministic.

#pragma once

#include "cuda/collect.h"
#include "cuda/launch.h"
#include "cuda/row_lanes.h"
#include "cuda/sample_norm.h"

namespace plantune {

/// Norm says the sizes: rows of kSize elements, kVector of them at once; kSums of weight and bias
/// have a gradient.
template <typename Norm>
struct LayerNormGrad : RowLanes<Norm::kSize, Norm::kVector, Norm::kLanes, Norm::kThreads> {
  using Rows = RowLanes<Norm::kSize, Norm::kVector, Norm::kLanes, Norm::kThreads>;
  using Rows::has, Rows::kHeld, Rows::kRows, Rows::place;
  using Dx = typename Norm::Dx;
  using Weight = typename Norm::Weight;
  static constexpr int kVector = Norm::kVector, kLanes = Norm::kLanes, kThreads = Norm::kThreads;
  static constexpr int kSize = Norm::kSize, kSums = Norm::kSums;
  static constexpr int kWarps = kThreads / 32;
  using X = Neighbours<typename Norm::X, kVector>;
  using Dy = Neighbours<typename Norm::Dy, kVector>;
  using Weights = Neighbours<Weight, kVector>;

  struct Arguments {
    const typename Norm::Dy* dy;
    const typename Norm::X* x;
    const float *mean, *rstd;
    const Weight* weight;
    Dx* dx;
    typename Norm::Sum *dweight, *dbias;
    float* parts;
    long long rows, blocks;
  };

  /// What a thread adds over its rows.
  struct Sums {
    float of[kSums > 0 ? kSums : 1][kHeld][kVector];
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ float lanes[2][kWarps];
    release_successor();
    wait_for_predecessor();
    const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
    Weights weight[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (kSums > 0 && has(i, lane)) {
        weight[i].template load<kAligned>(a.weight + place(i, lane));
      }
    }
    Sums sums = {};
    // Threads without a row take part in the sums of their warp, and leave nothing.
    for (long long first = blockIdx.x * (long long)(kRows); first < a.rows;
         first += gridDim.x * (long long)(kRows)) {
      row<kAligned>(a, first + group, lane, lanes, weight, sums);
    }
    if constexpr (kSums > 0) leave(a, lane, group, sums);
  }

  template <bool kAligned>
  static __device__ __forceinline__ void collect(const Arguments& a) {
    collect_affine<kSize, kSums, kThreads>(a.parts, a.blocks, a.dweight, a.dbias);
  }

 private:
  template <bool kAligned>
  static __device__ __forceinline__ void row(const Arguments& a, long long row, int lane,
                                             float (&lanes)[2][kWarps],
                                             const Weights (&weight)[kHeld], Sums& sums) {
    const bool there = row < a.rows;
    const long long first = (there ? row : a.rows - 1) * kSize;
    const float mean = a.mean[there ? row : a.rows - 1], rstd = a.rstd[there ? row : a.rows - 1];
    X x[kHeld];
    Dy dy[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!has(i, lane)) continue;
      x[i].template load<kAligned>(a.x + first + place(i, lane));
      dy[i].template load<kAligned>(a.dy + first + place(i, lane));
    }
    float sum = 0.f, product = 0.f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!has(i, lane)) continue;
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float h = (x[i][k] - mean) * rstd, g = dy[i][k] * (kSums > 0 ? weight[i][k] : 1.f);
        sum += g;
        product += g * h;
        if (!there) continue;
        if constexpr (kSums > 0) sums.of[0][i][k] += dy[i][k] * h;
        if constexpr (kSums > 1) sums.of[1][i][k] += dy[i][k];
      }
    }
    const float mean_g = row_total<kLanes>(lanes[0], sum) * (1.f / kSize);
    const float mean_gh = row_total<kLanes>(lanes[1], product) * (1.f / kSize);
    if (!there || a.dx == nullptr) return;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!has(i, lane)) continue;
      float dx[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const float h = (x[i][k] - mean) * rstd, g = dy[i][k] * (kSums > 0 ? weight[i][k] : 1.f);
        dx[k] = (g - mean_g - h * mean_gh) * rstd;
      }
      Neighbours<Dx, kVector> rounded;
      rounded.round(dx);
      rounded.store(a.dx + first + place(i, lane));
    }
  }

  /// What the block summed: groups of lanes add to it one after the other.
  static __device__ __forceinline__ void leave(const Arguments& a, int lane, int group,
                                               const Sums& sums) {
    __shared__ float whole[kSums > 0 ? kSums * kSize : 1];
    for (int turn = 0; turn < kRows; ++turn) {
      __syncthreads();
      if (turn != group) continue;
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          if (!has(i, lane)) continue;
#pragma unroll
          for (int k = 0; k < kVector; ++k) {
            float* to = whole + s * kSize + place(i, lane) + k;
            *to = (turn == 0 ? 0.f : *to) + sums.of[s][i][k];
          }
        }
      }
    }
    __syncthreads();
    float* part = a.parts + blockIdx.x * (long long)(kSums * kSize);
    for (int i = threadIdx.x; i < kSums * kSize; i += kThreads) part[i] = whole[i];
  }
};

}  // namespace plantune
