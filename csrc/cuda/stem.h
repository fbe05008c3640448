// SpaceToDepth(4), 1x1 convolution, bias, ReLU and offset: one read of the image, one write.
//
//   x       (images, kChannels, kHeight, kWidth)               input, nchw, at any address
//   weight  (kChannels, kOutputs padded to kTileN / 32, 64 vectors of 8)   packed for WarpMma; the
//           16 values of a channel are its 4x4 patch in row-major order
//   shifts  (kOutputs padded to kTileN + 1)                     a bias each, then the offset
//   y       (images, kHeight / 4, kWidth / 4, kOutputs) =       relu(conv + bias) + offset, nhwc
//   plain   the same shape =                                    relu(conv + bias), where asked for
//
// Each lane reads patches straight into the operand of its instruction and holds 8 channels of a
// pixel at the end, so only the weights pass through shared memory, once for each block. Sums are
// float32, rounded once for each output. Deterministic.

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

template <typename T, typename Image, int kOutputs, typename Tile, bool kRelu, bool kPlain>
struct Stem {
  using Mma = WarpMma<T>;
  using A = typename Mma::A;
  using B = typename Mma::B;

  static constexpr int kBlock = 4;
  static constexpr int kChannels = Image::kChannels;
  static constexpr int kWidth = Image::kWidth;
  static constexpr long long kPlane = static_cast<long long>(Image::kHeight) * kWidth;
  static constexpr int kRowsOfY = Image::kHeight / kBlock;
  static constexpr int kColumnsOfY = kWidth / kBlock;
  static constexpr int kThreads = Tile::kTileM / Tile::kWarpM * 32;
  static constexpr int kTilesM = Tile::kWarpM / Mma::kRows;
  static constexpr int kTilesN = Tile::kTileN / Mma::kChannels;
  static constexpr int kPaddedOutputs = ceil_div(kOutputs, Tile::kTileN) * Tile::kTileN;
  // Channels whose patches a lane asks for at once; those of the next batch before it needs them.
  static constexpr int kBatch = smaller(kChannels, 4);
  static constexpr int kBatches = ceil_div(kChannels, kBatch);
  // Vectors of a channel's weights: of the block's outputs, and of all.
  static constexpr int kVectors = kTilesN * Mma::kVectors;
  static constexpr int kVectorsOfAll = kPaddedOutputs / Mma::kChannels * Mma::kVectors;
  static constexpr int kSharedBytes = kChannels * kVectors * static_cast<int>(sizeof(uint4));

  static_assert(Image::kHeight % kBlock == 0 && kWidth % kBlock == 0, "patches must be whole");
  static_assert(kOutputs % 8 == 0, "a lane writes 8 channels at once");
  static_assert(Tile::kTileM % Tile::kWarpM == 0, "warps share a tile without a rest");
  static_assert(Tile::kWarpM % Mma::kRows == 0, "a warp's pixels are whole rows of products");
  static_assert(Tile::kTileN % Mma::kChannels == 0, "a tile's channels are whole products");
  static_assert(sizeof(T) == 2, "tensor cores take 16-bit elements here");

  using Accumulator = Sums[kTilesM][kTilesN];
  using Batch = A[kBatch][kTilesM];

  __device__ static void run(const T* x, const uint4* weight, const float* shifts, T* y, T* plain,
                             int pixels) {
    release_successor();
    wait_for_predecessor();
    // Two pixels side by side fill a vector where a row has an even number of them.
    const unsigned long long address = reinterpret_cast<unsigned long long>(x);
    if (Mma::kRowsOfA == 2 && kColumnsOfY % 2 == 0 && address % 16 == 0) {
      run_with<16>(x, weight, shifts, y, plain, pixels);
    } else if (address % 8 == 0) {
      run_with<8>(x, weight, shifts, y, plain, pixels);
    } else {
      run_with<2>(x, weight, shifts, y, plain, pixels);
    }
  }

 private:
  /// Rows r and r + 8 of a product are neighbours in the image.
  __device__ __forceinline__ static int pixel_of_row(int row) { return row % 8 * 2 + row / 8; }

  __device__ __forceinline__ static int channel_of(int tile) {
    return blockIdx.y * Tile::kTileN + tile * Mma::kChannels + Mma::channel_of_c();
  }

