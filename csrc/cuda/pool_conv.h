// Average pooling, then a 1x1 convolution with bias and more; the pooled image is not read again.
//
//   x       (images, kHeight, kWidth, kChannels)                input, nhwc, at any address
//   weight  (kOutputs, kChannels), aligned to 16 bytes
//   bias    (kOutputs) or one value
//   y       (images, rows, columns, kOutputs) =       Expression(conv(avg_pool(x)) + bias), nhwc
//   kept    (images, rows, columns, kChannels) =      avg_pool(x), nhwc, where asked for
//
// Means are float32, rounded once to the elements that tensor cores take: the framework rounds them
// at the same place, and what is beyond the window contributes nothing, not even a product with 0.
// Products sum in float32, rounded once. Lanes read weights straight into the operands of their
// instructions, the first ones before the wait for the kernel in front. Deterministic.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/launch.h"
#include "cuda/parameter.h"
#include "cuda/vector.h"
#include "cuda/warp_mma.h"

namespace plantune {

template <int kHeight_, int kWidth_>
struct Extent {
  static constexpr int kHeight = kHeight_;
  static constexpr int kWidth = kWidth_;
};

/// Which places of a (rows, columns) image one output pixel averages.
template <typename Image, typename Kernel, typename Stride, typename Padding, bool kCountPadding_>
struct Pooling {
  static constexpr int kHeight = Image::kHeight;
  static constexpr int kWidth = Image::kWidth;
  static constexpr int kKernelRows = Kernel::kHeight;
  static constexpr int kKernelColumns = Kernel::kWidth;
  static constexpr int kPlaces = kKernelRows * kKernelColumns;
  static constexpr bool kCountPadding = kCountPadding_;
  static constexpr int kRowsOfY =
      (kHeight + 2 * Padding::kHeight - kKernelRows) / Stride::kHeight + 1;
  static constexpr int kColumnsOfY =
      (kWidth + 2 * Padding::kWidth - kKernelColumns) / Stride::kWidth + 1;

  static_assert(2 * Padding::kHeight <= kKernelRows && 2 * Padding::kWidth <= kKernelColumns,
                "a window reaches the image");

  __device__ __forceinline__ static int first_row(int row) {
    return row * Stride::kHeight - Padding::kHeight;
  }
  __device__ __forceinline__ static int first_column(int column) {
    return column * Stride::kWidth - Padding::kWidth;
  }
};

/// Output pixels and channels of a block.
template <int kTileM_, int kTileN_>
struct PoolTile {
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
};

template <typename T, typename Pool, int kChannels, int kOutputs, typename Tile, bool kBias,
          bool kKeeps, class Expression>
struct PoolConv {
  using Mma = WarpMma<T>;
  using A = typename Mma::A;
  using B = typename Mma::B;

  // Products take channels by 32, in the order in which lanes read 8 of them at once.
  static constexpr int kPairValues = 2 * Mma::kValues;
  static constexpr int kPairs = ceil_div(kChannels, kPairValues);
  static constexpr int kWarpsN = Tile::kTileN / Mma::kChannels;
  static constexpr int kThreads = Tile::kTileM / Mma::kRows * kWarpsN * 32;
  static constexpr int kVector = Vector<T>::kSize;
  static constexpr int kVectors = kPairs * kPairValues / kVector;
  static constexpr int kItems = Tile::kTileM * kVectors;
  // Windows and places of each that a thread reads at once, as far as registers reach.
  static constexpr int kAtOnce = smaller(ceil_div(kItems, kThreads), kThreads <= 256 ? 2 : 1);
  static constexpr int kPlacesAtOnce = smaller(Pool::kPlaces, 9);
  // Elements from one pooled pixel to the next: 2 of them, read as 64 bytes each, hit all banks.
  static constexpr int kPitch = kPairs * kPairValues + (kPairs % 2 == 0 ? 32 : 0);
  static constexpr int kSharedBytes = Tile::kTileM * kPitch * static_cast<int>(sizeof(T));
  // Pairs of tiles that a warp asks for before it needs the first, as far as registers reach.
  static constexpr int kRegistersOfPair = 2 * sizeof(B) / 4;
  static constexpr int kAhead = smaller(kPairs, (kThreads <= 256 ? 64 : 32) / kRegistersOfPair);

