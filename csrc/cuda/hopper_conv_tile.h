// The tile of a convolution on Hopper: what a block has of the problem, of shared memory and of the
// barriers in it. `hopper_conv.h` has the convolution.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/hopper_async.h"
#include "cuda/hopper_mma.h"
#include "cuda/hopper_out_tile.h"
#include "cuda/hopper_sums.h"
#include "cuda/launch.h"
#include "cuda/parameter.h"
#include "cuda/phases.h"
#include "cuda/vector.h"

namespace plantune {

/// What the epilogue reads besides the residual, and where blocks leave parts of its sums.
struct ConvScalars {
  Parameter scale, bias, offset;
  float* parts;
};

/// The tensor maps of what the epilogue reads and writes; all after y where it has them.
struct OutMaps {
  TensorMap y, residual, unshifted, saved;
};

/// The tensor maps of a convolution whose output has so many phases.
template <int kPhases>
struct ConvMaps {
  TensorMap x, w;
  OutMaps out[kPhases];
};

/// The constants of C are a problem, a configuration, and the epilogue.
template <class C>
class HopperConvTile {
 protected:
  using T = typename C::T;
  using Expression = typename C::Expression;

  static constexpr int kWarpgroup = 128;
  static constexpr int kAtomRows = 64;
  static constexpr int kChunk = kRowBytes / int(sizeof(T));  // channels of one step
  // How many factors of 16 bits a float becomes; 0 where products take what is in memory.
  static constexpr int kPlanes = C::kPlanes;
  static constexpr int kGroups = C::kTileM / kAtomRows;
  static constexpr int kConsumers = kGroups * kWarpgroup;

  // A phase is every kPhasesH-th row and every kPhasesW-th column of the output, from one on; the
  // first is the largest. It has every kPhasesH-th and kPhasesW-th tap.
  static constexpr int kPhases = C::kPhasesH * C::kPhasesW;
  static constexpr int kPhaseP = ceil_div(C::kP, C::kPhasesH);
  static constexpr int kPhaseQ = ceil_div(C::kQ, C::kPhasesW);

  // A margin is what the taps of a box read beyond it.
  static constexpr int kCopyW = C::kBoxW + (C::kReuse ? ceil_div(C::kS, C::kPhasesW) - 1 : 0);
  static constexpr int kCopyH = C::kBoxH + (C::kReuse ? ceil_div(C::kR, C::kPhasesH) - 1 : 0);
  static constexpr int kCopyBytes = kCopyW * kCopyH * C::kBoxN * kRowBytes;
  static constexpr int kImageBytes =
      C::kReuse ? ceil_div(kCopyBytes, kGroupBytes) * kGroupBytes : C::kTileM * kRowBytes;
  static constexpr int kPlaneBytes = C::kTileN * (kPlanes > 0 ? kRowBytes / 2 : kRowBytes);
  static constexpr int kWeightBytes = (kPlanes > 1 ? kPlanes : 1) * kPlaneBytes;

  // Of the tile a block finishes kOwn channels.
  static constexpr int kOwn = C::kTileN / C::kSplitK;
  static constexpr int kOwnSums = kOwn / 2;
  template <class E>
  using OutTileOf = OutTile<E, kOwn, C::kTileM>;
  using TileOfY = OutTileOf<typename C::Out::Y>;
  using TileOfUnshifted = OutTileOf<typename C::Out::Unshifted>;
  using TileOfResidual = OutTileOf<typename C::Out::Residual>;
  using TileOfSaved = OutTileOf<typename C::Out::Saved>;
  static constexpr int kBoxPixels = C::kBoxW * C::kBoxH * C::kBoxN;
  // The residual where it is gathered: a box with a margin.
  static constexpr int kGatherW = C::kBoxW + ceil_div(C::kPoolS, C::kPhasesW) - 1;
  static constexpr int kGatherH = C::kBoxH + ceil_div(C::kPoolR, C::kPhasesH) - 1;
  static constexpr int kGatherPixels = kGatherW * kGatherH * C::kBoxN;
  static constexpr int kGatherBytes =
      ceil_div(kGatherPixels * TileOfResidual::kRow, kGroupBytes) * kGroupBytes;
  // Sums from one other block, 16 bytes of each thread side by side.
  static constexpr int kPartBytes = kOwnSums * kConsumers * int(sizeof(float));

