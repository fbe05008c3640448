// SpaceToDepth(4), 1x1 convolution, bias and what follows it: one read of the image, one write.
//
//   x       (images, kChannels, kHeight, kWidth)               input, nchw, at any address
//   scales  (kChannels, 2)                  a scale each and a shift, which pixels get first
//   weight  (kOutputs, 16 * kChannels), aligned to 16 bytes     value (dy * 4 + dx) * kChannels + c
//   bias    (kOutputs) or one value, offset one value           as the parameters are
//   y       (images, kHeight / 4, kWidth / 4, kOutputs) =     Expression(conv + bias, offset), nhwc
//   plain   the same shape =                        that without its last part, where asked for
//   moved   (images, kHeight / 4, kWidth / 4, 16 * kChannels) =   what SpaceToDepth makes, likewise
//
// Each lane reads patches straight into the operand of its instruction and holds 8 channels of a
// pixel at the end, so only the weights pass through shared memory, once for each block, which
// asks for them before it waits for the kernel in front. They stay in the parameter's order: a lane
// puts the pixels into that order instead, which are in its registers anyway. Pixels of another
// type, or with a scale, are rounded once when they become operands. Operands that leave, too, pass
// through shared memory, where those of a warp are side by side as they will be. Sums are float32,
// rounded once for each output. Deterministic.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/se_resnet9/stem_operands.h"
#include "cuda/se_resnet9/stem_pixels.h"
#include "cuda/se_resnet9/stem_weights.h"
#include "cuda/vector.h"
#include "cuda/warp_mma.h"

namespace plantune {

template <int kChannels_, int kHeight_, int kWidth_>
struct ImageShape {
  static constexpr int kChannels = kChannels_;
  static constexpr int kHeight = kHeight_;
  static constexpr int kWidth = kWidth_;
};

/// Output pixels and channels of a block, and pixels of a warp.
template <int kTileM_, int kTileN_, int kWarpM_>
struct StemTile {
  static constexpr int kTileM = kTileM_;
  static constexpr int kTileN = kTileN_;
  static constexpr int kWarpM = kWarpM_;
};

/// Which values a bias has.
enum class Bias { kNone, kOne, kEach };

/// What follows the convolution; with kPlain its value before the last part leaves, too, with
/// kMoved what it reads. Operands are the element types of bias, offset, y and plain.
template <Bias kBias_, class Expression_, bool kPlain_, bool kMoved_, class Operands>
struct StemEnd {
  template <int k>
  using Element = typename TypeAt<k, Operands>::Type;
  using Expression = Expression_;
  static constexpr Bias kBias = kBias_;
  static constexpr bool kPlain = kPlain_, kMoved = kMoved_;
};

template <typename T, typename Pixels, typename Image, int kOutputs, typename Tile, typename End>
struct Stem {
  using Mma = WarpMma<T>;
  using A = typename Mma::A;
  using B = typename Mma::B;
  using In = typename Pixels::In;
  using Expression = typename End::Expression;
  using BiasOf = typename End::template Element<0>;
  using Y = typename End::template Element<2>;
  using Plain = typename End::template Element<3>;
  using Run = typename WordOf<4 * static_cast<int>(sizeof(In))>::Type;  // 4 pixels, side by side

