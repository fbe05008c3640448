// Average and max pooling of images, and the mean over all pixels.
//
//   x       (N, kHeight, kWidth, kChannels) or (N, kChannels, kHeight, kWidth)
//   y       (N, kOutHeight, kOutWidth, kChannels) in the same order of axes, =
//   places  like y: the largest one's row * kWidth + column in the image, of kTaps its row * kColumns +
//           column in the window, =; if kPlaces
//
// x and y have element types of their own. Sums are float and in a fixed order: deterministic. The
// largest is PyTorch's: NaN wins, the last one of several; else the first of equals.

#pragma once

#include "cuda/image_tile.h"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/pool_window.h"

namespace plantune {

/// A thread makes kVector channels of one output pixel.
template <typename Window>
struct Pool : PoolWindow<Window> {
  using Base = PoolWindow<Window>;
  using typename Base::Index, typename Base::Made, typename Base::Mark, typename Base::Marks;
  using typename Base::Running, typename Base::T, typename Base::Word;
  using Base::kVector, Base::kHeight, Base::kWidth, Base::kRows, Base::kColumns, Base::kPlaces;
  using Base::kTaps;
  // A row of the window, or all of it, is asked for before any of it is looked at.
  static constexpr int kRowsAtOnce = kRows * kColumns <= 16 ? kRows : 1;
  static constexpr int kAtOnce = kRowsAtOnce * kColumns;
  static constexpr bool kWhole = kAtOnce <= 16;

  struct Arguments {
    const T* x;
    Made* y;
    Mark* places;
    long long count;  // vectors of y
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const long long vector = blockIdx.x * (long long)(Window::kThreads) + threadIdx.x;
    if (vector >= a.count) return;
    const typename Base::PlaceOfY at{Index(vector)};
    const T* from = a.x + at.first(kHeight * kWidth);
    Running window;
    window.begin(Base::first_place(at.row, at.column));
#pragma unroll(kRowsAtOnce == 1 ? 1 : kRows)
    for (int r = 0; r < kRows; r += kRowsAtOnce) {
      if constexpr (kWhole) {
        take_at_once<kAligned>(from, at, r, window);
      } else {
        for (int c = 0; c < kColumns; ++c) take_one<kAligned>(from, at, r, c, window);
      }
    }
    window.template made<Made>(Base::divisor(at.row, at.column)).store(a.y + vector * kVector);
    if constexpr (kPlaces) Base::store_marks(a.places + vector * kVector, window.place);
  }

 private:
  /// Where an element of the window is in the image; negative outside of it.
  static __device__ __forceinline__ int place_of(const typename Base::PlaceOfY& at, int r, int c) {
    const int row = at.row * Base::kRowStride - Base::kRowPadding + r;
    const int column = at.column * Base::kColumnStride - Base::kColumnPadding + c;
    const bool inside = row >= 0 && row < kHeight && column >= 0 && column < kWidth;
    return inside ? row * kWidth + column : -1;
  }

  template <bool kAligned>
  static __device__ __forceinline__ void take_at_once(const T* from,
                                                      const typename Base::PlaceOfY& at, int r,
                                                      Running& window) {
    Word x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int place = place_of(at, r + i / kColumns, i % kColumns);
      if (place >= 0) x[i].template load<kAligned>(from + Index(place) * Base::kPixelStride);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int place = place_of(at, r + i / kColumns, i % kColumns);
      if (place >= 0) window.take(x[i], kTaps ? r * kColumns + i : place);
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void take_one(const T* from,
                                                  const typename Base::PlaceOfY& at, int r, int c,
                                                  Running& window) {
    const int place = place_of(at, r, c);
    if (place < 0) return;
    Word x;
    x.template load<kAligned>(from + Index(place) * Base::kPixelStride);
    window.take(x, kTaps ? r * kColumns + c : place);
  }
};

/// y (N, kChannels) = the mean of x (N, kPixels, kChannels); a block takes kSlice channels.
template <typename T_, typename Made, int kChannels, int kSlice, int kPixels, int kThreads>
struct PixelMean {
  using T = T_;
  using Tile = ImageTile<T, kSlice, kChannels, kPixels, 1, kThreads>;

  static_assert(kChannels % kSlice == 0, "blocks share the channels without a rest");

  struct Arguments {
    const T* x;
    Made* y;
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
      a.y[image * kChannels + channel + Tile::Channels::column_at(place)] = from_float<Made>(mean);
    });
  }
};

}  // namespace plantune
