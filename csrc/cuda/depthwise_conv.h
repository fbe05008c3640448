// Depthwise convolution of nhwc images, a filter for each channel:
//
//   y = Expression(conv(x, w) * scale + bias, residual, offset)
//
//   x            (N, kH, kW, kC)
//   w            (kR, kS, kC)
//   y, residual  (N, kP, kQ, kC); y is written by =
//
// A thread makes a vector of channels of kRows by kColumns pixels. Rows of the image pass one by
// one: each is loaded once, and multiplied by every row of the filter that meets it. Of many rows,
// a row of pixels is finished as soon as the filter has left it, so that only the sums of kLive rows
// are held, and the rows that come next are asked for before the one that is there is multiplied.
// Sums are float, in a fixed order, and rounded once: deterministic.

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
  // Rows of pixels that a row of the image may belong to.
  static constexpr int kLive = smaller(kRows, ceil_div(kR, Conv::kStrideH));
  // Rows that are asked for before they are multiplied.
  static constexpr int kAhead = smaller(2, kInRows);
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

  /// What follows a thread's sums.
  struct Affine {
    float scale[kVector], bias[kVector], offset = 0.f;

    __device__ __forceinline__ Affine(const Arguments& a, int channel) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        scale[k] = Conv::kScale ? load_parameter<T>(a.scale, channel + k) : 1.f;
        bias[k] = Conv::kBias ? load_parameter<T>(a.bias, channel + k) : 0.f;
      }
      if constexpr (Expression::kOffset) offset = load_parameter<T>(a.offset, 0);
    }
  };

  /// A thread's filters, in its registers.
  struct Filter {
    float taps[kR * kS][kVector];

    __device__ __forceinline__ explicit Filter(const T* from) {
#pragma unroll
      for (int i = 0; i < kR * kS; ++i) {
        Word w;
        w.template load<true>(from + i * kC);
#pragma unroll
        for (int k = 0; k < kVector; ++k) taps[i][k] = w[k];
      }
    }

    /// Adds row `r` times a row of the image to a row of sums.
    __device__ __forceinline__ void multiply(int r, const float (&x)[kInColumns][kVector],
                                             float (&sums)[kColumns][kVector]) const {
#pragma unroll
      for (int s = 0; s < kS; ++s) {
#pragma unroll
        for (int q = 0; q < kColumns; ++q) {
#pragma unroll
          for (int k = 0; k < kVector; ++k) {
            sums[q][k] += x[q * Conv::kStrideW + s][k] * taps[r * kS + s][k];
          }
        }
      }
    }
  };

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
    if constexpr (Conv::kSlides) {
      slide<kAligned>(a, tile);
      return;
    }
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
    const Affine affine(a, tile.channel);
#pragma unroll
    for (int p = 0; p < kRows; ++p) finish_row<kAligned>(a, tile, p, sums[p], affine);
  }

  template <bool kAligned>
  static __device__ __forceinline__ void slide(const Arguments& a, const Tile& tile) {
    const Filter filter(a.w + tile.channel);
    const Affine affine(a, tile.channel);
    float sums[kLive][kColumns][kVector] = {};
    const int first = tile.p * Conv::kStrideH - Conv::kPadH;
    Word ahead[kAhead][kInColumns];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= 0 && first + i < Conv::kH) load_row<kAligned>(a, tile, first + i, ahead[i]);
    }
#pragma unroll
    for (int i = 0; i < kInRows; ++i) {
      float x[kInColumns][kVector];
#pragma unroll
      for (int c = 0; c < kInColumns; ++c) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) x[c][k] = ahead[i % kAhead][c][k];
      }
      const int row = first + i;
      const int later = row + kAhead;
      if (i + kAhead < kInRows && later >= 0 && later < Conv::kH) {
        load_row<kAligned>(a, tile, later, ahead[i % kAhead]);
      }
#pragma unroll
      for (int p = 0; p < kRows; ++p) {
        const int r = i - p * Conv::kStrideH;
        if (r < 0 || r >= kR) continue;
        if (row >= 0 && row < Conv::kH) filter.multiply(r, x, sums[p % kLive]);
        if (r < kR - 1) continue;
        finish_row<kAligned>(a, tile, p, sums[p % kLive], affine);
#pragma unroll
        for (int q = 0; q < kColumns; ++q) {
#pragma unroll
          for (int k = 0; k < kVector; ++k) sums[p % kLive][q][k] = 0.f;
        }
      }
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void finish_row(const Arguments& a, const Tile& tile, int p,
                                                    const float (&sums)[kColumns][kVector],
                                                    const Affine& affine) {
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
        const float value = sums[q][k] * affine.scale[k] + affine.bias[k];
        made[k] =
            Expression::of({value, Expression::kResidual ? residual[k] : 0.f, affine.offset});
      }
      y.round(made);
      y.store(a.y + at);
    }
  }
};

}  // namespace plantune