  static constexpr int kBlock = 4;
  static constexpr int kChannels = Image::kChannels;
  static constexpr int kWidth = Image::kWidth;
  static constexpr long long kPlane = static_cast<long long>(Image::kHeight) * kWidth;
  static constexpr int kRowsOfY = Image::kHeight / kBlock;
  static constexpr int kColumnsOfY = kWidth / kBlock;
  static constexpr int kThreads = Tile::kTileM / Tile::kWarpM * 32;
  static constexpr int kTilesM = Tile::kWarpM / Mma::kRows;
  static constexpr int kTilesN = Tile::kTileN / Mma::kChannels;
  // Rows of all products that a lane brings, and products whose rows are neighbours in the image.
  static constexpr int kRows = kTilesM * Mma::kRowsOfA;
  // Whether a lane has registers for its patches of all channels. Else it takes batches of
  // channels, asks for the next batch before it needs that, and picks weights one by one.
  static constexpr bool kWhole = kRows * Mma::kRunsOfA * kChannels * int(sizeof(In)) <= 64;
  static constexpr int kBatch = kWhole ? kChannels : smaller(kChannels, sizeof(In) > 2 ? 2 : 4);
  static constexpr int kBatches = ceil_div(kChannels, kBatch);
  using Weights = StemWeights<T, kChannels, kOutputs, Tile::kTileN, kThreads>;
  static constexpr int kValues = kBlock * kBlock * kChannels;
  static constexpr int kMovedBytes = Tile::kWarpM * kValues * int(sizeof(T));  // of a warp
  static constexpr int kSharedBytes =
      Weights::kSharedBytes + (End::kMoved ? kThreads / 32 * kMovedBytes : 0);
  static constexpr int kTogether =
      Mma::kRowsOfA == 2 && sizeof(In) == 1 && kTilesM % 2 == 0 && kColumnsOfY % 4 == 0 ? 2 : 1;
  static constexpr int kNeighbours = Mma::kRowsOfA * kTogether;
  // Runs of neighbours that fill a vector, where a row of patches has no rest of them.
  static constexpr int kRunsAtOnce = kColumnsOfY % kNeighbours == 0
                                         ? smaller(kNeighbours, kWordBytes / int(sizeof(Run)))
                                         : 1;

  static_assert(Image::kHeight % kBlock == 0 && kWidth % kBlock == 0, "patches must be whole");
  static_assert(kOutputs % 8 == 0, "a lane writes 8 channels at once");
  static_assert(Tile::kTileM % Tile::kWarpM == 0, "warps share a tile without a rest");
  static_assert(Tile::kWarpM % Mma::kRows == 0, "a warp's pixels are whole rows of products");
  static_assert(Tile::kTileN % Mma::kChannels == 0, "a tile's channels are whole products");
  static_assert(sizeof(T) == 2, "tensor cores take 16-bit elements here");
  static_assert(!End::kMoved || kWhole, "what leaves is put in order patch by patch");

  using Operands = StemOperands<T, Pixels, kBatch, kTilesM, kWhole>;
  using Runs = typename Operands::Runs;
  using Batch = typename Operands::Batch;
  using Accumulator = Sums[kTilesM][kTilesN];
  using Patches = const In* [kRows];

  struct Arguments {
    const In* x;
    const T* weight;
    const BiasOf* bias;
    const typename End::template Element<1>* offset;
    const float2* scales;
    Y* y;
    Plain* plain;
    T* moved;
    int pixels;
  };

  __device__ static void run(const Arguments& a) {
    release_successor();
    extern __shared__ uint4 shared[];
    T* const weights = reinterpret_cast<T*>(shared);
    Weights::fetch(weights, a.weight, blockIdx.y * Tile::kTileN);
    wait_for_predecessor();
    const unsigned long long address = reinterpret_cast<unsigned long long>(a.x);
    if (kRunsAtOnce > 1 && address % (kRunsAtOnce * sizeof(Run)) == 0) {
      run_with<kRunsAtOnce>(a, weights);
    } else if (address % sizeof(Run) == 0) {
      run_with<1>(a, weights);
    } else {
      run_with<0>(a, weights);
    }
  }

 private:
  /// The pixel of a row of a product. Rows r and r + 8 are neighbours in the image, and so are
  /// these rows of products that are together.
  __device__ __forceinline__ static int pixel_of(int tile, int row) {
    return tile / kTogether * (Mma::kRows * kTogether) + row % 8 * (2 * kTogether) +
           tile % kTogether * 2 + row / 8;
  }

  __device__ __forceinline__ static int channel_of(int tile) {
    return blockIdx.y * Tile::kTileN + tile * Mma::kChannels + Mma::channel_of_c();
  }

