// The tile of a weight's gradient on Hopper: what a block has of the problem, of shared memory and
// of the barriers in it. `hopper_wgrad.h` has the kernel.

#pragma once

#include "cuda/hopper_async.h"
#include "cuda/hopper_mma.h"
#include "cuda/vector.h"

namespace plantune {

/// The tensor maps of both images.
struct WgradMaps {
  TensorMap dy, x;
};

/// The constants of C are a problem and a configuration.
///
/// A box has kBoxW x kBoxH places of kBoxN images; in shared memory each has a row of 128 bytes: 64
/// channels. With kImagesInside the images of a place are neighbours, otherwise the places of a row
/// of an image are. What its taps read of x comes in phases, each with every stride-th row and
/// column, so that the places which one tap reads are neighbours, too.
template <class C>
class HopperWgradTile {
  using Result = typename C::Result;

 public:
  static constexpr int kWarpgroup = 128;
  static constexpr int kChunk = 64;
  static constexpr int kTapRows = C::kR;  // each has a warpgroup of its own
  static constexpr int kPartsO = C::kTileM / kChunk, kPartsC = C::kTileN / kChunk;
  static constexpr int kGroups = kTapRows * kPartsO;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;

  static constexpr int kPixels = C::kBoxW * C::kBoxH * C::kBoxN;
  static constexpr int kPhasesH = smaller(C::kStrideH, C::kR);
  static constexpr int kPhasesW = smaller(C::kStrideW, C::kS);
  static constexpr int kPhases = kPhasesH * kPhasesW;
  static constexpr int kResultBytes = kPixels * kRowBytes;
  static constexpr int kCopiedPhase = C::kPhaseW * C::kPhaseH * C::kBoxN * kRowBytes;
  static constexpr int kPhaseBytes = ceil_div(kCopiedPhase, kGroupBytes) * kGroupBytes;
  static constexpr int kPartBytes = kPhases * kPhaseBytes;
  static constexpr int kImageStart = kPartsO * kResultBytes;
  static constexpr int kStageBytes = kImageStart + kPartsC * kPartBytes;
  static constexpr int kCopyBytes = kImageStart + kPartsC * kPhases * kCopiedPhase;
  static constexpr int kBarrierStart = C::kStages * kStageBytes;
  static constexpr int kSharedBytes = kBarrierStart + 16 * C::kStages + kGroupBytes;

  static constexpr int kBoxesW = ceil_div(C::kQ, C::kBoxW);
  static constexpr int kBoxesH = ceil_div(C::kP, C::kBoxH);
  static constexpr int kBoxes = kBoxesW * kBoxesH * ceil_div(C::kN, C::kBoxN);
  static constexpr int kTilesO = ceil_div(C::kO, C::kTileM);
  static constexpr int kTilesC = ceil_div(C::kC, C::kTileN);

  // Where a box has all places of an image, taps that read nothing but padding are left out.
  static constexpr bool kWholeH = C::kImagesInside && kBoxesH == 1;
  static constexpr bool kWholeW = C::kImagesInside && kBoxesW == 1;

  static_assert(sizeof(typename C::T) == 2, "a swizzled row holds 64 elements of 2 bytes");
  static_assert(kPixels % 32 == 0, "products of 16 values of K come in pairs");
  static_assert(C::kImagesInside ? C::kBoxN % 16 == 0 : C::kBoxW % 8 == 0,
                "a product's values of K are of one place, or each 8 are neighbours");

 protected:
  __device__ __forceinline__ HopperWgradTile(const WgradMaps& maps, uint32_t base,
                                             int index = blockIdx.x)
      : maps_(maps), base_(base) {
    c_ = index % kTilesC * C::kTileN, index /= kTilesC;
    o_ = index % kTilesO * C::kTileM, index /= kTilesO;
    split_ = index;
    begin_ = int(int64_t(kBoxes) * split_ / C::kSplitK);
    end_ = int(int64_t(kBoxes) * (split_ + 1) / C::kSplitK);
  }

  const WgradMaps& maps_;
  uint32_t base_;
  int o_, c_, split_, begin_, end_;

