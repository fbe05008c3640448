// Depthwise convolution of nhwc images, a filter for each channel:
//
//   y = Expression(conv(x, w) * scale + bias, residual, offset)
//
//   x            (N, kH, kW, kC)
//   w            (kR, kS, kC)
//   y, residual  (N, kP, kQ, kC); y is written by =
//
// A thread makes a vector of channels of kRows by kColumns pixels. Rows of the image pass one by
// one: each is loaded once, and multiplied by every row of the filter that meets it. Sums are
// float, in a fixed order, and rounded once: deterministic.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/launch.h"
#include "cuda/parameter.h"
#include "cuda/vector.h"

namespace plantune {

/// Conv says the sizes and what to compute.
template <class Conv>
struct DepthwiseConv {
  using T = typename Conv::T;
  using Index = typename Conv::Index;
  using Expression = typename Conv::Expression;
  static constexpr int kVector = Conv::kVector, kRows = Conv::kRows, kColumns = Conv::kColumns;
  static constexpr int kR = Conv::kR, kS = Conv::kS, kC = Conv::kC;
  static constexpr int kVectors = kC / kVector;
  static constexpr int kTilesP = ceil_div(Conv::kP, kRows), kTilesQ = ceil_div(Conv::kQ, kColumns);
  // What a tile reads of the image.
  static constexpr int kInRows = (kRows - 1) * Conv::kStrideH + kR;
  static constexpr int kInColumns = (kColumns - 1) * Conv::kStrideW + kS;
  using Word = Vector<T, kVector>;

  static_assert(kC % kVector == 0, "a thread's vector stays within the channels of a pixel");

  struct Arguments {
    const T *x, *w, *residual;
    T* y;
    long long count;  // tiles of threads
    Parameter scale, bias, offset;
  };

  struct Tile {
    Index image;
    int p, q, channel;  // the first ones

    __device__ __forceinline__ explicit Tile(Index rest) {
      channel = int(rest % kVectors) * kVector;
      rest /= kVectors;
      q = int(rest % kTilesQ) * kColumns;
      rest /= kTilesQ;
      p = int(rest % kTilesP) * kRows;
      image = rest / kTilesP;
    }
  };

  /// A row of the image as far as the tile reads it, zeros outside.
  template <bool kAligned>
  static __device__ __forceinline__ void load_row(const Arguments& a, const Tile& tile, int row,
                                                  Word (&x)[kInColumns]) {
    const T* from = a.x + ((tile.image * Conv::kH + row) * Conv::kW) * kC + tile.channel;
    const int first = tile.q * Conv::kStrideW - Conv::kPadW;
#pragma unroll
    for (int c = 0; c < kInColumns; ++c) {
      if (first + c >= 0 && first + c < Conv::kW) {
        x[c].template load<kAligned>(from + Index(first + c) * kC);
      } else {
        x[c].clear();
      }
    }
  }

  /// Adds a row of the filter times a row of the image to a row of sums.
  static __device__ __forceinline__ void multiply(const T* filter, const Word (&x)[kInColumns],
                                                  float (&sums)[kColumns][kVector]) {
#pragma unroll
    for (int s = 0; s < kS; ++s) {
      Word w;
      w.template load<true>(filter + s * kC);
#pragma unroll
      for (int q = 0; q < kColumns; ++q) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) sums[q][k] += x[q * Conv::kStrideW + s][k] * w[k];
      }
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const long long number = blockIdx.x * (long long)(Conv::kThreads) + threadIdx.x;
    if (number >= a.count) return;
    const Tile tile{Index(number)};
    float sums[kRows][kColumns][kVector] = {};
    const int first = tile.p * Conv::kStrideH - Conv::kPadH;
#pragma unroll(kR <= 3 ? kInRows : 1)
    for (int i = 0; i < kInRows; ++i) {
      if (first + i < 0 || first + i >= Conv::kH) continue;
      Word x[kInColumns];
      load_row<kAligned>(a, tile, first + i, x);
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const int r = i - p * Conv::kStrideH;
        if (r < 0 || r >= kR) continue;
        multiply(a.w + r * kS * kC + tile.channel, x, sums[p]);
      }
    }
    finish<kAligned>(a, tile, sums);
  }

  template <bool kAligned>
  static __device__ __forceinline__ void finish(const Arguments& a, const Tile& tile,
                                                float (&sums)[kRows][kColumns][kVector]) {
    float scale[kVector], bias[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      scale[k] = Conv::kScale ? load_parameter<T>(a.scale, tile.channel + k) : 1.f;
      bias[k] = Conv::kBias ? load_parameter<T>(a.bias, tile.channel + k) : 0.f;
    }
    float offset = 0.f;
    if constexpr (Expression::kOffset) offset = load_parameter<T>(a.offset, 0);
#pragma unroll
    for (int p = 0; p < kRows; ++p) {
#pragma unroll
      for (int q = 0; q < kColumns; ++q) {
        if (tile.p + p >= Conv::kP || tile.q + q >= Conv::kQ) continue;
        const Index pixel = (tile.image * Conv::kP + tile.p + p) * Conv::kQ + tile.q + q;
        const Index at = pixel * kC + tile.channel;
        Word residual, y;
        if constexpr (Expression::kResidual) residual.template load<kAligned>(a.residual + at);
        float made[kVector];
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float value = sums[p][q][k] * scale[k] + bias[k];
          made[k] = Expression::of({value, Expression::kResidual ? residual[k] : 0.f, offset});
        }
        y.round(made);
        y.store(a.y + at);
      }
    }
  }
};

}  // namespace plantune
