// Layer norm of rows, and what follows it place by place.
//
//   y[row][i] = Expression((x[row][i] - mean[row]) * rstd[row] * weight[i] + bias[i])   =
//   mean, rstd  float for each row, =; null if not wanted
//
// x, y, the residual, and weight with bias have element types of their own. Rows are contiguous. A row stays in the registers of kLanes threads: it is read once, and its
// variance is that of the deviations from its mean. All arithmetic is float, in a fixed order:
// deterministic.

#pragma once

#include "cuda/launch.h"
#include "cuda/row_lanes.h"
#include "cuda/sample_norm.h"

namespace plantune {

/// Norm says the sizes: rows of kSize elements, kVector of them at once.
template <typename Norm>
struct LayerNorm : RowLanes<Norm::kSize, Norm::kVector, Norm::kLanes, Norm::kThreads> {
  using Rows = RowLanes<Norm::kSize, Norm::kVector, Norm::kLanes, Norm::kThreads>;
  using Rows::has, Rows::kHeld, Rows::kRows, Rows::place;
  using Expression = typename Norm::Expression;
  static constexpr int kVector = Norm::kVector, kLanes = Norm::kLanes, kThreads = Norm::kThreads;
  static constexpr int kWarps = kThreads / 32;
  using Word = Neighbours<typename Norm::X, kVector>;
  using Added = Neighbours<typename Norm::Residual, kVector>;

  struct Arguments : NormArguments<Norm> {
    long long rows;
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ float parts[2][kWarps];
    release_successor();
    wait_for_predecessor();
    const int lane = threadIdx.x % kLanes;
    const long long row = blockIdx.x * (long long)(kRows) + threadIdx.x / kLanes;
    const bool there = row < a.rows;
    // Threads without a row read the last one: they take part in the sums of their warp.
    const long long first = (there ? row : a.rows - 1) * Norm::kSize;

    Word x[kHeld];
    Added residual[kHeld];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!has(i, lane)) continue;
      x[i].template load<kAligned>(a.x + first + place(i, lane));
      if constexpr (Expression::kResidual) {
        residual[i].template load<kAligned>(a.residual + first + place(i, lane));
      }
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!has(i, lane)) continue;
#pragma unroll
      for (int k = 0; k < kVector; ++k) sum += x[i][k];
    }
    const float mean = row_total<kLanes>(parts[0], sum) * (1.f / Norm::kSize);
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!has(i, lane)) continue;
#pragma unroll
      for (int k = 0; k < kVector; ++k) squares += (x[i][k] - mean) * (x[i][k] - mean);
    }
    const float variance = row_total<kLanes>(parts[1], squares) * (1.f / Norm::kSize);
    const float rstd = rsqrtf(variance + Norm::kEps);
    if (!there) return;
    if (lane == 0 && a.mean != nullptr) a.mean[row] = mean;
    if (lane == 0 && a.rstd != nullptr) a.rstd[row] = rstd;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!has(i, lane)) continue;
      leave<kAligned>(a, first, place(i, lane), x[i], residual[i], mean, rstd);
    }
  }

 private:
  template <bool kAligned>
  static __device__ __forceinline__ void leave(const Arguments& a, long long first, int place,
                                               const Word& x, const Added& residual,
                                               float mean, float rstd) {
    Neighbours<typename Norm::Weight, kVector> weight, bias;
    if constexpr (Norm::kWeight) weight.template load<kAligned>(a.weight + place);
    if constexpr (Norm::kBias) bias.template load<kAligned>(a.bias + place);
    float y[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      y[k] = (x[k] - mean) * rstd;
      if constexpr (Norm::kWeight) y[k] *= weight[k];
      if constexpr (Norm::kBias) y[k] += bias[k];
    }
    leave_vector<Expression>(a.y + first + place, y, residual);
  }
};

}  // namespace plantune
