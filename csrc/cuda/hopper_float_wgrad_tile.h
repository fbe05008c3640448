// The tile of a weight's gradient of float32 on Hopper: what a block has of the problem, of shared
// memory and of the barriers in it. `hopper_float_wgrad.h` has the kernel.

#pragma once

#include "cuda/hopper_wgrad_tile.h"

namespace plantune {

/// Its boxes are those of HopperWgradTile, whose rows of 128 bytes hold 64 channels of a plane. As
/// floats they come in halves of 32 channels, with the same rows in each.
template <class C>
class HopperFloatWgradTile : public HopperWgradTile<C> {
 public:
  using Base = HopperWgradTile<C>;
  using Base::kPartBytes, Base::kPartsC, Base::kPartsO, Base::kPhases, Base::kPixels,
      Base::kWarpgroup;

  // Each warpgroup that multiplies has some of the taps.
  static constexpr int kTapsOfGroup = ceil_div(C::kR * C::kS, C::kTapGroups);
  static constexpr int kGroups = C::kTapGroups * kPartsO;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;

  static constexpr int kHalf = 32;  // channels
  static constexpr int kResultHalf = kPixels * kRowBytes, kResultBytes = 2 * kResultHalf;
  static constexpr int kImageStart = kPartsO * kResultBytes;
  static constexpr int kStageBytes = kImageStart + kPartsC * 2 * kPartBytes;
  static constexpr int kCopyBytes = kImageStart + kPartsC * 2 * kPhases * Base::kCopiedPhase;
  static constexpr int kPlaneBytes = kPartsC * kPartBytes;
  static constexpr int kPlanesBytes = C::kPlanes * kPlaneBytes;
  static constexpr int kPlanesStart = C::kStages * kStageBytes;
  static constexpr int kBarrierStart = kPlanesStart + C::kPlaneStages * kPlanesBytes;
  static constexpr int kBarriers = 2 * (C::kStages + C::kPlaneStages);
  static constexpr int kSharedBytes = kBarrierStart + 8 * kBarriers + kGroupBytes;

  // Three warps of the last warpgroup split x, the fourth one copies.
  static constexpr int kSplitters = 96;

 protected:
  using Base::Base;
  using Base::base_, Base::maps_;

  __device__ __forceinline__ uint32_t stage(int number) const {
    return base_ + number * kStageBytes;
  }
  __device__ __forceinline__ uint32_t planes(int number) const {
    return base_ + kPlanesStart + number * kPlanesBytes;
  }
  __device__ __forceinline__ uint32_t full(int stage) const {
    return base_ + kBarrierStart + 8 * stage;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(C::kStages + stage); }
  __device__ __forceinline__ uint32_t planes_full(int stage) const {
    return full(2 * C::kStages + stage);
  }
  __device__ __forceinline__ uint32_t planes_empty(int stage) const {
    return planes_full(C::kPlaneStages + stage);
  }

  /// A warp arrives when it has read, or written, a slot.
  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == kGroups * kWarpgroup) {
      prefetch(maps_.dy);
      prefetch(maps_.x);
      constexpr int kConsumers = kGroups * kWarpgroup / 32, kWriters = kSplitters / 32;
      for (int i = 0; i < C::kStages; ++i) {
        init_barrier(full(i), 1);
        init_barrier(empty(i), kConsumers + kWriters);
      }
      for (int i = 0; i < C::kPlaneStages; ++i) {
        init_barrier(planes_full(i), kWriters);
        init_barrier(planes_empty(i), kConsumers);
      }
      publish_barriers();
    }
    __syncthreads();
  }

  static __device__ __forceinline__ void arrive_as_warp(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
  }
};

}  // namespace plantune
