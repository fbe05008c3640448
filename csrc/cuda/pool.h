// Average and max pooling of images, and the mean over all pixels.
//
//   x       (N, kHeight, kWidth, kChannels) or (N, kChannels, kHeight, kWidth)
//   y       (N, kOutHeight, kOutWidth, kChannels) in the same order of axes, =
//   places  like y: the largest one's row * kWidth + column, =; null if not wanted
//
// Sums are float and in a fixed order: deterministic. The largest is PyTorch's: NaN wins, the last
// one of several; else the first of equals.

#pragma once

#include "cuda/image_tile.h"
#include "cuda/launch.h"
#include "cuda/vector.h"

namespace plantune {

/// Window says the sizes and what to compute; a thread makes kVector channels of one output pixel.
template <typename Window>
struct Pool {
  using T = typename Window::T;
  using Index = typename Window::Index;
  static constexpr int kVector = Window::kVector, kChannels = Window::kChannels;
  static constexpr int kHeight = Window::kHeight, kWidth = Window::kWidth;
  static constexpr int kOutHeight = Window::kOutHeight, kOutWidth = Window::kOutWidth;
  static constexpr int kRows = Window::kRows, kColumns = Window::kColumns;
  static constexpr bool kNhwc = Window::kNhwc, kMax = Window::kMax;
  // Elements between neighbouring channels and pixels.
  static constexpr int kPixelStride = kNhwc ? kChannels : 1;
  static constexpr int kUnrolled = kRows * kColumns <= 16 ? kColumns : 1;
  using Word = Vector<T, kVector>;

  static_assert(kNhwc ? kChannels % kVector == 0 : kVector == 1,
                "a thread's vector stays within the channels of a pixel");

  struct Arguments {
    const T* x;
    T* y;
    long long* places;
    long long count;  // vectors of y
  };

  struct Best {
    float value[kVector];
    int place[kVector];
  };

  static __device__ __forceinline__ void take(const Word& x, int place, bool first, Best& best) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const float value = x[k];
      if constexpr (kMax) {
        if (first || value > best.value[k] || value != value) {
          best.value[k] = value;
          best.place[k] = place;
        }
      } else {
        best.value[k] = first ? value : best.value[k] + value;
      }
    }
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
    const int q = rest % kOutWidth;
    rest /= kOutWidth;
    const int p = rest % kOutHeight;
    rest /= kOutHeight;  // the image, or its channel
    const Index image = kNhwc ? kHeight * kWidth * kChannels : kHeight * kWidth;
    const T* from = a.x + rest * image + inner * kVector;

    Best best = {};
    int there = 0;
#pragma unroll(kUnrolled == 1 ? 1 : kRows)
    for (int r = 0; r < kRows; ++r) {
      const int row = p * Window::kRowStride - Window::kRowPadding + r;
#pragma unroll kUnrolled
      for (int c = 0; c < kColumns; ++c) {
        const int column = q * Window::kColumnStride - Window::kColumnPadding + c;
        if (row < 0 || row >= kHeight || column < 0 || column >= kWidth) continue;
        const int place = row * kWidth + column;
        Word x;
        x.template load<kAligned>(from + Index(place) * kPixelStride);
        take(x, place, there == 0, best);
        ++there;
      }
    }
    if constexpr (!kMax) {
      const int divisor = Window::kCountPadding ? kRows * kColumns : there;
#pragma unroll
      for (int k = 0; k < kVector; ++k) best.value[k] /= divisor;
    }
    Word y;
    y.round(best.value);
    y.store(a.y + vector * kVector);
    if (!kMax || a.places == nullptr) return;
#pragma unroll
    for (int k = 0; k < kVector; ++k) a.places[vector * kVector + k] = best.place[k];
  }
};

/// y (N, kChannels) = the mean of x (N, kPixels, kChannels); a block takes kSlice channels.
template <typename T_, int kChannels, int kSlice, int kPixels, int kThreads>
struct PixelMean {
  using T = T_;
  using Tile = ImageTile<T, kSlice, kChannels, kPixels, 1, kThreads>;

  static_assert(kChannels % kSlice == 0, "blocks share the channels without a rest");

  struct Arguments {
    const T* x;
    T* y;
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ typename Tile::Shared shared;
    release_successor();
    wait_for_predecessor();
    const long long image = blockIdx.x / (kChannels / kSlice);
    const int channel = blockIdx.x % (kChannels / kSlice) * kSlice;
    const Tile tile(image, image + 1, channel);
    typename Tile::Word x[Tile::kBatch];
    typename Tile::Floats sum = {};
#pragma unroll 1
    for (int batch = 0; batch < Tile::kBatches; ++batch) {
      tile.template load<kAligned>(a.x, batch, x);
      tile.add(x, batch, sum);
    }
    tile.reduce(shared, sum, [&](int, int place, float mean) {
      a.y[image * kChannels + channel + Tile::Channels::column_at(place)] = from_float<T>(mean);
    });
  }
};

}  // namespace plantune