  /// Everything, with loads of kRuns runs from the image; single pixels where it is 0.
  template <int kRuns>
  __device__ __forceinline__ static void run_with(const Arguments& a, const T* weights) {
    const int first = blockIdx.x * Tile::kTileM + threadIdx.x / 32 * Tile::kWarpM;
    Patches patches;
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int i = 0; i < Mma::kRowsOfA; ++i) {
        const int pixel = first + pixel_of(m, Mma::row_of_a(i));
        patches[m * Mma::kRowsOfA + i] = patch_of(a.x, pixel, a.pixels);
      }
    }
    Batch batch;
    load_batch<kRuns>(batch, patches, a.scales, 0);
    Accumulator sums;
    start(sums, a.bias);
    const float offset = Expression::kOffset ? to_float(*a.offset) : 0.f;
    Weights::finish();
    __syncthreads();
    accumulate<kRuns>(sums, batch, patches, a.scales, weights);
    if constexpr (End::kMoved) {
      if (blockIdx.y == 0) store_moved(a, first);
    }
    finish(sums, offset, a.y, a.plain, first, a.pixels);
  }

  __device__ __forceinline__ static void start(Accumulator& sums, const BiasOf* bias) {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
      const bool there = channel_of(n) < kOutputs;
      float biases[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        biases[i] = 0.f;
        if constexpr (End::kBias == Bias::kOne) biases[i] = to_float(bias[0]);
        if constexpr (End::kBias == Bias::kEach) {
          if (there) biases[i] = to_float(bias[channel_of(n) + i]);
        }
      }
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[m][n][0][i] = sums[m][n][1][i] = biases[i];
      }
    }
  }

  /// The first pixel of an output pixel's patch in channel 0; null beyond the last pixel.
  __device__ __forceinline__ static const In* patch_of(const In* x, int pixel, int pixels) {
    if (pixel >= pixels) return nullptr;
    const int image = pixel / (kRowsOfY * kColumnsOfY);
    const int row = pixel / kColumnsOfY % kRowsOfY, column = pixel % kColumnsOfY;
    return x + image * (kChannels * kPlane) + (row * kWidth + column) * kBlock;
  }

  template <int kRuns>
  __device__ __forceinline__ static void load_batch(Batch& batch, const Patches& patches,
                                                    const float2* scales, int index) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int channel = index * kBatch + i;
      if (channel >= kChannels) continue;
      if constexpr (Pixels::kScaled) batch.scales[i] = scales[channel];