  static_assert(kChannels % kVector == 0, "a thread pools 8 channels at once");
  static_assert(kOutputs % kVector == 0, "a lane writes 8 channels at once");
  static_assert(Tile::kTileM % Mma::kRows == 0, "a tile's pixels are whole rows of products");
  static_assert(Tile::kTileN % Mma::kChannels == 0, "a tile's channels are whole products");
  static_assert(sizeof(T) == 2, "tensor cores take 16-bit elements here");

  struct Arguments {
    const T* x;
    const T* weight;
    Parameter bias;
    T* y;
    T* kept;
    int pixels;
  };

  __device__ static void run(const Arguments& a) {
    extern __shared__ uint4 memory[];
    T* pooled = reinterpret_cast<T*>(memory);
    const int warp = threadIdx.x / 32;
    const int tile_n = blockIdx.y * kWarpsN + warp % kWarpsN;
    release_successor();

    // The first weights are under way while the block waits and pools.
    const int output = tile_n * Mma::kChannels;
    B b[kAhead][2];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) load_b(b[k], a.weight, output, k);
    const int channel = output + Mma::channel_of_c();
    Sums sums;
    start(sums, a.bias, channel);
    wait_for_predecessor();

    if (reinterpret_cast<unsigned long long>(a.x) % kWordBytes == 0) {
      pool<true, kAtOnce>(pooled, a);
    } else {
      pool<false, 1>(pooled, a);
    }
    __syncthreads();

    const int first = warp / kWarpsN * Mma::kRows;
    multiply(sums, pooled + first * kPitch, a.weight, output, b);
    write(sums, a.y, blockIdx.x * Tile::kTileM + first, channel, a.pixels);
  }

 private:
  /// The weights of 32 outputs from this one on, and of the k-th 32 channels.
  __device__ __forceinline__ static void load_b(B (&b)[2], const T* weight, int output, int k) {
    Mma::gather_b(b, [&](int row, int value) {
      const int channel = k * kPairValues + value;
      if (output + row >= kOutputs || channel >= kChannels) return make_uint4(0, 0, 0, 0);
      return __ldg(reinterpret_cast<const uint4*>(weight + (output + row) * kChannels + channel));
    });
  }

