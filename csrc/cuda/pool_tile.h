// Average and max pooling of images whose windows overlap: see pool.h for what is read and made.
//
// A thread makes a vector of channels of kTileRows by kTileColumns pixels. Rows of the image pass one
// by one: each is loaded once, reduced along the windows' columns, and merged into every window that
// it is in; the row that comes next is asked for before. Sums are float and in a fixed order:
// deterministic.

#pragma once

#include "cuda/launch.h"
#include "cuda/pool_window.h"

namespace plantune {

template <typename Window>
struct PoolTile : PoolWindow<Window> {
  using Base = PoolWindow<Window>;
  using typename Base::Index, typename Base::Made, typename Base::Mark, typename Base::Running;
  using typename Base::T, typename Base::Word;
  using Base::kVector, Base::kHeight, Base::kWidth, Base::kRows, Base::kColumns, Base::kPlaces;
  using Base::kOutHeight, Base::kOutWidth, Base::kTaps;
  static constexpr int kTileRows = Window::kTileRows, kTileColumns = Window::kTileColumns;
  static constexpr int kDown = Base::kRowStride, kAlong = Base::kColumnStride;
  // What a tile reads, and the rows of windows that a row may be in.
  static constexpr int kInRows = (kTileRows - 1) * kDown + kRows;
  static constexpr int kInColumns = (kTileColumns - 1) * kAlong + kColumns;
  static constexpr int kLive = smaller(kTileRows, ceil_div(kRows, kDown));
  using Tiles = typename Base::template Place<ceil_div(kOutHeight, kTileRows),
                                              ceil_div(kOutWidth, kTileColumns)>;

  struct Arguments {
    const T* x;
    Made* y;
    Mark* places;
    long long count;  // of tiles
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const long long number = blockIdx.x * (long long)(Window::kThreads) + threadIdx.x;
    if (number >= a.count) return;
    const Tiles at{Index(number)};
    const int p0 = at.row * kTileRows, q0 = at.column * kTileColumns;
    const int top = p0 * kDown - Base::kRowPadding, left = q0 * kAlong - Base::kColumnPadding;
    const T* from = a.x + at.first(kHeight * kWidth);
    Running windows[kLive][kTileColumns];
    Word next[kInColumns];
    load_row<kAligned>(from, top, left, next);
#pragma unroll
    for (int i = 0; i < kInRows; ++i) {
      Running across[kTileColumns];
      reduce_along(next, left, across);
      if (i + 1 < kInRows) load_row<kAligned>(from, top + i + 1, left, next);
#pragma unroll
      for (int p = 0; p < kTileRows; ++p) {
        const int r = i - p * kDown;
        if (r < 0 || r >= kRows) continue;
#pragma unroll
        for (int q = 0; q < kTileColumns; ++q) {
          Running& window = windows[p % kLive][q];
          if (r == 0) window.begin(Base::first_place(p0 + p, q0 + q));
          window.merge(across[q], kTaps ? r * kColumns : (top + i) * kWidth);
          if (r == kRows - 1) leave(a, at, p0 + p, q0 + q, window);
        }
      }
    }
  }

 private:
  /// A row of the image as far as the tile reads it.
  template <bool kAligned>
  static __device__ __forceinline__ void load_row(const T* from, int row, int left,
                                                  Word (&x)[kInColumns]) {
#pragma unroll
    for (int c = 0; c < kInColumns; ++c) {
      const int column = left + c;
      if (row >= 0 && row < kHeight && column >= 0 && column < kWidth) {
        x[c].template load<kAligned>(from + Index(row * kWidth + column) * Base::kPixelStride);
      } else {
#pragma unroll
        for (int k = 0; k < kVector; ++k) x[c].values[k] = from_float<T>(Running::outside());
      }
    }
  }

  static __device__ __forceinline__ void reduce_along(const Word (&x)[kInColumns], int left,
                                                      Running (&across)[kTileColumns]) {
#pragma unroll
    for (int q = 0; q < kTileColumns; ++q) {
      across[q].begin(0);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        across[q].take(x[q * kAlong + c], kTaps ? c : left + q * kAlong + c);
      }
    }
  }

  static __device__ __forceinline__ void leave(const Arguments& a, const Tiles& at, int p, int q,
                                               const Running& window) {
    if (p >= kOutHeight || q >= kOutWidth) return;
    const Index to = at.first(kOutHeight * kOutWidth) + Index(p * kOutWidth + q) * Base::kPixelStride;
    window.template made<Made>(Base::divisor(p, q)).store(a.y + to);
    if constexpr (kPlaces) Base::store_marks(a.places + to, window.place);
  }
};

}  // namespace plantune
