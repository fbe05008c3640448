// The gradient of average and max pooling.
//
//   dy      (N, kOutHeight, kOutWidth, kChannels) or (N, kChannels, kOutHeight, kOutWidth)
//   places  like dy: the row * kWidth + column that won each window; of a max pool alone
//   dx      (N, kHeight, kWidth, kChannels) in the same order of axes, =
//
// Each element of dx gathers from the windows that it is in, in float and in a fixed order:
// deterministic.

#pragma once

#include "cuda/launch.h"
#include "cuda/vector.h"

namespace plantune {

/// Window says the sizes and what to compute; a thread makes kVector channels of one pixel of dx.
template <typename Window>
struct PoolGrad {
  using T = typename Window::T;
  using Index = typename Window::Index;
  static constexpr int kVector = Window::kVector, kChannels = Window::kChannels;
  static constexpr int kHeight = Window::kHeight, kWidth = Window::kWidth;
  static constexpr int kOutHeight = Window::kOutHeight, kOutWidth = Window::kOutWidth;
  static constexpr int kRows = Window::kRows, kColumns = Window::kColumns;
  static constexpr bool kNhwc = Window::kNhwc, kMax = Window::kMax;
  // Windows that one pixel may be in, along each axis.
  static constexpr int kOverRows = ceil_div(kRows, Window::kRowStride);
  static constexpr int kOverColumns = ceil_div(kColumns, Window::kColumnStride);
  static constexpr int kUnrolled = kOverRows * kOverColumns <= 16 ? kOverColumns : 1;
  using Word = Vector<T, kVector>;

  static_assert(kNhwc ? kChannels % kVector == 0 : kVector == 1,
                "a thread's vector stays within the channels of a pixel");

  struct Arguments {
    const T* dy;
    T* dx;
    const long long* places;
    long long count;  // vectors of dx
  };

  /// Elements of the image that a window covers along one axis.
  static __device__ __forceinline__ int covered(int begin, int extent, int size) {
    const int end = begin + extent;
    return (end < size ? end : size) - (begin > 0 ? begin : 0);
  }

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const long long vector = blockIdx.x * (long long)(Window::kThreads) + threadIdx.x;
    if (vector >= a.count) return;
    Index rest = Index(vector);
    Index inner = 0;  // the vector of channels in a pixel
    if constexpr (kNhwc) inner = rest % (kChannels / kVector), rest /= kChannels / kVector;
    const int column = rest % kWidth;
    rest /= kWidth;
    const int row = rest % kHeight;
    rest /= kHeight;  // the image, or its channel
    const Index first = rest * (kNhwc ? kOutHeight * kOutWidth * kChannels : kOutHeight * kOutWidth);

    float sum[kVector] = {};
    // The last windows that begin at the pixel or before it.
    const int last_row = (row + Window::kRowPadding) / Window::kRowStride;
    const int last_column = (column + Window::kColumnPadding) / Window::kColumnStride;
#pragma unroll(kUnrolled == 1 ? 1 : kOverRows)
    for (int i = 0; i < kOverRows; ++i) {
      const int p = last_row - i, top = p * Window::kRowStride - Window::kRowPadding;
#pragma unroll kUnrolled
      for (int j = 0; j < kOverColumns; ++j) {
        const int q = last_column - j, left = q * Window::kColumnStride - Window::kColumnPadding;
        if (p < 0 || p >= kOutHeight || q < 0 || q >= kOutWidth) continue;
        if (top + kRows <= row || left + kColumns <= column) continue;
        const Index at = first + Index(p * kOutWidth + q) * (kNhwc ? kChannels : 1) + inner * kVector;
        Word dy;
        dy.template load<kAligned>(a.dy + at);
        const float divisor = Window::kCountPadding
                                  ? kRows * kColumns
                                  : covered(top, kRows, kHeight) * covered(left, kColumns, kWidth);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          if constexpr (kMax) {
            if (a.places[at + k] == row * kWidth + column) sum[k] += dy[k];
          } else {
            sum[k] += dy[k] / divisor;
          }
        }
      }
    }
    Word dx;
    dx.round(sum);
    dx.store(a.dx + vector * kVector);
  }
};

}  // namespace plantune