  __device__ __forceinline__ uint32_t stage(int number) const {
    return base_ + number * kStageBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return base_ + kBarrierStart + 8 * stage;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(C::kStages + stage); }

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == kGroups * kWarpgroup) {
      prefetch(maps_.dy);
      prefetch(maps_.x);
      for (int i = 0; i < C::kStages; ++i) {
        init_barrier(full(i), 1);
        init_barrier(empty(i), kGroups);
      }
      publish_barriers();
    }
    __syncthreads();
  }

  /// The first row (or column) of a phase that is copied: those before are padding for all taps.
  static constexpr int first_of(int phase, int pad, int stride, bool whole) {
    return whole && pad > phase ? ceil_div(pad - phase, stride) : 0;
  }
  static constexpr int first_row(int phase) {
    return first_of(phase, C::kPadH, C::kStrideH, kWholeH);
  }
  static constexpr int first_column(int phase) {
    return first_of(phase, C::kPadW, C::kStrideW, kWholeW);
  }

  /// Where 8 values of K begin: a place, and the first image (or the first place, and the image).
  struct Place {
    int w, h, n;
  };
  static constexpr Place place_of(int eight) {
    const int at = 8 * eight;
    if (C::kImagesInside) {
      const int place = at / C::kBoxN;
      return {place % C::kBoxW, place / C::kBoxW, at % C::kBoxN};
    }
    return {at % C::kBoxW, at / C::kBoxW % C::kBoxH, at / (C::kBoxW * C::kBoxH)};
  }

  /// Whether a tap may read more than padding there.
  static constexpr bool reads(int r, int s, int eight) {
    const Place place = place_of(eight);
    const int h = place.h * C::kStrideH + r - C::kPadH, w = place.w * C::kStrideW + s - C::kPadW;
    const bool inside_h = 0 <= h && h < C::kH, inside_w = 0 <= w && w < C::kW;
    return (inside_h || !kWholeH) && (inside_w || !kWholeW);
  }

  /// Where in a stage's part of x a tap finds 8 values of K.
  static constexpr int image_place(int r, int s, int eight) {
    const Place place = place_of(eight);
    const int phase_h = r % C::kStrideH, phase_w = s % C::kStrideW;
    const int h = place.h + r / C::kStrideH - first_row(phase_h);
    const int w = place.w + s / C::kStrideW - first_column(phase_w);
    const int row = C::kImagesInside ? (h * C::kPhaseW + w) * C::kBoxN + place.n
                                     : (place.n * C::kPhaseH + h) * C::kPhaseW + w;
    return (phase_h * kPhasesW + phase_w) * kPhaseBytes + row * kRowBytes;
  }

  // Copies of a box, and what becomes of sums.

  __device__ __forceinline__ void copy_image(uint32_t to, uint32_t barrier, int c, int w, int h,
                                             int n) const {
#pragma unroll
    for (int i = 0; i < kPhasesH; ++i) {
#pragma unroll
      for (int j = 0; j < kPhasesW; ++j) {
        load(maps_.x, to + (i * kPhasesW + j) * kPhaseBytes, barrier, c,
             (w + first_column(j)) * C::kStrideW + j - C::kPadW,
             (h + first_row(i)) * C::kStrideH + i - C::kPadH, n);
      }
    }
  }

  static __device__ __forceinline__ void load(const TensorMap& map, uint32_t to, uint32_t barrier,
                                              int channel, int w, int h, int n) {
    if constexpr (C::kImagesInside) {
      load_box(map, to, barrier, channel, n, w, h);
    } else {
      load_box(map, to, barrier, channel, w, h, n);
    }
  }

  /// Where dw has an element.
  static __device__ __forceinline__ size_t element_at(int o, int tap, int c) {
    constexpr int kTaps = C::kR * C::kS;
    if constexpr (C::kChannelsLast) return (size_t(o) * kTaps + tap) * C::kC + c;
    return (size_t(o) * C::kC + c) * kTaps + tap;
  }

  __device__ __forceinline__ void store(float* parts, Result* dw, int tap, int first,
                                        const float (&sums)[C::kTileN / 2]) const {
    constexpr int kTaps = C::kR * C::kS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const size_t plane = size_t(split_) * kTaps + tap;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int o = first + 16 * warp + lane / 4 + 8 * half;
#pragma unroll
      for (int j = 0; j < C::kTileN / 8; ++j) {
        const int c = c_ + 8 * j + lane % 4 * 2;
        if (o >= C::kO || c >= C::kC) continue;
        const float2 pair = {sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]};
        if constexpr (C::kSplitK > 1) {
          *reinterpret_cast<float2*>(parts + (plane * C::kO + o) * C::kC + c) = pair;
        } else {
          dw[element_at(o, tap, c)] = from_float<Result>(pair.x);
          dw[element_at(o, tap, c + 1)] = from_float<Result>(pair.y);
        }
      }
    }
  }
};

}  // namespace plantune
