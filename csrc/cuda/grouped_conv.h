// Convolution of nhwc images in groups of channels, on tensor cores from Ampere on:
//
//   y = Expression(conv(x, w) * scale + bias, residual, offset), or its largest of 3x3
//
//   x            (N, kH, kW, kGroups * kGroupC), or of kFew channels
//   w            (kGroups, kGroupO / 8, kSteps, 32 lanes, 4), the words of b of each product
//   y, residual  (N, kP, kQ, kGroups * kGroupO); y is written by =
//
// A block makes kTileP by kTileQ pixels of kSlab groups. It copies what they read into shared memory
// once; a product takes 16 pixels, 8 channels out, and two units of 8 channels in: a unit is a tap
// and a part of its group's channels. What leaves meets in shared memory, so that both copies are
// of whole lines; there a max pool with stride 2 and padding 1 finds its windows. Sums are float, in
// a fixed order, and rounded once: deterministic.
//
// Where an image has few channels and the filter an odd number of columns, a NaN or infinity also
// reaches the output to the left of those whose windows it is in: taps come by twos.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/launch.h"
#include "cuda/parameter.h"
#include "cuda/small_matrix_mma.h"
#include "cuda/vector.h"

namespace plantune {

/// The larger ones of two pairs of values; NaN if there is one.
__device__ __forceinline__ unsigned larger_of_pairs(unsigned x, unsigned y, __half) {
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
#endif
  return x;
}
__device__ __forceinline__ unsigned larger_of_pairs(unsigned x, unsigned y, __nv_bfloat16) {
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
#endif
  return x;
}
template <typename T>
__device__ __forceinline__ uint4 larger_of_words(uint4 x, uint4 y) {
  return {larger_of_pairs(x.x, y.x, T()), larger_of_pairs(x.y, y.y, T()),
          larger_of_pairs(x.z, y.z, T()), larger_of_pairs(x.w, y.w, T())};
}

/// Conv says the sizes and what to compute. With kSpreads every warp gets about as many products,
/// and takes its weights row by row.
template <class Conv, bool kSpreads = false>
struct GroupedConv {
  using T = typename Conv::T;
  using Expression = typename Conv::Expression;
  static constexpr int kGroups = Conv::kGroups, kGroupC = Conv::kGroupC, kGroupO = Conv::kGroupO;
  static constexpr int kC = kGroups * kGroupC, kO = kGroups * kGroupO;
  static constexpr int kSlab = Conv::kSlab, kThreads = Conv::kThreads, kWarps = kThreads / 32;
  static constexpr int kTileP = Conv::kTileP, kTileQ = Conv::kTileQ;
  // A pool of 3x3 with stride 2 and padding 1 needs a row and a column before a tile's own, too.
  static constexpr bool kPool = Conv::kPool;
  static constexpr int kMoveP = kPool ? kTileP - 1 : kTileP, kMoveQ = kPool ? kTileQ - 1 : kTileQ;
  static constexpr int kTilesP = ceil_div(Conv::kP, kMoveP), kTilesQ = ceil_div(Conv::kQ, kMoveQ);
  static constexpr int kPixels = kTileP * kTileQ;
  static constexpr int kInQ = (kTileQ - 1) * Conv::kStrideW + Conv::kS;
  static constexpr int kInPixels = ((kTileP - 1) * Conv::kStrideH + Conv::kR) * kInQ;
  static constexpr int kChunks = kGroupC / 8;
  // Of an image of so few channels, a unit is four channels of two taps side by side.
  static constexpr int kFew = Conv::kFew, kTapsW = kFew > 0 ? ceil_div(Conv::kS, 2) : Conv::kS;
  static constexpr int kUnits = Conv::kR * kTapsW * kChunks, kSteps = ceil_div(kUnits, 2);
  // Of a pixel in shared memory, in 16 bytes: an odd number apart, eight pixels meet all banks.
  static constexpr int kInChunks = kSlab * kChunks, kInPitch = kInChunks | 1;
  static constexpr int kOutChunks = kSlab * kGroupO / 8, kOutPitch = kOutChunks | 1;
  static constexpr int kSharedBytes = 16 * (kInPixels * kInPitch + kPixels * kOutPitch);
  // Tiles of 8 channels and of 16 pixels that a warp makes at once.
  static constexpr int kTilesO = kGroupO / 8;
  static constexpr int kWide = kTilesO % 4 == 0 ? 4 : kTilesO % 3 == 0 ? 3 : kTilesO % 2 == 0 ? 2 : 1;
  static constexpr int kTilesM = ceil_div(kPixels, 16);
  static constexpr int kMostHigh = smaller(kWide > 2 ? 2 : 4, kTilesM);
  static constexpr int kColumns = kSlab * (kTilesO / kWide);

