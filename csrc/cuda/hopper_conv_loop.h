// The main loop of a convolution on Hopper: one warp copies weights, one copies images, and the
// warpgroups multiply what has come. `hopper_conv.h` has the convolution.

#pragma once

#include "cuda/hopper_conv_planes.h"

namespace plantune {

template <class C>
class HopperConvLoop : public HopperConvPlanes<C> {
 protected:
  using Tile = HopperConvTile<C>;
  using T = typename C::T;
  using Expression = typename C::Expression;
  using typename Tile::Step;
  using typename Tile::Place;
  using Tile::advance, Tile::base_, Tile::begin_, Tile::end_, Tile::first_channel, Tile::first_r_,
      Tile::first_s_, Tile::first_step, Tile::gathers_h_, Tile::gathers_w_, Tile::h_, Tile::image,
      Tile::image_empty, Tile::image_full, Tile::kAtomRows, Tile::kBoxPixels, Tile::kChunk,
      Tile::kCopyBytes, Tile::kCopyH, Tile::kCopyW, Tile::kGatherBytes, Tile::kGatherPixels,
      Tile::kGatherStart, Tile::kInPlace, Tile::kPlanes, Tile::kResidualStart, Tile::kSavedStart,
      Tile::kWarpgroup, Tile::kWeightBytes, Tile::maps_, Tile::n_, Tile::o_, Tile::out,
      Tile::pad_h_, Tile::pad_w_, Tile::place_of, Tile::release, Tile::residual_full,
      Tile::starts_box, Tile::w_, Tile::weight, Tile::weight_empty, Tile::weight_full;
  using typename Tile::TileOfResidual;
  using typename Tile::TileOfSaved;

  using HopperConvPlanes<C>::HopperConvPlanes;

  // Of transposed weights, 64 columns of a tile and all of its chunk.
  static constexpr int kPartOfWeight = kChunk * kRowBytes;

  // Phase 1: copies.

  /// Packed weights are written when a weight changed, by kernels that release no successor before
  /// they end; so nothing in front of this kernel can still be writing them.
  __device__ __forceinline__ void copy_weights() const {
    Slot<C::kWeightStages> slot;
    copy_first_weights(slot);
    copy_residual();
  }

  __device__ __forceinline__ void copy_first_weights(Slot<C::kWeightStages>& slot) const {
    Step step = begin_ < end_ ? first_step() : Step{};
    copy_some_weights(begin_, end_, step, slot);
  }

  __device__ __forceinline__ void copy_some_weights(int first, int last, Step& step,
                                                    Slot<C::kWeightStages>& slot) const {
    for (int i = first; i < last; ++i) {
      const int r = first_r_ + step.r * C::kPhasesH, s = first_s_ + step.s * C::kPhasesW;
      copy_weight(maps_.w, slot, step.chunk, r * C::kS + s);
      advance(step);
    }
  }

  __device__ __forceinline__ void copy_weight(const TensorMap& map, Slot<C::kWeightStages>& slot,
                                              int chunk, int tap) const {
    wait(weight_empty(slot.stage), slot.parity ^ 1);
    arrive_expecting(weight_full(slot.stage), kWeightBytes);
    // A gradient's taps come from the last one on.
    if constexpr (C::kReversed) tap = C::kR * C::kS - 1 - tap;
    if constexpr (C::kTransposed) {
      for (int i = 0; i < C::kTileN / kChunk; ++i) {
        load_box(map, weight(slot.stage) + i * kPartOfWeight, weight_full(slot.stage),
                 o_ + i * kChunk, tap, chunk * kChunk);
      }
    } else if constexpr (kPlanes > 0) {
      load_box(map, weight(slot.stage), weight_full(slot.stage), chunk * kChunk, o_, 0, tap);
    } else {
      load_box(map, weight(slot.stage), weight_full(slot.stage), chunk * kChunk, tap, o_);
    }
    slot.advance();
  }

  __device__ __forceinline__ void copy_residual() const {
    constexpr int kBytes = (kInPlace ? TileOfResidual::copied(kBoxPixels) : 0) +
                           (Expression::kSaved ? TileOfSaved::copied(kBoxPixels) : 0) +
                           (C::kGathers ? TileOfResidual::copied(kGatherPixels) : 0);
    if constexpr (kBytes > 0) {
      wait_for_predecessor();
      arrive_expecting(residual_full(), kBytes);
      if constexpr (kInPlace) copy_boxes<TileOfResidual>(out().residual, kResidualStart, w_, h_);
      if constexpr (Expression::kSaved) copy_boxes<TileOfSaved>(out().saved, kSavedStart, w_, h_);
      if constexpr (C::kGathers) {
        copy_boxes<TileOfResidual, kGatherBytes>(out().residual, kGatherStart, w_ - gathers_w_.pad,
                                                 h_ - gathers_h_.pad);
      }
    }
  }

