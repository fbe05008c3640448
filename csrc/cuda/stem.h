// SpaceToDepth(4), 1x1 convolution, bias, ReLU and offset: one read of the image, one write.
//
//   x       (images, kChannels, kHeight, kWidth)               input, nchw, at any address
//   scales  (kChannels, 2)                  a scale each and a shift, which pixels get first
//   weight  (kOutputs, 16 * kChannels), aligned to 16 bytes     value (dy * 4 + dx) * kChannels + c
//   bias    (kOutputs) or one value, offset one value           as the parameters are, of type T
//   y       (images, kHeight / 4, kWidth / 4, kOutputs) =       relu(conv + bias) + offset, nhwc
//   plain   the same shape =                                    relu(conv + bias), where asked for
//
// Each lane reads patches straight into the operand of its instruction and holds 8 channels of a
// pixel at the end, so only the weights pass through shared memory, once for each block: it puts
// them into the order of WarpMma, before it waits for the kernel in front. Pixels of
// another type, or with a scale, are rounded once when they become operands. Sums are float32,
// rounded once for each output. Deterministic.

#pragma once

#include "cuda/arithmetic.h"
#include "cuda/launch.h"
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

/// What the pixels are, and whether each channel has a scale and a shift.
template <typename In_, bool kScaled_>
struct StemPixels {
  using In = In_;
  static constexpr bool kScaled = kScaled_;
};

/// Pixels of type In that are operands of type T as they lie in memory.
template <typename T, typename Pixels>
struct AreOperands {
  static constexpr bool kValue = false;
};
template <typename T>
struct AreOperands<T, StemPixels<T, false>> {
  static constexpr bool kValue = true;
};

template <>
__device__ __forceinline__ unsigned char from_float<unsigned char>(float value) {
  return static_cast<unsigned char>(value);
}

template <typename In>
__device__ __forceinline__ void widen_run(float (&values)[4], const Vector<In, 4>& run) {
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = run[i];
}
/// A byte behind the digits of 2^23 is a float; a conversion would take four times as long.
__device__ __forceinline__ void widen_run(float (&values)[4],
                                          const Vector<unsigned char, 4>& run) {
  const unsigned bytes = *reinterpret_cast<const unsigned*>(run.values);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = __uint_as_float(__byte_perm(bytes, 0x4B000000u, 0x7540 + i)) - 8388608.f;
  }
}

/// Which values a bias has.
enum class Bias { kNone, kOne, kEach };

/// What follows the convolution; with kPlain its value before the offset leaves, too.
template <Bias kBias_, bool kRelu_, bool kOffset_, bool kPlain_>
struct StemEnd {
  static constexpr Bias kBias = kBias_;
  static constexpr bool kRelu = kRelu_, kOffset = kOffset_, kPlain = kPlain_;
};

template <typename T, typename Pixels, typename Image, int kOutputs, typename Tile, typename End>
struct Stem {
  using Mma = WarpMma<T>;
  using A = typename Mma::A;
  using B = typename Mma::B;
  using In = typename Pixels::In;
  // 4 pixels side by side, as they lie in memory.
  using Run = typename WordOf<4 * static_cast<int>(sizeof(In))>::Type;

  static constexpr int kBlock = 4;
  static constexpr int kChannels = Image::kChannels;
  static constexpr int kWidth = Image::kWidth;
  static constexpr long long kPlane = static_cast<long long>(Image::kHeight) * kWidth;
  static constexpr int kRowsOfY = Image::kHeight / kBlock;
  static constexpr int kColumnsOfY = kWidth / kBlock;
  static constexpr int kThreads = Tile::kTileM / Tile::kWarpM * 32;
  static constexpr int kTilesM = Tile::kWarpM / Mma::kRows;
  static constexpr int kTilesN = Tile::kTileN / Mma::kChannels;
  // Channels whose patches a lane asks for at once; those of the next batch before it needs them.
  static constexpr int kBatch = smaller(kChannels, sizeof(In) > 2 ? 2 : 4);
  static constexpr int kBatches = ceil_div(kChannels, kBatch);
  // Vectors of a channel's weights, of the block's outputs.
  static constexpr int kVectors = kTilesN * Mma::kVectors;
  static constexpr int kSharedBytes = kChannels * kVectors * static_cast<int>(sizeof(uint4));
  // Rows of all products that a lane brings, and products whose rows are neighbours in the image.
  static constexpr int kRows = kTilesM * Mma::kRowsOfA;
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

  // Weights of an output, in runs of 8, and those that a thread puts in order for its block.
  static constexpr int kValues = kBlock * kBlock * kChannels, kRunsOfRow = kValues / 8;
  static constexpr int kRunsOfThread = ceil_div(Tile::kTileN * kRunsOfRow, kThreads);
  static constexpr int kFetched = smaller(kRunsOfThread, 8);

  struct Fetched {
    Vector<T, 8> runs[kFetched];
  };

  using Accumulator = Sums[kTilesM][kTilesN];
  using Patches = const In* [kRows];