  /// Tiles of 16 pixels that the busiest warp makes, if it makes so many at once.
  static constexpr int tiles_of_warp(int high) {
    return ceil_div(kColumns * ceil_div(kTilesM, high), kWarps) * high;
  }
  static constexpr int best_high(int high) {
    if (high == 1) return 1;
    const int other = best_high(high - 1);
    return tiles_of_warp(other) < tiles_of_warp(high) ? other : high;
  }

  static constexpr int kHigh = kSpreads ? best_high(kMostHigh) : kMostHigh;
  static constexpr int kItemsM = ceil_div(kTilesM, kHigh);
  // Where both units are of one tap, or there are few, the places of all are known in advance.
  static constexpr bool kWhole = kSteps <= (kChunks % 2 == 0 ? 18 : 9);

  // Rows of the filter one after the other: all weights at once leave too few registers.
  static constexpr bool kByRows = kSpreads && kSteps > 6 && kTapsW * kChunks % 2 == 0;
  static constexpr int kParts = kByRows ? Conv::kR : 1, kStepsOfPart = kSteps / kParts;

  static_assert(kFew <= 4 && (kFew == 0 || kC == 8), "a word holds two pixels of four channels");
  static_assert(!kPool || (kTileP % 2 == 1 && kTileQ % 2 == 1), "a pool takes two and one before");
  static_assert(kGroupC % 8 == 0 && kGroupO % 8 == 0, "a word holds eight channels of one group");

  struct Arguments {
    const T* x;
    const uint2* w;
    const T* residual;
    T* y;
    Parameter scale, bias, offset;
  };

  /// Where a block's tile is.
  struct Tile {
    long long image;
    int p, q, group = 0;

    __device__ __forceinline__ Tile(long long image, int p, int q) : image(image), p(p), q(q) {}

    __device__ __forceinline__ Tile() {
      q = int(blockIdx.x % kTilesQ) * kMoveQ - kPool;
      p = int(blockIdx.x / kTilesQ % kTilesP) * kMoveP - kPool;
      image = blockIdx.x / (kTilesQ * kTilesP);
      group = int(blockIdx.y) * kSlab;
    }
  };

