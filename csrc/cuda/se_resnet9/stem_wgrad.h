// The gradient of the weight of SpaceToDepth(4) and a 1x1 convolution: the image is read where it
// is, and what SpaceToDepth would move is never made.
//
//   x       (images, kChannels, kHeight, kWidth)               input, nchw, at any address
//   scales  (kChannels, 2)                  a scale each and a shift, which pixels get first
//   dy      (images, kHeight / 4, kWidth / 4, kOutputs)        nhwc, at any address
//   parts   (blocks, kOutputs, 16 * kChannels) =               float32
//
//   parts[block][o][(row * 4 + column) * kChannels + c] =
//       sum over the block's pixels of dy[pixel][o] * x[4 pixels' row and column of its patch][c]
//
// `wgrad_sum.h` adds the parts. Products are made along 16 pixels, from both operands as they are
// in memory: a lane reads 8 outputs of each of 4 pixels, and in one row of their patches 2
// neighbours of each channel, and pairs of pixels are made in registers. So nothing waits for shared
// memory, and a warp reads `kStages` products ahead. Warps that share a block's pixels add their
// sums one after the other: deterministic.

#pragma once

#include "cuda/launch.h"
#include "cuda/se_resnet9/stem_pixels.h"
#include "cuda/vector.h"
#include "cuda/warp_mma.h"

namespace plantune {

/// Sizes says what the step is; Work how a block shares it: its threads, the products that a warp
/// reads ahead, and the channels of a warp.
template <typename T, typename Pixels, typename Sizes, typename Work>
struct StemWgrad {
  using Mma = WarpMma<T>;
  using In = typename Pixels::In;
  // 2 neighbours in a row of a patch, as they lie in memory.
  using Pair = typename WordOf<2 * static_cast<int>(sizeof(In))>::Type;

  static constexpr int kBlock = 4;
  static constexpr int kChannels = Sizes::kChannels, kOutputs = Sizes::kOutputs;
  static constexpr int kWidth = Sizes::kWidth;
  static constexpr long long kPlane = static_cast<long long>(Sizes::kHeight) * kWidth;
  static constexpr int kRowsOfY = Sizes::kHeight / kBlock, kColumnsOfY = kWidth / kBlock;
  static constexpr int kValues = kBlock * kBlock * kChannels;
  static constexpr int kThreads = Work::kThreads, kStages = Work::kStages;
  // A product's pixels; those of a lane; outputs of a lane and of a block; products of those.
  static constexpr int kPixels = 16, kOfLane = 4, kEight = 8, kTileO = 64, kTilesO = 4;
  // Warps of a team share the channels, teams the pixels.
  static constexpr int kChannelsOfWarp = Work::kChannelsOfWarp;
  static constexpr int kShares = ceil_div(kChannels, kChannelsOfWarp);
  static constexpr int kTeams = kThreads / 32 / kShares;
  static constexpr int kVectors = kChannelsOfWarp * 2 * kTilesO;  // of 4 sums of a lane
  static constexpr int kSharedBytes = kShares * kVectors * 32 * 16;
  // Whether a lane's pixels are neighbours in the image.
  static constexpr bool kTogether = kColumnsOfY % kOfLane == 0;

  static_assert(Sizes::kHeight % kBlock == 0 && kWidth % kBlock == 0, "patches must be whole");
  static_assert(kOutputs % kEight == 0, "a lane reads 8 outputs at once");
  static_assert(kTeams > 0, "a block has a warp for each share of the channels");
  static_assert(sizeof(T) == 2, "tensor cores take 16-bit elements here");

  using Accumulator = float[kChannelsOfWarp][2][kTilesO][4];

  struct Arguments {
    const In* x;
    const T* dy;
    const float2* scales;
    float* parts;
    int pixels;
    int products;  // of a block
  };

  /// What a lane brings to a product, as it lies in memory.
  struct Stage {
    Vector<T, kEight> dy[kOfLane];
    Pair x[kChannelsOfWarp][kOfLane];
  };

  __device__ static void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const bool aligned = reinterpret_cast<unsigned long long>(a.dy) % kWordBytes == 0 &&
                         reinterpret_cast<unsigned long long>(a.x) % sizeof(Pair) == 0;
    if (aligned) {
      run_with<true>(a);
    } else {
      run_with<false>(a);
    }
  }

 private:
  // By lane: which outputs and pixels it reads, and where in a patch.
  __device__ __forceinline__ static int group() { return lane_index() / 4; }
  __device__ __forceinline__ static int quad() { return lane_index() % 4; }

  template <bool kAligned>
  __device__ __forceinline__ static void run_with(const Arguments& a) {
    const int warp = threadIdx.x / 32, team = warp / kShares;
    const int channel = warp % kShares * kChannelsOfWarp;
    Accumulator sums = {};
    if (team < kTeams) {
      float2 scales[Pixels::kScaled ? kChannelsOfWarp : 1];
      if constexpr (Pixels::kScaled) {
#pragma unroll
        for (int c = 0; c < kChannelsOfWarp; ++c) {
          if (channel + c < kChannels) scales[c] = a.scales[channel + c];
        }
      }
      accumulate<kAligned>(a, team, channel, scales, sums);
    }
    add_teams(sums, team, warp % kShares);
    store(a.parts + blockIdx.x * static_cast<long long>(kOutputs) * kValues);
  }

