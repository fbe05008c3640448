// What the norms of samples share: what they read and write, and how.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/vector.h"

namespace plantune {

/// Null for what there is not.
template <typename T, typename Statistic>
struct NormArguments {
  const T* x;
  T* y;
  const T* weight;
  const T* bias;
  const T* residual;
  Statistic* mean;
  Statistic* rstd;
};

/// Writes what follows a vector of values.
template <typename Expression, typename T, int kSize>
__device__ __forceinline__ void leave_vector(T* to, float (&y)[kSize],
                                             const Vector<T, kSize>& residual) {
#pragma unroll
  for (int k = 0; k < kSize; ++k) {
    At at{y[k]};
    if constexpr (Expression::kResidual) at.residual = residual[k];
    y[k] = Expression::of(at);
  }
  Vector<T, kSize> rounded;
  rounded.round(y);
  rounded.store(to);
}

}  // namespace plantune
