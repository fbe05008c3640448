// What reductions over a block's threads merge: moments of some numbers, and pairs of sums.

#pragma once

namespace plantune {

__device__ __forceinline__ float of_other_lane(float value, int distance) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, distance);
}

/// Count, mean and squared deviations of some numbers.
struct Moments {
  float count, mean, squares;

  __device__ __forceinline__ void merge(const Moments& other) {
    if (other.count == 0.f) return;
    const float both = count + other.count, part = other.count / both;
    const float distance = other.mean - mean;
    mean += distance * part;
    squares += other.squares + distance * distance * count * part;
    count = both;
  }

  /// Those of the lane whose number differs in the bit `distance`.
  __device__ __forceinline__ Moments of_lane(int distance) const {
    return {of_other_lane(count, distance), of_other_lane(mean, distance),
            of_other_lane(squares, distance)};
  }
};

/// Two sums.
struct Sums {
  float first, second;

  __device__ __forceinline__ void merge(const Sums& other) {
    first += other.first;
    second += other.second;
  }

  __device__ __forceinline__ Sums of_lane(int distance) const {
    return {of_other_lane(first, distance), of_other_lane(second, distance)};
  }
};

}  // namespace plantune