#pragma unroll
      for (int row = 0; row < kRows; row += kRuns > 1 ? kRuns : 1) {
#pragma unroll
        for (int j = 0; j < Mma::kRunsOfA; ++j) {
          const long long offset = channel * kPlane + Mma::run_of_a(j) * kWidth;
          load<kRuns>(batch.runs[i], row, j, patches[row], offset);
        }
      }
    }
  }

  /// One load of neighbours' runs, or of a run by its pixels; zeros beyond the last pixel.
  template <int kRuns>
  __device__ __forceinline__ static void load(Runs (&runs)[kTilesM], int row, int j,
                                              const In* patch, long long offset) {
    if constexpr (kRuns > 1) {
      using Word = typename WordOf<kRuns * static_cast<int>(sizeof(Run))>::Type;
      Word word = {};
      if (patch != nullptr) word = *reinterpret_cast<const Word*>(patch + offset);
#pragma unroll
      for (int k = 0; k < kRuns; ++k) {
        const int place = row + k;
        runs[place / Mma::kRowsOfA].runs[place % Mma::kRowsOfA][j] =
            reinterpret_cast<const Run*>(&word)[k];
      }
    } else {
      Vector<In, 4> run;
      run.clear();
      if (patch != nullptr) run.template load<kRuns == 1>(patch + offset);
      runs[row / Mma::kRowsOfA].runs[row % Mma::kRowsOfA][j] =
          *reinterpret_cast<const Run*>(run.values);
    }
  }

  template <int kRuns>
  __device__ __forceinline__ static void accumulate(Accumulator& sums, Batch& batch,
                                                    const Patches& patches, const float2* scales,
                                                    const T* weights) {
    for (int index = 0; index < kBatches; ++index) {
      Batch next;
      load_batch<kRuns>(next, patches, scales, index + 1);
      A a[kTilesM][kBatch];
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        Operands::make(a[m], batch, m);
        if constexpr (End::kMoved) keep_moved(a[m], m);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (index * kBatch + i >= kChannels) break;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          const B b = weights_of(weights, n, index * kBatch + i);
#pragma unroll
          for (int m = 0; m < kTilesM; ++m) Mma::multiply(sums[m][n], a[m][i], b);
        }
      }
      batch = next;
    }
  }

  __device__ __forceinline__ static B weights_of(const T* weights, int tile, int index) {
    return Mma::load_b([&](int eight, int output, int dy) {
      eight += tile * (Mma::kChannels / 8);
      return kWhole ? Weights::neighbours(weights, eight, output, dy, index)
                    : Weights::of_channel(weights, eight, output, dy, index);
    });
  }

  /// Where a warp collects the operands that leave.
  __device__ __forceinline__ static T* moved_of_warp() {
    extern __shared__ uint4 shared[];
    char* const first = reinterpret_cast<char*>(shared) + Weights::kSharedBytes;
    return reinterpret_cast<T*>(first + threadIdx.x / 32 * kMovedBytes);
  }

  __device__ __forceinline__ static void keep_moved(const A (&a)[kBatch], int m) {
#pragma unroll
    for (int i = 0; i < Mma::kRowsOfA; ++i) {
#pragma unroll
      for (int j = 0; j < Mma::kRunsOfA; ++j) {
        T* const row = moved_of_warp() + pixel_of(m, Mma::row_of_a(i)) * kValues +
                       Mma::run_of_a(j) * (kBlock * kChannels);
#pragma unroll
        for (int index = 0; index < kBatch; ++index) {
          *reinterpret_cast<uint2*>(row + index * kBlock) = a[index].runs[i][j];
        }
      }
    }
  }

  __device__ __forceinline__ static void store_moved(const Arguments& a, int first) {
    __syncwarp();
    const long long begin = static_cast<long long>(first) * kValues;
    const long long end = static_cast<long long>(a.pixels) * kValues;
    const T* const from = moved_of_warp();
#pragma unroll
    for (int i = lane_index() * 8; i < Tile::kWarpM * kValues; i += 32 * 8) {
      if (begin + i >= end) continue;
      Vector<T, 8> word;
      *reinterpret_cast<uint4*>(word.values) = *reinterpret_cast<const uint4*>(from + i);
      word.store(a.moved + begin + i);
    }
  }

  __device__ __forceinline__ static void finish(const Accumulator& sums, float offset, Y* y,
                                                Plain* plain, int first, int pixels) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int pixel = first + pixel_of(m, Mma::row_of_c(i));
        if (pixel >= pixels) continue;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          if (channel_of(n) >= kOutputs) continue;
          const long long place = static_cast<long long>(pixel) * kOutputs + channel_of(n);
          write(sums[m][n][i], offset, y + place, End::kPlain ? plain + place : nullptr);
        }
      }
    }
  }

  __device__ __forceinline__ static void write(const float (&sums)[8], float offset, Y* y,
                                               Plain* plain) {
    if constexpr (End::kPlain) store<typename Expression::Inner>(sums, offset, plain);
    store<Expression>(sums, offset, y);
  }

  template <class Stored, typename To>
  __device__ __forceinline__ static void store(const float (&sums)[8], float offset, To* to) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = Stored::of({sums[i], 0.f, offset});
    Neighbours<To, 8> rounded;
    rounded.round(values);
    rounded.store(to);
  }
};

}  // namespace plantune
