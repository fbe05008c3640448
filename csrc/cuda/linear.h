// Linear layers of few rows, as dot products of a warp: y = Expression(a * b transposed + bias).
//
//   a     (m, kDepth) row-major              b  (n, kDepth) row-major
//   bias  (n), zero where it is null         y  (m, n) row-major, =
//
// Each has an element type of its own. A warp makes kRows by kColumns elements of y, its lanes share the inner axis. Each matrix is read
// once by each warp that needs it: for batches up to a few tens, where weights are what is moved.
// Arithmetic is float, results are rounded once. Deterministic: sums have a fixed order.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/launch.h"
#include "cuda/operands.h"

namespace plantune {

/// Operands are the element types of a, b, bias and y.
template <class Operands, int kRows, int kColumns, int kDepth, int kWidth, int kThreads,
          class Expression>
struct Linear {
  using A = typename TypeAt<0, Operands>::Type;
  using B = typename TypeAt<1, Operands>::Type;
  using Bias = typename TypeAt<2, Operands>::Type;
  using Y = typename TypeAt<3, Operands>::Type;
  static constexpr int kWords = kDepth / kWidth;
  static constexpr int kWarps = kThreads / 32;

  static_assert(kDepth % kWidth == 0, "a row is made of whole vectors");
  static_assert(kThreads % 32 == 0, "a block is made of whole warps");

  struct Arguments {
    const A* a;
    const B* b;
    const Bias* bias;
    Y* y;
    long long m, n;
  };

  /// Out-of-range rows re-read the last one; their results are discarded.
  static __device__ __forceinline__ long long row_of(long long row, long long count) {
    return (row < count ? row : count - 1) * kDepth;
  }

  /// Has the L2 cache read a warp's columns of b, which mostly are weights, while the kernel in
  /// front still runs: nothing of them is used before it ended.
  static __device__ __forceinline__ void prefetch(const Arguments& args, long long column) {
    constexpr int kLine = 128 / int(sizeof(B));
    for (int j = 0; j < kColumns; ++j) {
      const B* from = args.b + row_of(column + j, args.n);
      for (int i = threadIdx.x % 32 * kLine; i < kDepth; i += 32 * kLine) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
      }
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& args) {
    release_successor();
    const int lane = threadIdx.x % 32;
    const long long column = (blockIdx.x * (long long)(kWarps) + threadIdx.x / 32) * kColumns;
    const long long row = blockIdx.y * (long long)(kRows);
    if (blockIdx.y == 0 && column < args.n) prefetch(args, column);
    wait_for_predecessor();
    if (column >= args.n) return;

    float sums[kRows][kColumns] = {};
#pragma unroll 4
    for (int word = lane; word < kWords; word += 32) {
      Vector<A, kWidth> a[kRows];
      Vector<B, kWidth> b[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        b[j].template load<kAligned>(args.b + row_of(column + j, args.n) + word * kWidth);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        a[i].template load<kAligned>(args.a + row_of(row + i, args.m) + word * kWidth);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
          for (int k = 0; k < kWidth; ++k) sums[i][j] += a[i][k] * b[j][k];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
          sums[i][j] += __shfl_xor_sync(0xffffffffu, sums[i][j], apart);
        }
        const bool mine = lane == (i * kColumns + j) % 32;
        if (!mine || row + i >= args.m || column + j >= args.n) continue;
        const float bias = args.bias == nullptr ? 0.f : to_float(args.bias[column + j]);
        const float y = Expression::of({sums[i][j] + bias});
        args.y[(row + i) * args.n + column + j] = from_float<Y>(y);
      }
    }
  }
};

}  // namespace plantune
