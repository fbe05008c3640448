// What pools and their gradients share: which vector of channels of which pixel a thread makes.

#pragma once

#include "cuda/pool_running.h"
#include "cuda/vector.h"

namespace plantune {

/// Window says the sizes, in which order the axes are, and how many channels a thread takes.
template <typename Window>
struct PoolWindow {
  using T = typename Window::T;        // of what is read
  using Made = typename Window::Made;  // of what is made
  using Index = typename Window::Index;
  static constexpr int kVector = Window::kVector, kChannels = Window::kChannels;
  static constexpr int kHeight = Window::kHeight, kWidth = Window::kWidth;
  static constexpr int kOutHeight = Window::kOutHeight, kOutWidth = Window::kOutWidth;
  static constexpr int kRows = Window::kRows, kColumns = Window::kColumns;
  static constexpr int kRowStride = Window::kRowStride, kColumnStride = Window::kColumnStride;
  static constexpr int kRowPadding = Window::kRowPadding;
  static constexpr int kColumnPadding = Window::kColumnPadding;
  static constexpr bool kNhwc = Window::kNhwc, kMax = Window::kMax;
  static constexpr bool kTaps = Window::kTaps, kCountPadding = Window::kCountPadding;
  // Elements between neighbouring pixels.
  static constexpr int kPixelStride = kNhwc ? kChannels : 1;
  using Word = Vector<T, kVector>;
  // The winner of a window: its place in the image, or its number in the window.
  using Mark = typename Either<kTaps, unsigned char, long long>::Type;

  // Whether winners are wanted; what a pool has of a window so far.
  static constexpr bool kPlaces = Window::kPlaces;
  using Running =
      typename Either<!kMax, Added<T, kVector>,
                      typename Either<kPlaces, Winner<T, kVector>, Larger<T, kVector>>::Type>::Type;

  /// Those of a vector; bytes are read and written at once.
  struct alignas(kTaps ? kVector : 8) Marks {
    Mark of[kVector];
  };

  static_assert(kNhwc ? kChannels % kVector == 0 : kVector == 1,
                "a thread's vector stays within the channels of a pixel");

  /// A vector of the side of kWide columns and kHigh rows; `plane` is its image, or its channel.
  template <int kHigh, int kWide>
  struct Place {
    int row, column;
    Index plane, inner;

    __device__ __forceinline__ explicit Place(Index vector) : inner(0) {
      if constexpr (kNhwc) {
        inner = vector % (kChannels / kVector) * kVector;
        vector /= kChannels / kVector;
      }
      column = vector % kWide;
      vector /= kWide;
      row = vector % kHigh;
      plane = vector / kHigh;
    }

    /// Where the same channels of the first pixel are on a side of so many pixels.
    __device__ __forceinline__ Index first(int pixels) const {
      return plane * (kNhwc ? pixels * kChannels : pixels) + inner;
    }
  };

  using PlaceOfX = Place<kHeight, kWidth>;
  using PlaceOfY = Place<kOutHeight, kOutWidth>;

  /// The place of a window's first element in the image, for what has no larger one.
  static __device__ __forceinline__ int first_place(int p, int q) {
    const int top = p * kRowStride - kRowPadding, left = q * kColumnStride - kColumnPadding;
    const int row = top > 0 ? top : 0, column = left > 0 ? left : 0;
    return kTaps ? (row - top) * kColumns + column - left : row * kWidth + column;
  }

  static __device__ __forceinline__ void store_marks(Mark* to, const int (&places)[kVector]) {
    Marks marks;
#pragma unroll
    for (int k = 0; k < kVector; ++k) marks.of[k] = Mark(places[k]);
    *reinterpret_cast<Marks*>(to) = marks;
  }

  /// Elements of the image that a window covers along one axis.
  static __device__ __forceinline__ int covered(int begin, int extent, int size) {
    const int end = begin + extent;
    return (end < size ? end : size) - (begin > 0 ? begin : 0);
  }

  /// What the window of a pixel of y is divided by.
  static __device__ __forceinline__ int divisor(int row, int column) {
    if constexpr (kCountPadding) return kRows * kColumns;
    return covered(row * kRowStride - kRowPadding, kRows, kHeight) *
           covered(column * kColumnStride - kColumnPadding, kColumns, kWidth);
  }
};

}  // namespace plantune