  // Shared memory.
  static constexpr int kWeightStart = C::kImageStages * kImageBytes;
  static constexpr int kOutStart = kWeightStart + C::kWeightStages * kWeightBytes;
  static constexpr int kUnshiftedStart = kOutStart + TileOfY::kBytes;
  // The epilogue takes the place of what it reads, but for pixels that several read, and for
  // elements of other sizes: then each image has room of its own.
  static constexpr bool kInPlace = Expression::kResidual && !C::kGathers;
  static constexpr bool kOneSize = C::Out::kOneSize;
  static constexpr bool kTwoTiles = C::kUnshifted || (kOneSize && Expression::kSaved && kInPlace);
  static constexpr int kOthersStart = kUnshiftedStart + (kTwoTiles ? TileOfUnshifted::kBytes : 0);
  static constexpr int kResidualStart = kOneSize ? kOutStart : kOthersStart;
  static constexpr int kSavedStart = kOneSize ? (kTwoTiles ? kUnshiftedStart : kOutStart)
                                   : kInPlace ? kOthersStart + TileOfResidual::kBytes
                                              : kOthersStart;
  static constexpr int kGatherStart =
      kOneSize ? kOthersStart : kSavedStart + (Expression::kSaved ? TileOfSaved::kBytes : 0);
  static constexpr int kPartStart = kGatherStart + (C::kGathers ? TileOfResidual::kBoxes * kGatherBytes : 0);
  static constexpr int kScalesStart = kPartStart + (C::kSplitK - 1) * kPartBytes;
  static constexpr int kBiasStart = kScalesStart + kOwn * int(sizeof(float));
  static constexpr int kBarrierStart = kBiasStart + kOwn * int(sizeof(float));
  static constexpr int kBarrierCount =
      2 * (C::kImageStages + C::kWeightStages) + 2 + (C::kPersistent ? 2 : 0);
  static constexpr int kSumsStart = kBarrierStart + 8 * kBarrierCount;
  using Sums = TileSums<typename C::Sums, kConsumers / 32, kOwn>;
  static constexpr int kEnd = kSumsStart + Sums::kBytes;

  static constexpr int kChunks = ceil_div(C::kC, kChunk);
  static constexpr int kTilesW = ceil_div(kPhaseQ, C::kBoxW);
  static constexpr int kTilesH = ceil_div(kPhaseP, C::kBoxH);
  static constexpr int kTilesO = ceil_div(C::kO, C::kTileN);
  static constexpr int kTilesOfPixels = ceil_div(C::kN, C::kBoxN) * kTilesH * kTilesW * kPhases;

  /// What a block takes that uses so much from an aligned start on.
  static constexpr int shared_bytes(int end) {
    return end + kGroupBytes > C::kSharedFloor ? end + kGroupBytes : C::kSharedFloor;
  }

  static_assert(sizeof(T) == 2 || (sizeof(T) == 4 && !C::kTransposed),
                "products read floats along their channels alone");
  static_assert(kPlanes == 0 || sizeof(T) == 4, "planes are made of floats");
  static_assert(C::kTileM % kAtomRows == 0, "a warpgroup multiplies 64 rows");
  static_assert(kOwn >= 8, "each block of the cluster finishes 16 bytes of a pixel or more");
  static_assert(C::kC % 8 == 0 && C::kO % 8 == 0, "pixels start at 16 bytes");
  static_assert(C::kBoxW * C::kBoxH * C::kBoxN <= C::kTileM, "the tile holds the box");
  static_assert(!C::kReuse || (C::kBoxW % 8 == 0 && C::kBoxH % 8 == 0 && C::kStrideW == 1 &&
                               C::kStrideH == 1 && C::kBoxW * C::kBoxH * C::kBoxN == C::kTileM),
                "taps at an offset need 8x8 neighbouring pixels in each 64 rows");
  static_assert(kPhases == 1 || (C::kStrideH == 1 && C::kStrideW == 1),
                "the pixels of a phase are as far apart as those that they read");
  static_assert(C::kPhasesH <= C::kP && C::kPhasesW <= C::kQ, "each phase has pixels");

