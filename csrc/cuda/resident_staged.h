// A convolution whose weights stay in shared memory, `resident_conv.h`, and whose epilogue reads and
// writes whole tiles there: tensor copies bring the residual and what was saved, and take y and
// `unshifted` away, 128 bytes of a pixel at once where a thread has 4. Such words kept the first-level
// cache busy: for 77 % of all cycles, with the products, in a gradient that reads two images and took
// 95 us where its bytes take 64 (H200, 2026-11-23).
//
// Each warpgroup has kStaged tiles and a warp that carries them: it fetches the next tile's images
// when the last one's have left. y takes the place of the first image that is read, `unshifted` that
// of the second.

#pragma once

#include "cuda/resident_conv.h"

namespace plantune {

struct ResidentStagedMaps : ResidentMaps {
  TensorMap y, unshifted, residual, saved;
};

template <class C>
class ResidentStaged : public ResidentConv<C> {
  using Base = ResidentConv<C>;
  using T = typename Base::T;
  using Expression = typename Base::Expression;
  using typename Base::Epilogue;
  using typename Base::Place;
  using typename Base::Target;
  using typename Base::Use;
  using Base::base_, Base::count_, Base::finished, Base::full, Base::kChunks, Base::kColumns,
      Base::kEights, Base::kStageStart, Base::kTileBytes, Base::kWarpgroup, Base::o_,
      Base::place_of, Base::staged, Base::use_of;

  static constexpr int kReads = Expression::kResidual + Expression::kSaved;
  static constexpr int kSavedTile = Expression::kResidual ? 1 : 0;

  static_assert(C::kStaged >= kReads && C::kStaged >= 1 + C::kUnshifted &&
                    C::kStagedBytes >= C::kStaged * kTileBytes,
                "a tile for each image");
  static_assert(!C::kGathers && C::kPhasesH * C::kPhasesW == 1, "tiles are pixels side by side");

  const ResidentStagedMaps& maps_;

 public:
  using Maps = ResidentStagedMaps;

  static __device__ __forceinline__ void run(const Maps& maps, const typename Base::Arguments& a) {
    Base::template run_as<ResidentStaged>(maps, a);
  }

  __device__ __forceinline__ ResidentStaged(const Maps& maps, const typename Base::Arguments& a,
                                            uint32_t base)
      : Base(maps, a, base), maps_(maps) {}

  /// Brings what each tile of a group reads, or the word that its room is free, and takes away what
  /// the group has made.
  __device__ __forceinline__ void carry(int group) const {
    wait_for_predecessor();
    uint32_t parity = 0;
    if (group < count_) bring(group, place_of(group));
    for (int i = group; i < count_; i += C::kGroups, parity ^= 1) {
      const Place place = place_of(i);
      wait(finished(group), parity);
      store_box(maps_.y, tile(group, 0), o_, place.w, place.h, place.n);
      if constexpr (C::kUnshifted) {
        store_box(maps_.unshifted, tile(group, 1), o_, place.w, place.h, place.n);
      }
      wait_for_stores();
      if (i + C::kGroups < count_) bring(group, place_of(i + C::kGroups));
    }
  }

  __device__ __forceinline__ void consume(int group) const {
    Epilogue e;
    Base::begin(e);
    uint32_t parity = 0;
#pragma unroll 1
    for (int i = group; i < count_; i += C::kGroups, parity ^= 1) {
      float sums[kColumns / 2];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const Use use = use_of(i, chunk);
        wait(full(use.slot), use.parity);
        Base::start_chunk(use.slot, chunk, sums);
        Base::finish_chunk(sums);
        if (threadIdx.x % 32 == 0) arrive(Base::empty(use.slot));
      }
      wait(staged(group), parity);
      finish(group, Base::target_of(place_of(i)), sums, e);
      publish_writes();
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(finished(group));
    }
    Base::template leave_sums<0>(group, e);
  }

 private:
  __device__ __forceinline__ uint32_t tile(int group, int which) const {
    return base_ + kStageStart + group * Base::kStagedRow + which * kTileBytes;
  }

  __device__ __forceinline__ void bring(int group, Place place) const {
    if constexpr (kReads == 0) {
      arrive(staged(group));
    } else {
      arrive_expecting(staged(group), kReads * kTileBytes);
    }
    if constexpr (Expression::kResidual) {
      load_box(maps_.residual, tile(group, 0), staged(group), o_, place.w, place.h, place.n);
    }
    if constexpr (Expression::kSaved) {
      load_box(maps_.saved, tile(group, kSavedTile), staged(group), o_, place.w, place.h, place.n);
    }
  }

  /// A thread has a pair of channels of two neighbouring columns in each row of 8 pixels.
  __device__ __forceinline__ void finish(int group, const Target& target,
                                         const float (&sums)[kColumns / 2], Epilogue& e) const {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const uint32_t at = tile(group, 0) + pair_place(threadIdx.x % 4 * 2 + which);
#pragma unroll
      for (int row = 0; row < kEights; ++row) {
        const uint32_t first = at + row * 8 * kRowBytes;
        const float2 v = pair_at<C::kScale>(sums, row, which, e.scale, e.bias);
        float2 more = {}, saved = {};
        if constexpr (Expression::kResidual) more = pair_in<T>(load_word(first));
        if constexpr (Expression::kSaved) {
          saved = pair_in<T>(load_word(first + kSavedTile * kTileBytes));
        }
        store_word(first, word_of<T>(evaluate<Expression>(v, more, e.offset, saved)));
        if constexpr (C::kUnshifted) {
          store_word(first + kTileBytes,
                     word_of<T>(evaluate<typename C::Unshifted>(v, more, e.offset, saved)));
        }
        if (row < target.rows && which < target.columns) e.sums.take(v, more, e.offset, saved);
      }
    }
  }
};

}  // namespace plantune
