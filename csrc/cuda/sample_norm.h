// What the norms of samples share: what they read and write, and how.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/operands.h"

namespace plantune {

/// Null for what there is not. Norm says the element type of each.
template <typename Norm>
struct NormArguments {
  const typename Norm::X* x;
  typename Norm::Y* y;
  const typename Norm::Weight* weight;
  const typename Norm::Weight* bias;
  const typename Norm::Residual* residual;
  typename Norm::Statistic* mean;
  typename Norm::Statistic* rstd;
};

/// Writes what follows a vector of values.
template <typename Expression, typename Y, typename Residual, int kSize>
__device__ __forceinline__ void leave_vector(Y* to, float (&y)[kSize],
                                             const Neighbours<Residual, kSize>& residual) {
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    At at{y[k]};
    if constexpr (Expression::kResidual) at.residual = residual[k];
    y[k] = Expression::of(at);
  }
  Neighbours<Y, kSize> rounded;
  rounded.round(y);
  rounded.store(to);
}

/// The sum over the kLanes lanes of a row, in each of them; `parts` holds those of warps.
template <int kLanes, int kWarps>
__device__ __forceinline__ float row_total(float (&parts)[kWarps], float sum) {
#pragma unroll
  for (int i = smaller(kLanes, 32) / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, i);
  if constexpr (kLanes > 32) {
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    const int warp = threadIdx.x / kLanes * (kLanes / 32);
    sum = parts[warp];
#pragma unroll
    for (int i = 1; i < kLanes / 32; ++i) sum += parts[warp + i];
  }
  return sum;
}

}  // namespace plantune
