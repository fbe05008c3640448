// Two convolutions of 3x3 one after the other, of nhwc images of few channels, and what they read
// added to what they make: a residual block on tensor cores from Ampere on.
//
//   v = Between(conv(x, w) * scale + bias), or of ReLU(x)
//   y = Expression(conv(v, w2) * scale2 + bias2, x)
//
//   x, y    (N, kH, kW, kC); y is written by =
//   v       (N, kH, kW, kBetween), zeros beyond the image; it never leaves a block
//   w, w2   as grouped_conv.h has them
//
// A block makes kTileP by kTileQ pixels of y: it copies what they read into shared memory once,
// makes v with a margin of one pixel there, and y in the place of x. v is rounded, as it is between
// two steps. Sums are float, in a fixed order, and rounded once: deterministic.

#pragma once

#include "cuda/grouped_conv.h"

namespace plantune {

/// One of the convolutions, over so many pixels, as grouped_conv.h reads its problem.
template <class Pair, int kRows, int kColumns, int kInputs, int kOutputs>
struct LayerOfPair {
  using T = typename Pair::T;
  using Expression = Value;
  static constexpr int kGroups = 1, kSlab = 1, kGroupC = kInputs, kGroupO = kOutputs;
  static constexpr int kThreads = Pair::kThreads, kTileP = kRows, kTileQ = kColumns;
  static constexpr int kH = Pair::kH, kW = Pair::kW, kP = Pair::kH, kQ = Pair::kW;
  static constexpr bool kPool = false;
  static constexpr int kFew = 0;
  static constexpr int kR = 3, kS = 3, kStrideH = 1, kStrideW = 1, kPadH = 1, kPadW = 1;
};

/// Pair says the sizes and what to compute.
template <class Pair>
struct ConvPair {
  using T = typename Pair::T;
  static constexpr int kThreads = Pair::kThreads, kH = Pair::kH, kW = Pair::kW;
  static constexpr int kTileP = Pair::kTileP, kTileQ = Pair::kTileQ;
  static constexpr int kTilesP = ceil_div(kH, kTileP), kTilesQ = ceil_div(kW, kTileQ);
  // Where a tile has all rows of an image, those above and below of v are zeros.
  static constexpr int kTop = kTilesP == 1, kLeft = kTilesQ == 1;
  static constexpr int kRows = kTileP + 2 - 2 * kTop, kColumns = kTileQ + 2 - 2 * kLeft;
  using First =
      GroupedConv<LayerOfPair<Pair, kRows, kColumns, Pair::kC, Pair::kBetween>, true>;
  using Second =
      GroupedConv<LayerOfPair<Pair, kTileP, kTileQ, Pair::kBetween, Pair::kC>, true>;
  static constexpr int kPixels = First::kInPixels * First::kInPitch;
  static constexpr int kWords = Pair::kC / 8;
  static constexpr int kSharedBytes = 16 * (kPixels + Second::kInPixels * Second::kInPitch);

  struct Arguments {
    const T* x;
    const uint2 *w, *w2;
    T* y;
    Parameter scale, bias, scale2, bias2;
  };

  /// The place in shared memory of what y adds to a pixel of the tile, and of what it becomes.
  static __device__ __forceinline__ int place_of(int m) {
    const int row = m / kTileQ + 2 - kTop, column = m % kTileQ + 2 - kLeft;
    return (row * First::kInQ + column) * First::kInPitch;
  }

  /// The rows and columns of v beyond an image that tiles have whole.
  static __device__ __forceinline__ void clear_margin(uint4* between) {
    if constexpr (kTop + kLeft > 0) {
#pragma unroll 1
      for (int i = threadIdx.x; i < Second::kInPixels; i += kThreads) {
        const int row = i / Second::kInQ, column = i % Second::kInQ;
        const bool made = row >= kTop && row < kTop + kRows && column >= kLeft &&
                          column < kLeft + kColumns;
        if (made) continue;
#pragma unroll
        for (int k = 0; k < Second::kInPitch; ++k) {
          between[i * Second::kInPitch + k] = make_uint4(0, 0, 0, 0);
        }
      }
    }
  }

