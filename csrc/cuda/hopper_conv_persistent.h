// A convolution by blocks that stay, `hopper_conv.h`: each makes tiles until none is left. While its
// warpgroups finish one, the copies for the next are under way, and a warp of its own takes the
// finished one away. Blocks that come and go wait for their first copies and their last stores alone
// where one fills a multiprocessor: of 8.9 us that a tile of a pooled gradient took, 2.6 were products
// (H200, 2026-11-23).

#pragma once

#include "cuda/hopper_conv.h"

namespace plantune {

template <class C>
class HopperConvPersistent : public HopperConv<C> {
  using Base = HopperConv<C>;
  using T = typename C::T;
  using Expression = typename C::Expression;
  using typename Base::Step;
  using Tile = HopperConvTile<C>;
  using Tile::begin_, Tile::end_, Tile::image_empty, Tile::kConsumers, Tile::kTilesO,
      Tile::kTilesOfPixels, Tile::out, Tile::scalars_, Tile::tile_left, Tile::tile_made;

  static constexpr int kTiles = kTilesOfPixels * kTilesO;
  static constexpr bool kReads = Expression::kResidual || Expression::kSaved;
  static_assert(C::kSplitK == 1, "blocks of a cluster come and go together");

 public:
  using Maps = typename Tile::Maps;
  using Base::Base;

  static __device__ __forceinline__ void run(const Maps& maps, const ConvScalars& scalars) {
    extern __shared__ uint8_t memory[];
    release_successor();
    const uint32_t start = shared_address(memory);
    const uint32_t base = (start + kGroupBytes - 1) / kGroupBytes * kGroupBytes;
    HopperConvPersistent(maps, scalars, base).init_barriers();
    const int warp = threadIdx.x / 32, copying = warp - kConsumers / 32;
    if (copying < 0) {
      consume_tiles(maps, scalars, base);
    } else if (threadIdx.x % 32 == 0) {
      if (copying == 0) copy_weights_of_tiles(maps, scalars, base);
      if (copying == 1) copy_images_of_tiles(maps, scalars, base);
      if (copying == 2) take_tiles_away(maps, scalars, base);
    }
  }

 private:
  /// Calls `make(conv, parity)` with each of the block's tiles in order, one of each gridDim.x. Rounds
  /// begin at different ones, as neighbours may differ in their work: phases have more taps or fewer.
  template <class Make>
  static __device__ __forceinline__ void for_tiles(const Maps& maps, const ConvScalars& scalars,
                                                   uint32_t base, Make make) {
    const int blocks = gridDim.x;
    int turn = blockIdx.x;
    uint32_t parity = 0;
#pragma unroll 1
    for (int first = 0; first < kTiles; first += blocks) {
      const int tile = first + turn;
      if (++turn == blocks) turn = 0;
      if (tile >= kTiles) continue;
      make(HopperConvPersistent(maps, scalars, base, tile), parity);
      parity ^= 1;
    }
  }

  static __device__ __forceinline__ void copy_weights_of_tiles(const Maps& maps,
                                                               const ConvScalars& scalars,
                                                               uint32_t base) {
    Slot<C::kWeightStages> slot;
    bool others = false;
    for_tiles(maps, scalars, base, [&](const HopperConvPersistent& conv, uint32_t parity) {
      Step step = conv.begin_ < conv.end_ ? conv.first_step() : Step{};
      const int full = min(conv.begin_ + C::kWeightStages, conv.end_);
      conv.copy_some_weights(conv.begin_, full, step, slot);
      if constexpr (kReads) {  // else nobody waits for this warp, which might miss a phase
        if (others) wait(conv.tile_left(), parity ^ 1);
        others = true;
        conv.copy_residual();
      }
      conv.copy_some_weights(full, conv.end_, step, slot);
    });
  }

  static __device__ __forceinline__ void copy_images_of_tiles(const Maps& maps,
                                                              const ConvScalars& scalars,
                                                              uint32_t base) {
    Slot<C::kImageStages> slot;
    for_tiles(maps, scalars, base,
              [&](const HopperConvPersistent& conv, uint32_t) { conv.copy_images(slot); });
  }

  static __device__ __forceinline__ void take_tiles_away(const Maps& maps,
                                                         const ConvScalars& scalars,
                                                         uint32_t base) {
    wait_for_predecessor();
    for_tiles(maps, scalars, base, [&](const HopperConvPersistent& conv, uint32_t parity) {
      wait(conv.tile_made(), parity);
      conv.store_tiles();
      wait_for_stores();
      arrive(conv.tile_left());
    });
  }

  static __device__ __forceinline__ void consume_tiles(const Maps& maps, const ConvScalars& scalars,
                                                       uint32_t base) {
    const float offset = Expression::kOffset ? load_parameter<T>(scalars.offset, 0) : 0.f;
    Slot<C::kWeightStages> weights;
    Slot<C::kImageStages> images;
    bool others = false;
    for_tiles(maps, scalars, base, [&](const HopperConvPersistent& conv, uint32_t parity) {
      // All have read the scales and sums of the tile before.
      constexpr bool kShares = C::kScale || C::kBias || C::Sums::kCount > 0;
      if (kShares && others) sync_first<kConsumers>();
      conv.load_scales();
      float sums[C::kTileN / 2];
      conv.multiply(sums, weights, images);
      if (conv.begin_ < conv.end_) {
        Base::release(images.stage, conv.image_empty(images.stage));
        images.advance();
      }
      conv.scale_sums(sums);
      if (others) wait(conv.tile_left(), parity ^ 1);
      others = true;
      conv.finish(sums, offset, parity);
      publish_writes();
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(conv.tile_made());
      if constexpr (C::Sums::kCount > 0) {
        sync_first<kConsumers>();
        conv.template leave_sums<0>();
      }
    });
  }
};

}  // namespace plantune