  /// What a lane brings of a channel to a product, as it lies in memory.
  struct Runs {
    Run runs[Mma::kRowsOfA][Mma::kRunsOfA];
  };

  /// What a lane brings of some channels, and what they are scaled and shifted by.
  struct Batch {
    Runs runs[kBatch][kTilesM];
    float2 scales[Pixels::kScaled ? kBatch : 1];
  };

  struct Arguments {
    const In* x;
    const T* weight;
    const T* bias;
    const T* offset;
    const float2* scales;
    T* y;
    T* plain;
    int pixels;
  };

  __device__ static void run(const Arguments& a) {
    release_successor();
    Fetched fetched;
    fetch(fetched, a.weight);
    wait_for_predecessor();
    const unsigned long long address = reinterpret_cast<unsigned long long>(a.x);
    if (kRunsAtOnce > 1 && address % (kRunsAtOnce * sizeof(Run)) == 0) {
      run_with<kRunsAtOnce>(a, fetched);
    } else if (address % sizeof(Run) == 0) {
      run_with<1>(a, fetched);
    } else {
      run_with<0>(a, fetched);
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
  __device__ __forceinline__ static void run_with(const Arguments& a, const Fetched& fetched) {
    extern __shared__ uint4 weights[];
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
    const float offset = End::kOffset ? to_float(*a.offset) : 0.f;
    put(reinterpret_cast<T*>(weights), fetched, a.weight);
    __syncthreads();
    accumulate<kRuns>(sums, batch, patches, a.scales, weights);
    finish(sums, offset, a.y, a.plain, first, a.pixels);
  }

  /// A thread's first runs of weights are under way while the image comes.
  __device__ __forceinline__ static void fetch(Fetched& fetched, const T* weight) {
#pragma unroll
    for (int i = 0; i < kFetched; ++i) fetched.runs[i] = run_of(weight, i);
  }

  __device__ __forceinline__ static Vector<T, 8> run_of(const T* weight, int index) {
    const int i = index * kThreads + threadIdx.x;
    const int output = blockIdx.y * Tile::kTileN + i / kRunsOfRow;
    Vector<T, 8> run;
    run.clear();
    if (i < Tile::kTileN * kRunsOfRow && output < kOutputs) {
      const long long row = static_cast<long long>(output) * kValues;
      *reinterpret_cast<uint4*>(run.values) =
          __ldg(reinterpret_cast<const uint4*>(weight + row + i % kRunsOfRow * 8));
    }
    return run;
  }

  /// The block's weights, in the order of WarpMma; a barrier must follow.
  __device__ __forceinline__ static void put(T* weights, const Fetched& fetched,
                                             const T* weight) {
#pragma unroll
    for (int i = 0; i < kFetched; ++i) put_run(weights, i, fetched.runs[i]);
#pragma unroll 1
    for (int i = kFetched; i < kRunsOfThread; ++i) put_run(weights, i, run_of(weight, i));
  }

  __device__ __forceinline__ static void put_run(T* weights, int index,
                                                 const Vector<T, 8>& run) {
    const int i = index * kThreads + threadIdx.x;
    if (i >= Tile::kTileN * kRunsOfRow) return;
    const int output = i / kRunsOfRow, first = i % kRunsOfRow * 8;
    // Element e of vector 32 * h + lane of warp_mma.h, for the output and the place in the patch.
    T* const to = weights + output / 32 * 512 + output / 4 % 2 * 256 + output / 8 % 4 * 64 +
                  output % 2 * 32 + output / 2 % 2 * 4;
    int channel = first % kChannels, place = first / kChannels;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      to[channel * (kTilesN * 512) + place / 4 * 8 + place % 4] = run.values[e];
      const bool last = channel == kChannels - 1;
      channel = last ? 0 : channel + 1;
      place += last;
    }
  }

  __device__ __forceinline__ static void start(Accumulator& sums, const T* bias) {
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
                                                    const uint4* weights) {
    for (int index = 0; index < kBatches; ++index) {
      Batch next;
      load_batch<kRuns>(next, patches, scales, index + 1);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int channel = index * kBatch + i;
        if (channel >= kChannels) break;
        A a[kTilesM];
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
          a[m] = operand(batch.runs[i][m], batch.scales[Pixels::kScaled ? i : 0]);
        }
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          const B b = Mma::load_b(weights + channel * kVectors + n * Mma::kVectors);
#pragma unroll
          for (int m = 0; m < kTilesM; ++m) Mma::multiply(sums[m][n], a[m], b);
        }
      }
      batch = next;
    }
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

  __device__ __forceinline__ static void finish(const Accumulator& sums, float offset, T* y,
                                                T* plain, int first, int pixels) {
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

  __device__ __forceinline__ static void write(const float (&sums)[8], float offset, T* y,
                                               T* plain) {
    float values[8];
    Vector<T, 8> rounded;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = End::kRelu ? relu(sums[i]) : sums[i];
    if constexpr (End::kPlain) {
      rounded.round(values);
      rounded.store(plain);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += offset;
    rounded.round(values);
    rounded.store(y);
  }
};

}  // namespace plantune
