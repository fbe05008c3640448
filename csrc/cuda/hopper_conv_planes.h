// The main loop of a convolution on Hopper whose image has floats that become factors of 16 bits: a
// thread reads what its products need of the image and splits it, while the products of the step
// before are under way. Filters come as planes already. `hopper_conv.h` has the convolution.

#pragma once

#include "cuda/hopper_conv_tile.h"

namespace plantune {

template <class C>
class HopperConvPlanes : public HopperConvTile<C> {
 protected:
  using Tile = HopperConvTile<C>;
  using typename Tile::Step;
  using typename Tile::Place;
  using Tile::advance, Tile::begin_, Tile::end_, Tile::first_step, Tile::image, Tile::image_empty,
      Tile::image_full, Tile::kCopyH, Tile::kCopyW, Tile::kPlaneBytes, Tile::kPlanes,
      Tile::place_of, Tile::release, Tile::row_of_warp, Tile::starts_box, Tile::weight,
      Tile::weight_empty, Tile::weight_full;

  using Tile::Tile;

  // Products of a step along K, of 16 channels each.
  static constexpr int kParts = Tile::kChunk / 16;
  static constexpr int kSums = C::kTileN / 2;
  // Tensor cores truncate: the sums of several planes leave them after each step.
  static constexpr bool kLeaves = kPlanes > 1;

  /// A thread's factors of a step: two rows of 4 channels for each product.
  struct Factors {
    uint32_t of[kPlanes > 0 ? kPlanes : 1][kParts][4];
  };

  /// Leaves the last slot of images to be released. Factors of a step are read while products still
  /// read those of the step before, and have registers of their own: if one variable took both, the
  /// compiler would write to registers that products are reading.
  __device__ __forceinline__ void multiply_planes(float (&sums)[kSums],
                                                  Slot<C::kWeightStages>& weight_slot,
                                                  Slot<C::kImageStages>& image_slot) const {
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    if (begin_ == end_) return;
    float partial[kSums] = {};
    Step step = first_step();
    wait(image_full(image_slot.stage), image_slot.parity);
    Factors even, odd;
    read_factors(image_slot.stage, step, even);
#pragma unroll 1
    for (int left = end_ - begin_; left > 0; left -= 2) {
      multiply_step(even, odd, left > 1, step, partial, sums, weight_slot, image_slot);
      if (left == 1) break;
      multiply_step(odd, even, left > 2, step, partial, sums, weight_slot, image_slot);
    }
  }

 private:
  /// Multiplies by the factors of a step, and meanwhile reads the next ones, if there are any.
  __device__ __forceinline__ void multiply_step(Factors& factors, Factors& next, bool has_next,
                                                Step& step, float (&partial)[kSums],
                                                float (&sums)[kSums],
                                                Slot<C::kWeightStages>& weight_slot,
                                                Slot<C::kImageStages>& image_slot) const {
    wait(weight_full(weight_slot.stage), weight_slot.parity);
    if constexpr (kLeaves) {
      start_products(factors, weight_slot.stage, partial);
    } else {
      start_products(factors, weight_slot.stage, sums);
    }
    advance(step);
    if (has_next) {
      if (starts_box(step)) next_image(image_slot);
      read_factors(image_slot.stage, step, next);
    }
    end_products(factors, partial, sums);
    release(weight_slot.stage, weight_empty(weight_slot.stage));
    weight_slot.advance();
    if constexpr (kLeaves) {
#pragma unroll
      for (int j = 0; j < kSums; ++j) sums[j] += partial[j];
    }
  }

  /// Until here products read the factors, and change sums unseen.
  static __device__ __forceinline__ void end_products(Factors& factors, float (&partial)[kSums],
                                                      float (&sums)[kSums]) {
    wait_for_products<0>();
    fence_registers(partial);
    fence_registers(sums);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) fence_registers(factors.of[plane][part]);
    }
    __syncwarp();
  }

  /// All of the warp have read the slot.
  __device__ __forceinline__ void next_image(Slot<C::kImageStages>& slot) const {
    __syncwarp();
    release(slot.stage, image_empty(slot.stage));
    slot.advance();
    wait(image_full(slot.stage), slot.parity);
  }

  /// Starts a step's products, small ones first: they leave the least where sums are truncated.
  __device__ __forceinline__ void start_products(Factors& factors, int stage,
                                                 float (&sums)[kSums]) const {
    const uint64_t filters = short_rows_descriptor(weight(stage));
    fence_registers(sums);
    fence_products();
    bool adds = !kLeaves;
#pragma unroll
    for (int both = kPlanes - 1; both >= 0; --both) {
#pragma unroll
      for (int plane = 0; plane <= both; ++plane) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int offset = (both - plane) * kPlaneBytes + part * 32;
          PlaneProduct<typename C::Factor, C::kTileN>::start(factors.of[plane][part],
                                                             filters + offset / 16, adds, sums);
          adds = true;
        }
      }
    }
    commit_products();
    fence_registers(sums);
  }

  __device__ __forceinline__ void read_factors(int stage, const Step& step,
                                               Factors& factors) const {
    const int row = threadIdx.x / 32 * 16 + row_of_warp();
    read_row<0>(image_row(stage, step, row), factors);
    read_row<1>(image_row(stage, step, row + 8), factors);
  }

  /// The floats of a row, and the channels' place in its swizzle.
  __device__ __forceinline__ uint32_t image_row(int stage, const Step& step, int row) const {
    if constexpr (C::kReuse) {
      const Place place = place_of(row);
      const int pixel = (place.n * kCopyH + place.h + step.r) * kCopyW + place.w + step.s;
      return row_at(stage, pixel);
    } else {
      return row_at(stage, row);
    }
  }
  __device__ __forceinline__ uint32_t row_at(int stage, int pixel) const {
    const int lane = threadIdx.x % 4;
    return image(stage) + pixel * kRowBytes + (lane / 2 ^ pixel % 8) * 16 + lane % 2 * 8;
  }

  /// Channels 2 * lane and the next of each eight: registers 0 and 2 for the first row, 1 and 3 for
  /// the other.
  template <int kRow>
  static __device__ __forceinline__ void read_row(uint32_t row, Factors& factors) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t planes[kPlanes];
        split<typename C::Factor>(load_pair(row ^ (4 * part + 2 * half) * 16), planes);
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) {
          factors.of[plane][part][2 * half + kRow] = planes[plane];
        }
      }
    }
  }
};

}  // namespace plantune
