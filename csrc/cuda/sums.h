// Sums of threads in a fixed order.

#pragma once

namespace plantune {

/// A sum of many numbers. If kCompensated, each addition takes up what the one before it rounded
/// away (Kahan), so that the error does not grow with their number.
template <bool kCompensated>
struct LongSum {
  float value = 0.f;

  __device__ __forceinline__ void add(float more) { value += more; }
};

template <>
struct LongSum<true> {
  float value = 0.f, lost = 0.f;

  __device__ __forceinline__ void add(float more) {
    const float whole = __fsub_rn(more, lost), sum = __fadd_rn(value, whole);
    lost = __fsub_rn(__fsub_rn(sum, value), whole);
    value = sum;
  }
};

/// The sum over a warp, in each of its lanes.
__device__ __forceinline__ float sum_of_warp(float sum) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  return sum;
}

}  // namespace plantune