  template <bool kAligned>
  static __device__ __forceinline__ void copy_16(void* to, const T* from, bool there) {
    if constexpr (kAligned) {
      const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from),
                   "r"(there ? 16 : 0)
                   : "memory");
    } else {
      Vector<T> word;
      word.clear();
      if (there) word.template load<false>(from);
      *static_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(word.values);
    }
  }

  /// What the tile reads of its groups, zeros outside of the image.
  template <bool kAligned>
  static __device__ __forceinline__ void load(const Arguments& a, const Tile& tile, uint4* shared) {
    const int row = tile.p * Conv::kStrideH - Conv::kPadH;
    const int column = tile.q * Conv::kStrideW - Conv::kPadW;
#pragma unroll(kAligned ? 4 : 1)
    for (int i = threadIdx.x; i < kInPixels * kInChunks; i += kThreads) {
      const int pixel = i / kInChunks, chunk = i % kInChunks;
      const int h = row + pixel / kInQ, w = column + pixel % kInQ;
      const int channel = tile.group * kGroupC + chunk * 8;
      const bool there = h >= 0 && h < Conv::kH && w >= 0 && w < Conv::kW && channel < kC;
      const long long at = ((tile.image * Conv::kH + h) * Conv::kW + w) * kC + channel;
      copy_16<kAligned>(shared + pixel * kInPitch + chunk, a.x + (there ? at : 0), there);
    }
    if constexpr (kAligned) wait_for_copies();
  }

  static __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  /// The same of an image of few channels: each word has a pixel and its right neighbour.
  static __device__ __forceinline__ void load_few(const Arguments& a, const Tile& tile,
                                                  uint4* shared) {
    constexpr int kPixelsOfX = kInPixels / kInQ * (kInQ + 1);
    const int row = tile.p * Conv::kStrideH - Conv::kPadH;
    const int column = tile.q * Conv::kStrideW - Conv::kPadW;
#pragma unroll 4
    for (int i = threadIdx.x; i < kPixelsOfX; i += kThreads) {
      const int r = i / (kInQ + 1), s = i % (kInQ + 1), h = row + r, w = column + s;
      const bool there = h >= 0 && h < Conv::kH && w >= 0 && w < Conv::kW;
      const T* from = a.x + (there ? ((tile.image * Conv::kH + h) * Conv::kW + w) * kFew : 0);
      unsigned values[4] = {};
#pragma unroll
      for (int c = 0; c < kFew; ++c) {
        const unsigned value = *reinterpret_cast<const unsigned short*>(from + c);
        values[c] = there ? value : 0;
      }
      const uint2 pixel = {values[0] | values[1] << 16, values[2] | values[3] << 16};
      uint2* to = reinterpret_cast<uint2*>(shared + r * kInQ + s);
      if (s < kInQ) to[0] = pixel;
      if (s > 0) to[-1] = pixel;
    }
  }

  /// The pixels of a tile that are within the image, each word of eight channels of them.
  template <class Do>
  static __device__ __forceinline__ void for_each_word(const Tile& tile, Do&& act) {
#pragma unroll 2
    for (int i = threadIdx.x; i < kPixels * kOutChunks; i += kThreads) {
      const int m = i / kOutChunks, chunk = i % kOutChunks;
      const int p = tile.p + m / kTileQ, q = tile.q + m % kTileQ;
      const int channel = tile.group * kGroupO + chunk * 8;
      if (p >= Conv::kP || q >= Conv::kQ || channel >= kO) continue;
      act(m * kOutPitch + chunk, ((tile.image * Conv::kP + p) * Conv::kQ + q) * kO + channel);
    }
  }

  /// Starts to copy what is added to where the sum will be: read by the sums' threads one by one,
  /// it took 16 us beside 22 for 512 x 16 x 32 x 32 (H200, 2026-11-23).
  template <bool kAligned>
  static __device__ __forceinline__ void load_residual(const Arguments& a, const Tile& tile,
                                                       uint4* out) {
    for_each_word(tile, [&](int to, long long from) {
      copy_16<kAligned>(out + to, a.residual + from, true);
    });
  }

  static __device__ __forceinline__ uint4 load_matrices(unsigned place) {
    uint4 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(place));
    return x;
  }

  /// Where a unit of a group begins, from the first tap of a pixel, in 16 bytes.
  static __device__ __forceinline__ int unit_at(int unit) {
    const int tap = unit / kChunks;
    const int column = tap % kTapsW * (kFew > 0 ? 2 : 1);
    return (tap / kTapsW * kInQ + column) * kInPitch + unit % kChunks;
  }

  /// Multiplies 16 * kHigh pixels from `first` on, or their ReLU, with kWide tiles of channels.
  template <bool kRelu = false>
  static __device__ __forceinline__ void multiply(const uint2* weights, const uint4* shared,
                                                  int group, int first,
                                                  float (&sums)[kHigh][kWide][4]) {
    const int lane = threadIdx.x % 32;
    unsigned place[kHigh];
#pragma unroll
    for (int h = 0; h < kHigh; ++h) {
      // What is not a pixel of the tile is multiplied and dropped.
      const int m = smaller(first + h * 16 + lane % 16, kPixels - 1);
      const int pixel = m / kTileQ * Conv::kStrideH * kInQ + m % kTileQ * Conv::kStrideW;
      place[h] = static_cast<unsigned>(
          __cvta_generic_to_shared(shared + pixel * kInPitch + group * kChunks));
    }
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      const int before = part * (16 * kInQ * kInPitch);
#pragma unroll(kWhole ? kStepsOfPart : 2)
      for (int step = 0; step < kStepsOfPart; ++step) {
        const int second = smaller(2 * step + 1, kUnits - 1);  // meets zeros if there is none
        const int offset = before + 16 * (lane < 16 ? unit_at(2 * step) : unit_at(second));
        const uint2* from = weights + (part * kStepsOfPart + step) * 32 + lane;
        uint2 w[kWide];
#pragma unroll
        for (int n = 0; n < kWide; ++n) w[n] = __ldg(from + n * kSteps * 32);
#pragma unroll
        for (int h = 0; h < kHigh; ++h) {
          uint4 x = load_matrices(place[h] + offset);
          if constexpr (kRelu) x = larger_of_words<T>(x, uint4());
#pragma unroll
          for (int n = 0; n < kWide; ++n) mma_16x8x16(sums[h][n], x, w[n].x, w[n].y, T());
        }
      }
    }
  }

  /// Rounds what becomes of a warp's sums into the tile that leaves.
  static __device__ __forceinline__ void finish(const Arguments& a, const Tile& tile, uint4* out,
                                                int first, int column,
                                                const float (&sums)[kHigh][kWide][4]) {
    const int lane = threadIdx.x % 32;
    float offset = 0.f;
    if constexpr (Expression::kOffset) offset = load_parameter<T>(a.offset, 0);
#pragma unroll
    for (int n = 0; n < kWide; ++n) {
      const int channel = tile.group * kGroupO + (column + n) * 8 + lane % 4 * 2;
      float2 scale = {1.f, 1.f}, bias = {};
      if constexpr (Conv::kScale) {
        scale = {load_parameter<T>(a.scale, channel), load_parameter<T>(a.scale, channel + 1)};
      }
      if constexpr (Conv::kBias) {
        bias = {load_parameter<T>(a.bias, channel), load_parameter<T>(a.bias, channel + 1)};
      }
#pragma unroll
      for (int i = 0; i < 2 * kHigh; ++i) {
        const int m = first + i * 8 + lane / 4;
        const int p = tile.p + m / kTileQ, q = tile.q + m % kTileQ;
        if (m >= kPixels || p >= Conv::kP || q >= Conv::kQ) continue;
        if (kPool && (p < 0 || q < 0)) continue;
        const float* sum = &sums[i / 2][n][i % 2 * 2];
        T* to = reinterpret_cast<T*>(out + m * kOutPitch + column + n) + lane % 4 * 2;
        float2 residual = {};
        if constexpr (Expression::kResidual) residual = {to_float(to[0]), to_float(to[1])};
        const float2 value = {sum[0] * scale.x + bias.x, sum[1] * scale.y + bias.y};
        const float2 made = evaluate<Expression>(value, residual, offset);
        round_pair(to, made.x, made.y);
      }
    }
  }

  static __device__ __forceinline__ void store(const Arguments& a, const Tile& tile,
                                               const uint4* out) {
    for_each_word(tile, [&](int from, long long to) {
      *reinterpret_cast<uint4*>(a.y + to) = out[from];
    });
  }

  /// The largest of the windows of 3x3, of which those at the borders have fewer pixels.
  static __device__ __forceinline__ void store_pooled(const Arguments& a, const Tile& tile,
                                                      const uint4* out) {
    constexpr int kRows = kTileP / 2, kAcross = kTileQ / 2;
    constexpr int kOutP = (Conv::kP + 1) / 2, kOutQ = (Conv::kQ + 1) / 2;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kAcross * kOutChunks; i += kThreads) {
      const int m = i / kOutChunks, chunk = i % kOutChunks;
      const int row = m / kAcross * 2, column = m % kAcross * 2;
      const int p = (tile.p + 1 + row) / 2, q = (tile.q + 1 + column) / 2;
      const int channel = tile.group * kGroupO + chunk * 8;
      if (p >= kOutP || q >= kOutQ || channel >= kO) continue;
      uint4 best;
#pragma unroll
      for (int r = 0; r < 3; ++r) {
#pragma unroll
        for (int s = 0; s < 3; ++s) {
          // A pixel beyond the image is the nearest one that is in the window as well.
          const int h = smaller(row + r + (tile.p + row + r < 0), Conv::kP - 1 - tile.p);
          const int w = smaller(column + s + (tile.q + column + s < 0), Conv::kQ - 1 - tile.q);
          const uint4 word = out[(h * kTileQ + w) * kOutPitch + chunk];
          best = r + s == 0 ? word : larger_of_words<T>(best, word);
        }
      }
      T* to = a.y + ((tile.image * kOutP + p) * kOutQ + q) * kO + channel;
      *reinterpret_cast<uint4*>(to) = best;
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    extern __shared__ __align__(16) uint4 shared[];
    uint4* out = shared + kInPixels * kInPitch;
    release_successor();
    wait_for_predecessor();
    const Tile tile;
    if constexpr (Expression::kResidual) load_residual<kAligned>(a, tile, out);
    if constexpr (kFew > 0) {
      load_few(a, tile, shared);
      if constexpr (Expression::kResidual && kAligned) wait_for_copies();
    } else {
      load<kAligned>(a, tile, shared);
    }
    __syncthreads();
    constexpr int kItems = kColumns * kItemsM;
#pragma unroll 1
    for (int item = threadIdx.x / 32; item < kItems; item += kWarps) {
      const int column = item / kItemsM * kWide, first = item % kItemsM * kHigh * 16;
      const int group = column / kTilesO;
      if (tile.group + group >= kGroups) break;
      float sums[kHigh][kWide][4] = {};
      const long long matrix = (long long)(tile.group) * kTilesO + column;
      multiply(a.w + matrix * kSteps * 32, shared, group, first, sums);
      finish(a, tile, out, first, column, sums);
    }
    __syncthreads();
    if constexpr (kPool) {
      store_pooled(a, tile, out);
    } else {
      store(a, tile, out);
    }
  }
};

}  // namespace plantune
