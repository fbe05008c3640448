// What a lane of Stem makes of the pixels that it has read: the operands of its products.
//
// Pixels of another type than T, or with a scale, are rounded once. Where a lane has all channels, it
// puts its pixels into the weights' order, in which the channels of a pixel are side by side.

#pragma once

#include "cuda/se_resnet9/stem_pixels.h"
#include "cuda/vector.h"
#include "cuda/warp_mma.h"

namespace plantune {

/// Operands of kBatch channels at once, in the order of pixels or, if kWhole, in that of weights.
template <typename T, typename Pixels, int kBatch, int kTilesM, bool kWhole>
struct StemOperands {
  using Mma = WarpMma<T>;
  using A = typename Mma::A;
  using In = typename Pixels::In;
  // 4 pixels side by side, as they are stored.
  using Run = typename WordOf<4 * static_cast<int>(sizeof(In))>::Type;

  /// What a lane brings of a channel to a product, as it is stored.
  struct Runs {
    Run runs[Mma::kRowsOfA][Mma::kRunsOfA];
  };

  /// What a lane brings of some channels, and what they are scaled and shifted by.
  struct Batch {
    Runs runs[kBatch][kTilesM];
    float2 scales[Pixels::kScaled ? kBatch : 1];
  };

  /// A batch's operands: each of one channel, or of neighbours in the weights' order.
  __device__ __forceinline__ static void make(A (&a)[kBatch], const Batch& batch, int m) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      a[i] = operand(batch.runs[i][m], batch.scales[Pixels::kScaled ? i : 0]);
    }
    if constexpr (kWhole && kBatch > 1) interleave(a);
  }

 private:
  /// From pixels side by side for each channel to channels side by side for each pixel.
  __device__ __forceinline__ static void interleave(A (&a)[kBatch]) {
    A by_pixel[kBatch];
#pragma unroll
    for (int index = 0; index < kBatch; ++index) {
#pragma unroll
      for (int i = 0; i < Mma::kRowsOfA; ++i) {
#pragma unroll
        for (int j = 0; j < Mma::kRunsOfA; ++j) {
          by_pixel[index].runs[i][j] = {pair_of(a, i, j, 4 * index),
                                        pair_of(a, i, j, 4 * index + 2)};
        }
      }
    }
#pragma unroll
    for (int index = 0; index < kBatch; ++index) a[index] = by_pixel[index];
  }

  /// Values `first` and the next of a row of patches whose channels are side by side.
  __device__ __forceinline__ static unsigned pair_of(const A (&a)[kBatch], int i, int j,
                                                     int first) {
    const int dx = first / kBatch, next_dx = (first + 1) / kBatch;
    const uint2 run = a[first % kBatch].runs[i][j];
    const uint2 next = a[(first + 1) % kBatch].runs[i][j];
    return __byte_perm(dx < 2 ? run.x : run.y, next_dx < 2 ? next.x : next.y,
                       (dx % 2 ? 0x32 : 0x10) | (next_dx % 2 ? 0x7600 : 0x5400));
  }

  /// Runs as the product takes them.
  __device__ __forceinline__ static A operand(const Runs& runs, const float2& scale) {
    A a;
#pragma unroll
    for (int i = 0; i < Mma::kRowsOfA; ++i) {
#pragma unroll
      for (int j = 0; j < Mma::kRunsOfA; ++j) {
        if constexpr (AreOperands<T, Pixels>::kValue) {
          a.runs[i][j] = runs.runs[i][j];
        } else {
          a.runs[i][j] = rounded(runs.runs[i][j], scale);
        }
      }
    }
    return a;
  }

  __device__ __forceinline__ static uint2 rounded(const Run& run, const float2& scale) {
    float values[4];
    widen_run(values, *reinterpret_cast<const Vector<In, 4>*>(&run));
    if constexpr (Pixels::kScaled) {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = fmaf(values[i], scale.x, scale.y);
    }
    Vector<T, 4> rounded;
    rounded.round(values);
    return *reinterpret_cast<const uint2*>(rounded.values);
  }
};

}  // namespace plantune