 public:
  using Maps = ConvMaps<kPhases>;
  using Parts = SumParts<T, typename C::Sums, kTilesOfPixels, kTilesO * C::kSplitK, C::kO>;

  /// After the consumers come a warp that copies weights and one that copies images, and with
  /// kPersistent one that takes tiles away.
  static constexpr int kThreads = kConsumers + (C::kPersistent ? 96 : 64);
  static constexpr int kSharedBytes = shared_bytes(kEnd);

  __device__ __forceinline__ HopperConvTile(const Maps& maps, const ConvScalars& scalars,
                                            uint32_t base, int tile = blockIdx.x)
      : maps_(maps), scalars_(scalars), base_(base), tile_(tile) {
    int index = tile;
    rank_ = index % C::kSplitK, index /= C::kSplitK;
    o_ = index % kTilesO * C::kTileN, index /= kTilesO;
    phase_ = index % kPhases, index /= kPhases;
    w_ = index % kTilesW * C::kBoxW, index /= kTilesW;
    h_ = index % kTilesH * C::kBoxH, index /= kTilesH;
    n_ = index * C::kBoxN;
    const int phase_h = phase_ / C::kPhasesW, phase_w = phase_ % C::kPhasesW;
    rows_ = (C::kP - phase_h + C::kPhasesH - 1) / C::kPhasesH;
    columns_ = (C::kQ - phase_w + C::kPhasesW - 1) / C::kPhasesW;
    const PhaseTaps rows = phase_taps(C::kR, C::kPadH, C::kPhasesH, phase_h);
    const PhaseTaps columns = phase_taps(C::kS, C::kPadW, C::kPhasesW, phase_w);
    first_r_ = rows.first, first_s_ = columns.first, pad_h_ = rows.pad, pad_w_ = columns.pad;
    gathers_h_ = phase_taps(C::kPoolR, C::kPoolPadH, C::kPhasesH, phase_h);
    gathers_w_ = phase_taps(C::kPoolS, C::kPoolPadW, C::kPhasesW, phase_w);
    const int last_h = min(h_ + C::kBoxH, rows_) - 1, last_w = min(w_ + C::kBoxW, columns_) - 1;
    r_begin_ = max(0, pad_h_ - last_h * C::kStrideH);
    s_begin_ = max(0, pad_w_ - last_w * C::kStrideW);
    r_end_ = max(r_begin_, min(rows.count, C::kH + pad_h_ - h_ * C::kStrideH));
    s_end_ = max(s_begin_, min(columns.count, C::kW + pad_w_ - w_ * C::kStrideW));
    const int steps = kChunks * taps();
    begin_ = steps * rank_ / C::kSplitK;
    end_ = steps * (rank_ + 1) / C::kSplitK;
  }

 protected:
  /// One step of the reduction.
  struct Step {
    int chunk, r, s;
  };

  const Maps& maps_;
  const ConvScalars& scalars_;
  uint32_t base_;
  int tile_;
  int rank_, phase_, n_, h_, w_, o_;       // the place in the cluster, the tile's first pixel
  int rows_, columns_;                     // of the phase
  int first_r_, first_s_, pad_h_, pad_w_;  // its first tap, and the padding before its pixels
  PhaseTaps gathers_h_, gathers_w_;        // by which it reads the residual
  int r_begin_, r_end_, s_begin_, s_end_;  // the phase's taps that read the image
  int begin_, end_;                        // the block's steps

  __device__ __forceinline__ const OutMaps& out() const { return maps_.out[phase_]; }

  __device__ __forceinline__ int taps() const {
    return (r_end_ - r_begin_) * (s_end_ - s_begin_);
  }

  __device__ __forceinline__ Step first_step() const {
    const int tap = begin_ % taps(), columns = s_end_ - s_begin_;
    return {begin_ / taps(), r_begin_ + tap / columns, s_begin_ + tap % columns};
  }

  __device__ __forceinline__ void advance(Step& step) const {
    if (++step.s < s_end_) return;
    step.s = s_begin_;
    if (++step.r < r_end_) return;
    step.r = r_begin_;
    ++step.chunk;
  }