  __device__ __forceinline__ static void start(Sums& sums, const Parameter& bias, int channel) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool there = kBias && channel < kOutputs;
      sums[0][i] = sums[1][i] = there ? load_parameter<T>(bias, channel + i) : 0.f;
    }
  }

  /// Where 8 channels of a pooled pixel come from.
  struct Window {
    const T* from;
    int top, left;
    bool is_there;
  };

  __device__ __forceinline__ static Window window_of(const T* x, int item, int pixels) {
    const int pixel = blockIdx.x * Tile::kTileM + item / kVectors;
    const int channel = item % kVectors * kVector;
    const int image = pixel / (Pool::kRowsOfY * Pool::kColumnsOfY);
    Window window;
    window.top = Pool::first_row(pixel / Pool::kColumnsOfY % Pool::kRowsOfY);
    window.left = Pool::first_column(pixel % Pool::kColumnsOfY);
    window.from =
        x + static_cast<long long>(image) * (Pool::kHeight * Pool::kWidth) * kChannels + channel;
    window.is_there = item < kItems && pixel < pixels && channel < kChannels;
    return window;
  }

  /// Fills the tile of pooled pixels; zeros beyond the last pixel and the last channel.
  template <bool kAligned, int kWindows>
  __device__ __forceinline__ static void pool(T* pooled, const Arguments& a) {
#pragma unroll 1
    for (int first = threadIdx.x; first < kItems; first += kWindows * kThreads) {
      Window windows[kWindows];
      float sums[kWindows][kVector] = {};
#pragma unroll
      for (int w = 0; w < kWindows; ++w) {
        windows[w] = window_of(a.x, first + w * kThreads, a.pixels);
      }
#pragma unroll
      for (int place = 0; place < Pool::kPlaces; place += kPlacesAtOnce) {
        // All of them are asked for before any is needed.
        Vector<T> elements[kWindows][kPlacesAtOnce];
#pragma unroll
        for (int w = 0; w < kWindows; ++w) {
#pragma unroll
          for (int i = 0; i < kPlacesAtOnce; ++i) {
            elements[w][i] = read<kAligned>(windows[w], place + i);
          }
        }
#pragma unroll
        for (int w = 0; w < kWindows; ++w) {
#pragma unroll
          for (int i = 0; i < kPlacesAtOnce; ++i) {
#pragma unroll
            for (int c = 0; c < kVector; ++c) sums[w][c] += elements[w][i][c];
          }
        }
      }
#pragma unroll
      for (int w = 0; w < kWindows; ++w) {
        const int item = first + w * kThreads;
        // A branch keeps all of the loads in front of the first mean: 2.8 us instead of 3.7 for
        // 256 channels of 4x4, 128 images, H200, 2026-11-20.
        if (item >= kItems) continue;
        const Vector<T> mean = mean_of(sums[w], windows[w]);
        const int pixel = item / kVectors, channel = item % kVectors * kVector;
        T* to = pooled + pixel * kPitch + channel;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(mean.values);
        if (kKeeps && blockIdx.y == 0 && windows[w].is_there) {
          const long long place = blockIdx.x * static_cast<long long>(Tile::kTileM) + pixel;
          mean.store(a.kept + place * kChannels + channel);
        }
      }
    }
  }

  /// 8 channels of one place of a window; zeros outside of the image.
  template <bool kAligned>
  __device__ __forceinline__ static Vector<T> read(const Window& window, int place) {
    const int row = window.top + place / Pool::kKernelColumns;
    const int column = window.left + place % Pool::kKernelColumns;
    const bool inside = row >= 0 && row < Pool::kHeight && column >= 0 && column < Pool::kWidth;
    Vector<T> elements;
    elements.clear();
    if (window.is_there && inside && place < Pool::kPlaces) {
      const T* from = window.from + (row * Pool::kWidth + column) * kChannels;
      if constexpr (kAligned) {
        // Vector::load keeps its order, which costs the overlap of two windows.
        *reinterpret_cast<uint4*>(elements.values) = *reinterpret_cast<const uint4*>(from);
      } else {
        elements.template load<false>(from);
      }
    }
    return elements;
  }

  __device__ __forceinline__ static Vector<T> mean_of(float (&sums)[kVector],
                                                      const Window& window) {
    const float share = 1.f / (Pool::kCountPadding ? Pool::kPlaces : inside(window));
    Vector<T> mean;
#pragma unroll
    for (int c = 0; c < kVector; ++c) sums[c] *= share;
    mean.round(sums);
    return mean;
  }

  /// How many places of a window are in the image.
  __device__ __forceinline__ static int inside(const Window& window) {
    const int rows = min(window.top + Pool::kKernelRows, Pool::kHeight) - max(window.top, 0);
    const int columns = min(window.left + Pool::kKernelColumns, Pool::kWidth) - max(window.left, 0);
    return rows * columns;
  }

  __device__ __forceinline__ static void multiply(Sums& sums, const T* pooled, const T* weight,
                                                  int output, B (&b)[kAhead][2]) {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      A a[2];
#pragma unroll
      for (int i = 0; i < Mma::kRowsOfA; ++i) {
#pragma unroll
        for (int j = 0; j < Mma::kRunsOfA; ++j) {
          const int place = Mma::row_of_a(i) * kPitch + k * kPairValues + Mma::run_of_a(j) * 8;
          const uint4 values = *reinterpret_cast<const uint4*>(pooled + place);
          a[0].runs[i][j] = {values.x, values.y};
          a[1].runs[i][j] = {values.z, values.w};
        }
      }
      Mma::multiply(sums, a[0], b[k % kAhead][0]);
      Mma::multiply(sums, a[1], b[k % kAhead][1]);
      if (k + kAhead < kPairs) load_b(b[k % kAhead], weight, output, k + kAhead);
    }
  }

  __device__ __forceinline__ static void write(const Sums& sums, T* y, int first, int channel,
                                               int pixels) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pixel = first + Mma::row_of_c(i);
      if (pixel >= pixels || channel >= kOutputs) continue;
      float values[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] = Expression::of({sums[i][j]});
      Vector<T> rounded;
      rounded.round(values);
      rounded.store(y + static_cast<long long>(pixel) * kOutputs + channel);
    }
  }
};

}  // namespace plantune
