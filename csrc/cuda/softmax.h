// The softmax of rows, of what a chain of pointwise ops makes:
//
//   v[row][i] = Chain::evaluate(in[0][...], in[1][...], ...)
//   y[row][i] = exp(v[row][i] - max of v[row]) / sum over i of exp(v[row][i] - max of v[row])   =
//
// Each operand and y has an element type of its own. Rows are contiguous in y; operands are broadcast as in pointwise.h, their last axis is the row. A
// row stays in the registers of kLanes threads of a warp. All arithmetic is float, in a fixed order:
// deterministic.

#pragma once

#include "cuda/arithmetic.h"
#include "cuda/broadcast.h"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/row_lanes.h"

namespace plantune {

/// Chain says the expression and where operands are; rows have kSize elements.
template <typename Chain>
struct Softmax : RowLanes<Chain::kSize, 1, Chain::kLanes, Chain::kThreads> {
  using Rows = RowLanes<Chain::kSize, 1, Chain::kLanes, Chain::kThreads>;
  using Rows::has, Rows::kHeld, Rows::kRows, Rows::place;
  using Made = typename TypeAt<0, typename Chain::Outputs>::Type;
  using Index = typename Chain::Index;
  static constexpr int kInputs = Chain::kInputs, kSize = Chain::kSize, kLanes = Chain::kLanes;

  static_assert(kLanes <= 32, "lanes of a warp meet");

  struct Arguments {
    const void* in[kInputs];
    Made* y;
    long long rows;
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const int lane = threadIdx.x % kLanes;
    const long long row = blockIdx.x * (long long)(kRows) + threadIdx.x / kLanes;
    const bool there = row < a.rows;
    // Threads without a row read the last one: they meet the others of their warp.
    const Index first = Index(there ? row : a.rows - 1) * kSize;

    float in[kHeld][kInputs], v[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!has(i, lane)) continue;
      const Index at = first + place(i, lane);
      each<kInputs>([&](auto number) {
        constexpr int k = decltype(number)::kValue;
        using T = typename TypeAt<k, typename Chain::Inputs>::Type;
        in[i][k] = to_float(static_cast<const T*>(a.in[k])[place_in<Chain>(k, at)]);
      });
    }
    float most = -__int_as_float(0x7f800000);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!has(i, lane)) continue;
      float made[1];
      Chain::evaluate(in[i], made);
      v[i] = made[0];
      most = fmaxf(most, v[i]);  // a NaN shows in the sum
    }
#pragma unroll
    for (int i = kLanes / 2; i > 0; i /= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, i));
    }
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!has(i, lane)) continue;
      v[i] = exponential(v[i] - most);
      sum += v[i];
    }
#pragma unroll
    for (int i = kLanes / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, i);
    const float part = 1.f / sum;
    if (!there) return;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (has(i, lane)) a.y[first + place(i, lane)] = from_float<Made>(v[i] * part);
    }
  }

 private:
  /// Results of 16 bits hide what the quicker one rounds off.
  static __device__ __forceinline__ float exponential(float x) {
    return sizeof(Made) == 2 ? __expf(x) : expf(x);
  }
};

}  // namespace plantune