  template <bool kAligned, typename Scales>
  __device__ __forceinline__ static void accumulate(const Arguments& a, int team, int channel,
                                                    const Scales& scales, Accumulator& sums) {
    const int all = ceil_div(a.pixels, kPixels);
    const int first = blockIdx.x * a.products, end = min(first + a.products, all);
    // What is not aligned arrives in too many pieces.
    constexpr int kAhead = kAligned ? kStages : 1;
    Stage stages[kAhead];
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      load<kAligned>(a, first + team + s * kTeams, end, channel, stages[s]);
    }
    for (int product = first + team; product < end; product += kAhead * kTeams) {
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        const int next = product + (s + kAhead) * kTeams;
        multiply(stages[s], channel, scales, sums);
        load<kAligned>(a, next, end, channel, stages[s]);
      }
    }
  }

  /// The lane's part of a product's operands; zeros beyond the last pixel, output or product.
  template <bool kAligned>
  __device__ __forceinline__ static void load(const Arguments& a, int product, int end,
                                              int channel, Stage& stage) {
    const int pixel = product * kPixels + quad() * kOfLane;
    const int output = blockIdx.y * kTileO + group() * kEight;
    const In* patch = a.x + place_of(pixel);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const bool there = product < end && pixel + i < a.pixels;
      if (kTogether && i > 0) patch += kBlock;
      if (!kTogether && i > 0) patch = a.x + place_of(pixel + i);
      stage.dy[i].clear();
      if (there && output < kOutputs) {
        stage.dy[i].template load<kAligned>(a.dy + (pixel + i) * static_cast<long long>(kOutputs) +
                                            output);
      }
#pragma unroll
      for (int c = 0; c < kChannelsOfWarp; ++c) {
        Vector<In, 2> pair;
        pair.clear();
        if (there && channel + c < kChannels) {
          pair.template load<kAligned>(patch + (channel + c) * kPlane);
        }
        stage.x[c][i] = *reinterpret_cast<const Pair*>(pair.values);
      }
    }
  }

  /// Where in channel 0 the lane's neighbours of an output pixel's patch begin.
  __device__ __forceinline__ static long long place_of(int pixel) {
    const int image = pixel / (kRowsOfY * kColumnsOfY);
    const int row = pixel / kColumnsOfY % kRowsOfY, column = pixel % kColumnsOfY;
    return image * (kChannels * kPlane) + (row * kBlock + group() % 4) * kWidth +
           column * kBlock + group() / 4 * 2;
  }

  template <typename Scales>
  __device__ __forceinline__ static void multiply(const Stage& stage, int channel,
                                                  const Scales& scales, Accumulator& sums) {
    uint2 a[kTilesO][2];
#pragma unroll
    for (int m = 0; m < kTilesO; ++m) {
      unsigned words[kOfLane];
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        words[i] = reinterpret_cast<const unsigned*>(stage.dy[i].values)[m];
      }
      pair_up(words, a[m]);
    }
#pragma unroll
    for (int c = 0; c < kChannelsOfWarp; ++c) {
      if (channel + c >= kChannels) break;
      unsigned words[kOfLane];
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        words[i] = operand(stage.x[c][i], scales[Pixels::kScaled ? c : 0]);
      }
      uint2 b[2];
      pair_up(words, b);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int m = 0; m < kTilesO; ++m) {
          float* sum = sums[c][j][m];
          Mma::multiply_8(sum, sum + 2, a[m][0], a[m][1], b[j]);
        }
      }
    }
  }

  /// From 2 values of each of 4 pixels to 4 pixels of each value.
  __device__ __forceinline__ static void pair_up(const unsigned (&words)[kOfLane],
                                                 uint2 (&runs)[2]) {
    runs[0] = {__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410)};
    runs[1] = {__byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632)};
  }

  /// Neighbours as the product takes them.
  __device__ __forceinline__ static unsigned operand(const Pair& pair, const float2& scale) {
    if constexpr (AreOperands<T, Pixels>::kValue) {
      return pair;
    } else {
      const auto& run = *reinterpret_cast<const Vector<In, 2>*>(&pair);
      return rounded_run<T, Pixels>(run, scale);
    }
  }

  /// The sums of all teams, in shared memory: 4 of a lane are side by side, then those of lanes.
  __device__ __forceinline__ static void add_teams(const Accumulator& sums, int team, int share) {
    extern __shared__ float4 shared[];
    float4* const mine = shared + share * (kVectors * 32) + lane_index();
    for (int turn = 0; turn < kTeams; ++turn) {
      if (team == turn) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const float* sum = &sums[0][0][0][0] + 4 * i;
          float4 whole = {sum[0], sum[1], sum[2], sum[3]};
          if (turn > 0) {
            const float4 before = mine[i * 32];
            whole.x += before.x, whole.y += before.y, whole.z += before.z, whole.w += before.w;
          }
          mine[i * 32] = whole;
        }
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ static void store(float* part) {
    extern __shared__ float4 shared[];
    const float* const sums = reinterpret_cast<const float*>(shared);
    const int first = blockIdx.y * kTileO, outputs = min(kTileO, kOutputs - first);
    for (int i = threadIdx.x; i < outputs * kValues; i += kThreads) {
      part[static_cast<long long>(first) * kValues + i] = sums[place_of_sum(i / kValues, i % kValues)];
    }
  }

  /// Where shared memory has a sum, by the lane that made it and where that had it.
  __device__ __forceinline__ static int place_of_sum(int output, int value) {
    const int channel = value % kChannels, row = value / kChannels / kBlock;
    const int column = value / kChannels % kBlock;
    const int lane = output / kEight * 4 + column / 2 * 2 + row / 2;
    const int product = channel % kChannelsOfWarp * 2 + column % 2;
    const int vector = (channel / kChannelsOfWarp * kChannelsOfWarp * 2 + product) * kTilesO;
    return ((vector + output % kEight / 2) * 32 + lane) * 4 + output % 2 * 2 + row % 2;
  }
};

}  // namespace plantune