  /// Whether this step, which is not the block's first, needs a box of its own.
  __device__ __forceinline__ bool starts_box(const Step& step) const {
    return !C::kReuse || (step.r == r_begin_ && step.s == s_begin_);
  }

  __device__ __forceinline__ uint32_t image(int stage) const { return base_ + stage * kImageBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const {
    return base_ + kWeightStart + stage * kWeightBytes;
  }
  __device__ __forceinline__ uint32_t residual_full() const { return base_ + kBarrierStart; }
  __device__ __forceinline__ uint32_t parts_full() const { return residual_full() + 8; }
  __device__ __forceinline__ uint32_t image_full(int stage) const {
    return residual_full() + 16 + 8 * stage;
  }
  __device__ __forceinline__ uint32_t image_empty(int stage) const {
    return image_full(C::kImageStages + stage);
  }
  __device__ __forceinline__ uint32_t weight_full(int stage) const {
    return image_full(2 * C::kImageStages + stage);
  }
  __device__ __forceinline__ uint32_t weight_empty(int stage) const {
    return weight_full(C::kWeightStages + stage);
  }

  // With kPersistent: a tile is complete, and its room is free again.
  __device__ __forceinline__ uint32_t tile_made() const {
    return weight_empty(C::kWeightStages);
  }
  __device__ __forceinline__ uint32_t tile_left() const { return tile_made() + 8; }

  /// Gives a slot back that this warp has read, where it is one.
  static __device__ __forceinline__ void release(int slot, uint32_t empty) {
    if (threadIdx.x % 32 == 0 && slot >= 0) arrive(empty);
  }

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == kConsumers) {
      prefetch(maps_.w);
      prefetch(maps_.x);
      init_barrier(residual_full(), 1);
      init_barrier(parts_full(), 1);
      // A warp arrives when it has read a slot.
      for (int i = 0; i < C::kImageStages; ++i) {
        init_barrier(image_full(i), 1);
        init_barrier(image_empty(i), kConsumers / 32);
      }
      for (int i = 0; i < C::kWeightStages; ++i) {
        init_barrier(weight_full(i), 1);
        init_barrier(weight_empty(i), kConsumers / 32);
      }
      if constexpr (C::kPersistent) {
        init_barrier(tile_made(), kConsumers / 32);
        init_barrier(tile_left(), 1);
      }
      publish_barriers();
      if constexpr (C::kSplitK > 1) arrive_expecting(parts_full(), (C::kSplitK - 1) * kPartBytes);
    }
    __syncthreads();
  }

  /// A pixel of the tile.
  struct Place {
    int w, h, n;
  };

  /// With reuse, each 64 rows of the product are 8x8 pixels.
  static __device__ __forceinline__ Place place_of(int row) {
    if constexpr (!C::kReuse) {
      return {row % C::kBoxW, row / C::kBoxW % C::kBoxH, row / (C::kBoxW * C::kBoxH)};
    } else {
      constexpr int kAtomsW = C::kBoxW / 8, kAtomsH = C::kBoxH / 8;
      const int atom = row / kAtomRows;
      return {atom % kAtomsW * 8 + row % 8, atom / kAtomsW % kAtomsH * 8 + row / 8 % 8,
              atom / (kAtomsW * kAtomsH)};
    }
  }

  /// The first of a thread's two rows of its warp's 16; the other one is 8 further on. Where each
  /// thread reads factors from shared memory, four neighbours of a quarter of the warp have every
  /// other row, which are in other banks.
  static __device__ __forceinline__ int row_of_warp() {
    const int eighth = threadIdx.x % 32 / 4;
    return kPlanes > 0 ? eighth % 4 * 2 + eighth / 4 : eighth;
  }

  /// Whether a row of the product is a pixel of the image.
  __device__ __forceinline__ bool is_inside(int row) const {
    const Place place = place_of(row);
    return place.n < C::kBoxN && n_ + place.n < C::kN && h_ + place.h < rows_ &&
           w_ + place.w < columns_;
  }

  /// The first channel that the block finishes.
  __device__ __forceinline__ int first_channel() const { return o_ + rank_ * kOwn; }
};

}  // namespace plantune
