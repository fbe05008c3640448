// Rows of kSize elements, each of which stays in the registers of kLanes threads: a lane has vectors
// of kVector neighbours, kLanes vectors apart.

#pragma once

#include "cuda/vector.h"

namespace plantune {

template <int kSize, int kVector, int kLanes, int kThreads>
struct RowLanes {
  static constexpr int kRows = kThreads / kLanes;  // of a block
  static constexpr int kVectors = kSize / kVector;
  static constexpr int kHeld = ceil_div(kVectors, kLanes);  // vectors of a thread

  static_assert(kThreads % kLanes == 0 && kThreads % 32 == 0, "rows have whole blocks or warps");
  static_assert((kLanes & (kLanes - 1)) == 0, "lanes meet in pairs");
  static_assert(kSize % kVector == 0, "a row is read in whole vectors");

  /// Where the lane's vector number `i` is in the row.
  static __device__ __forceinline__ int place(int i, int lane) {
    return (i * kLanes + lane) * kVector;
  }

  /// Whether the lane's vector number `i` is of the row.
  static __device__ __forceinline__ bool has(int i, int lane) {
    return (i + 1) * kLanes <= kVectors || i * kLanes + lane < kVectors;
  }
};

}  // namespace plantune