  template <class Boxes, int kBytes = Boxes::kBoxBytes>
  __device__ __forceinline__ void copy_boxes(const TensorMap& map, int start, int w, int h) const {
    for (int i = 0; i < Boxes::kBoxes; ++i) {
      load_box(map, base_ + start + i * kBytes, residual_full(),
               first_channel() + i * Boxes::kChannels, w, h, n_);
    }
  }

  __device__ __forceinline__ void copy_images() const {
    Slot<C::kImageStages> slot;
    copy_images(slot);
  }

  __device__ __forceinline__ void copy_images(Slot<C::kImageStages>& slot) const {
    wait_for_predecessor();
    if (begin_ == end_) return;
    Step step = first_step();
    for (int i = begin_; i < end_; ++i) {
      if (i == begin_ || starts_box(step)) {
        wait(image_empty(slot.stage), slot.parity ^ 1);
        arrive_expecting(image_full(slot.stage), kCopyBytes);
        load_box(maps_.x, image(slot.stage), image_full(slot.stage), step.chunk * kChunk,
                 w_ * C::kStrideW - pad_w_ + (C::kReuse ? 0 : step.s),
                 h_ * C::kStrideH - pad_h_ + (C::kReuse ? 0 : step.r), n_);
        slot.advance();
      }
      advance(step);
    }
  }

  // Phase 2: products.

  /// What a warpgroup's 64 rows read at a step.
  __device__ __forceinline__ uint64_t rows_at(int stage, const Step& step) const {
    const int group = threadIdx.x / kWarpgroup;
    if constexpr (!C::kReuse) {
      return matrix_descriptor(image(stage) + group * kAtomRows * kRowBytes, kGroupBytes);
    } else {
      const Place place = place_of(group * kAtomRows);
      const int row = place.n * kCopyH + place.h + step.r;
      return matrix_descriptor(image(stage) + (row * kCopyW + place.w + step.s) * kRowBytes,
                               kCopyW * kRowBytes);
    }
  }

  __device__ __forceinline__ uint64_t weights_at(int stage) const {
    if constexpr (C::kTransposed) return transposed_descriptor(weight(stage), kPartOfWeight);
    return matrix_descriptor(weight(stage), kGroupBytes);
  }

  __device__ __forceinline__ void multiply(float (&sums)[C::kTileN / 2]) const {
    Slot<C::kWeightStages> weight_slot;
    multiply(sums, weight_slot);
  }

  __device__ __forceinline__ void multiply(float (&sums)[C::kTileN / 2],
                                           Slot<C::kWeightStages>& weight_slot) const {
    Slot<C::kImageStages> image_slot;
    multiply(sums, weight_slot, image_slot);
  }

  /// Leaves the last slot of images to be released.
  __device__ __forceinline__ void multiply(float (&sums)[C::kTileN / 2],
                                           Slot<C::kWeightStages>& weight_slot,
                                           Slot<C::kImageStages>& image_slot) const {
    if constexpr (kPlanes > 0) {
      this->multiply_planes(sums, weight_slot, image_slot);
    } else {
      multiply_in_place(sums, weight_slot, image_slot);
    }
  }

  __device__ __forceinline__ void multiply_in_place(float (&sums)[C::kTileN / 2],
                                                    Slot<C::kWeightStages>& weight_slot,
                                                    Slot<C::kImageStages>& image_slot) const {
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    if (begin_ == end_) return;
    Step step = first_step();
    int read_image = -1, read_weight = -1;  // slots of the step before
    wait(image_full(image_slot.stage), image_slot.parity);
    for (int i = begin_; i < end_; ++i) {
      multiply_step(rows_at(image_slot.stage, step), weight_slot, sums);
      release(read_weight, weight_empty(read_weight));
      release(read_image, image_empty(read_image));
      read_weight = weight_slot.stage;
      read_image = -1;
      weight_slot.advance();
      advance(step);
      if (i + 1 < end_ && starts_box(step)) {
        read_image = image_slot.stage;
        image_slot.advance();
        wait(image_full(image_slot.stage), image_slot.parity);
      }
    }
    wait_for_products<0>();
    fence_registers(sums);
    release(read_weight, weight_empty(read_weight));
  }

  /// Starts the products of one step, and waits for those of the step before.
  __device__ __forceinline__ void multiply_step(uint64_t rows,
                                                const Slot<C::kWeightStages>& weight_slot,
                                                float (&sums)[C::kTileN / 2]) const {
    wait(weight_full(weight_slot.stage), weight_slot.parity);
    fence_registers(sums);
    fence_products();
    multiply_row<T, C::kTileN, C::kTransposed>(rows, weights_at(weight_slot.stage), sums);
    commit_products();
    fence_registers(sums);
    wait_for_products<1>();
  }
};

}  // namespace plantune