  /// Everything, with loads of kBytes from the image.
  template <int kBytes>
  __device__ __forceinline__ static void run_with(const T* x, const uint4* weight,
                                                  const float* shifts, T* y, T* plain,
                                                  int pixels) {
    extern __shared__ uint4 weights[];
    const int first = blockIdx.x * Tile::kTileM + threadIdx.x / 32 * Tile::kWarpM;
    const T* patches[kTilesM][Mma::kRowsOfA];
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int i = 0; i < Mma::kRowsOfA; ++i) {
        const int pixel = first + m * Mma::kRows + pixel_of_row(Mma::row_of_a(i));
        patches[m][i] = patch_of(x, pixel, pixels);
      }
    }
    Batch a;
    load_batch<kBytes>(a, patches, 0);
    Accumulator sums;
    start(sums, shifts);
    const float offset = shifts[kPaddedOutputs];
    fetch(weights, weight);
    __syncthreads();
    accumulate<kBytes>(sums, a, patches, weights);
    finish(sums, offset, y, plain, first, pixels);
  }

  /// The block's weights, in the order in which they are packed; a barrier must follow.
  __device__ __forceinline__ static void fetch(uint4* weights, const uint4* weight) {
    const uint4* from = weight + blockIdx.y * kVectors;
#pragma unroll 16
    for (int first = 0; first < kChannels * kVectors; first += kThreads) {
      const int i = first + threadIdx.x;
      if (i < kChannels * kVectors) {
        copy(weights + i, from + i / kVectors * kVectorsOfAll + i % kVectors);
      }
    }
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  }

  __device__ __forceinline__ static void copy(uint4* shared, const uint4* from) {
#if __CUDA_ARCH__ >= 800
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
    *shared = *from;
#endif
  }

  __device__ __forceinline__ static void start(Accumulator& sums, const float* shifts) {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
      Sums biases;
      Mma::start(biases, shifts + channel_of(n));
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[m][n][0][i] = sums[m][n][1][i] = biases[0][i];
      }
    }
  }

  /// The first pixel of an output pixel's patch in channel 0; null beyond the last pixel.
  __device__ __forceinline__ static const T* patch_of(const T* x, int pixel, int pixels) {
    if (pixel >= pixels) return nullptr;
    const int image = pixel / (kRowsOfY * kColumnsOfY);
    const int row = pixel / kColumnsOfY % kRowsOfY, column = pixel % kColumnsOfY;
    return x + image * (kChannels * kPlane) + (row * kWidth + column) * kBlock;
  }

  template <int kBytes>
  __device__ __forceinline__ static void load_batch(
      Batch& a, const T* const (&patches)[kTilesM][Mma::kRowsOfA], int batch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int channel = batch * kBatch + i;
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        if (channel < kChannels) a[i][m] = load_a<kBytes>(patches[m], channel);
      }
    }
  }

  template <int kBytes>
  __device__ __forceinline__ static void accumulate(
      Accumulator& sums, Batch& a, const T* const (&patches)[kTilesM][Mma::kRowsOfA],
      const uint4* weights) {
    for (int batch = 0; batch < kBatches; ++batch) {
      Batch next;
      load_batch<kBytes>(next, patches, batch + 1);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int channel = batch * kBatch + i;
        if (channel >= kChannels) break;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          const B b = Mma::load_b(weights + channel * kVectors + n * Mma::kVectors);
#pragma unroll
          for (int m = 0; m < kTilesM; ++m) Mma::multiply(sums[m][n], a[i][m], b);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) a[i][m] = next[i][m];
      }
    }
  }

  /// What the lane brings of a channel, by loads of kBytes; zeros beyond the last pixel.
  template <int kBytes>
  __device__ __forceinline__ static A load_a(const T* const (&patches)[Mma::kRowsOfA],
                                             int channel) {
    A a;
#pragma unroll
    for (int j = 0; j < Mma::kRunsOfA; ++j) {
      const long long offset = channel * kPlane + Mma::run_of_a(j) * kWidth;
      if constexpr (kBytes == 16) {
        uint4 pair = {};
        if (patches[0] != nullptr) pair = *reinterpret_cast<const uint4*>(patches[0] + offset);
        a.runs[0][j] = {pair.x, pair.y};
        a.runs[Mma::kRowsOfA - 1][j] = {pair.z, pair.w};
      } else {
#pragma unroll
        for (int i = 0; i < Mma::kRowsOfA; ++i) {
          Vector<T, 4> run;
          run.clear();
          if (patches[i] != nullptr) run.template load<kBytes == 8>(patches[i] + offset);
          a.runs[i][j] = *reinterpret_cast<const uint2*>(run.values);
        }
      }
    }
    return a;
  }

  __device__ __forceinline__ static void finish(const Accumulator& sums, float offset, T* y,
                                                T* plain, int first, int pixels) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int pixel = first + m * Mma::kRows + pixel_of_row(Mma::row_of_c(i));
        if (pixel >= pixels) continue;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          if (channel_of(n) >= kOutputs) continue;
          const long long place = static_cast<long long>(pixel) * kOutputs + channel_of(n);
          write(sums[m][n][i], offset, y + place, kPlain ? plain + place : nullptr);
        }
      }
    }
  }

  __device__ __forceinline__ static void write(const float (&sums)[8], float offset, T* y,
                                               T* plain) {
    float values[8];
    Vector<T, 8> rounded;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = kRelu ? relu(sums[i]) : sums[i];
    if constexpr (kPlain) {
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
