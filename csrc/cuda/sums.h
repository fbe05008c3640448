// Sums of threads in a fixed order.

#pragma once

namespace plantune {

/// The sum over a warp, in each of its lanes.
__device__ __forceinline__ float sum_of_warp(float sum) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return sum;
}

}  // namespace plantune