  static __device__ __forceinline__ void numbers_of(const Parameter& parameter, int channel,
                                                    float2& to) {
    to = {load_parameter<T>(parameter, channel), load_parameter<T>(parameter, channel + 1)};
  }

  /// Makes all sums of a layer of what is in shared memory; `put` takes two of a pixel.
  template <class Layer, bool kRelu, bool kScale, bool kBias, class Put>
  static __device__ __forceinline__ void make(const uint2* weights, const uint4* from,
                                              const Parameter& scales, const Parameter& biases,
                                              Put&& put) {
    constexpr int kItems = Layer::kColumns * Layer::kItemsM;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int item = threadIdx.x / 32; item < kItems; item += Layer::kWarps) {
      const int column = item / Layer::kItemsM * Layer::kWide;
      const int first = item % Layer::kItemsM * Layer::kHigh * 16;
      float sums[Layer::kHigh][Layer::kWide][4] = {};
      Layer::template multiply<kRelu>(weights + column * (Layer::kSteps * 32), from, 0, first,
                                      sums);
#pragma unroll
      for (int n = 0; n < Layer::kWide; ++n) {
        const int channel = (column + n) * 8 + lane % 4 * 2;
        float2 scale = {1.f, 1.f}, bias = {};
        if constexpr (kScale) numbers_of(scales, channel, scale);
        if constexpr (kBias) numbers_of(biases, channel, bias);
#pragma unroll
        for (int i = 0; i < 2 * Layer::kHigh; ++i) {
          const int m = first + i * 8 + lane / 4;
          if (m >= Layer::kPixels) continue;
          const float* sum = &sums[i / 2][n][i % 2 * 2];
          put(m, channel, float2{sum[0] * scale.x + bias.x, sum[1] * scale.y + bias.y});
        }
      }
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    extern __shared__ __align__(16) uint4 image[];
    uint4* between = image + kPixels;
    const int q = int(blockIdx.x % kTilesQ) * kTileQ;
    const int p = int(blockIdx.x / kTilesQ % kTilesP) * kTileP;
    const typename First::Tile tile(blockIdx.x / (kTilesQ * kTilesP), p - 1 + kTop, q - 1 + kLeft);
    release_successor();
    clear_margin(between);
    wait_for_predecessor();
    First::template load<kAligned>({a.x}, tile, image);
    __syncthreads();
    make<First, Pair::kReluFirst, Pair::kScale, Pair::kBias>(
        a.w, image, a.scale, a.bias, [&](int m, int channel, float2 sum) {
          const int row = m / kColumns, column = m % kColumns;
          const int h = tile.p + row, w = tile.q + column;
          float2 value = evaluate<typename Pair::Between>(sum);
          if (h < 0 || h >= kH || w < 0 || w >= kW) value = {};
          const int pixel = (row + kTop) * Second::kInQ + column + kLeft;
          T* to = reinterpret_cast<T*>(between + pixel * Second::kInPitch) + channel;
          round_pair(to, value.x, value.y);
        });
    __syncthreads();
    make<Second, false, Pair::kScale2, Pair::kBias2>(
        a.w2, between, a.scale2, a.bias2, [&](int m, int channel, float2 sum) {
          T* at = reinterpret_cast<T*>(image + place_of(m)) + channel;
          const float2 value =
              evaluate<typename Pair::Expression>(sum, {to_float(at[0]), to_float(at[1])});
          round_pair(at, value.x, value.y);
        });
    __syncthreads();
    store(a.y, tile.image, p, q, image);
  }

  static __device__ __forceinline__ void store(T* y, long long n, int p, int q,
                                               const uint4* image) {
#pragma unroll 2
    for (int i = threadIdx.x; i < kTileP * kTileQ * kWords; i += kThreads) {
      const int m = i / kWords, word = i % kWords;
      const int h = p + m / kTileQ, w = q + m % kTileQ;
      if (h >= kH || w >= kW) continue;
      T* to = y + ((n * kH + h) * kW + w) * Pair::kC + word * 8;
      *reinterpret_cast<uint4*>(to) = image[place_of(m) + word];
    }
  }
};

}  // namespace plantune
