// The gradient of an image under a convolution with a stride, `resident_phases.h`, and an epilogue as
// in `resident_staged.h`: tensor copies bring a phase of what was saved and take y away in its place.
// With kGathers the windows of a pool that a tile reads come once for all phases.

#pragma once

#include "cuda/resident_phases.h"

namespace plantune {

template <int kPhases>
struct ResidentPhasesMaps : ResidentMaps {
  TensorMap windows, y[kPhases], saved[kPhases];
};

template <class C>
class ResidentPhasesStaged : public ResidentPhases<C> {
  using Base = ResidentPhases<C>;
  using T = typename Base::T;
  using Expression = typename C::Expression;
  using typename Base::Epilogue;
  using typename Base::Place;
  using typename Base::Target;
  using typename Base::Use;
  using Base::base_, Base::count_, Base::finished, Base::kChunks, Base::kColumns, Base::kEights,
      Base::kPhases, Base::kStageStart, Base::kTileBytes, Base::o_, Base::place_of, Base::staged,
      Base::use_of;

  static constexpr bool kSaved = Expression::kSaved;
  // Windows are read in rows of kSide, each of them 64 channels.
  static constexpr int kSide = 8 + ceil_div(C::kPoolS, C::kPhasesW) - 1;
  static constexpr int kHigh = C::kBoxH + ceil_div(C::kPoolR, C::kPhasesH) - 1;
  static constexpr int kWindowBytes = C::kGathers ? kSide * kHigh * kRowBytes : 0;

  static_assert(C::kStaged == 1 && C::kStagedBytes >= kTileBytes + kWindowBytes,
                "room for the windows and one image");
  static_assert(!C::kUnshifted && (C::kGathers || !Expression::kResidual),
                "of a phase one image comes, and one leaves");

 public:
  using Maps = ResidentPhasesMaps<kPhases>;

 private:
  const Maps& maps_;

 public:
  static __device__ __forceinline__ void run(const Maps& maps, const typename Base::Arguments& a) {
    Base::template run_as<ResidentPhasesStaged>(maps, a);
  }

  __device__ __forceinline__ ResidentPhasesStaged(const Maps& maps,
                                                  const typename Base::Arguments& a, uint32_t base)
      : Base(maps, a, base), maps_(maps) {}

  /// Brings what each phase of a group's tiles reads, or the word that its room is free, and takes
  /// away what the group has made.
  __device__ __forceinline__ void carry(int group) const {
    wait_for_predecessor();
    uint32_t parity = 0;
    if (group < count_) bring(group, place_of(group), 0);
    for (int i = group; i < count_; i += C::kGroups) {
      const Place place = place_of(i);
      for (int phase = 0; phase < kPhases; ++phase, parity ^= 1) {
        wait(finished(group), parity);
        store_box(maps_.y[phase], tile(group), o_, place.w, place.h, place.n);
        wait_for_stores();
        if (phase + 1 < kPhases) {
          bring(group, place, phase + 1);
        } else if (i + C::kGroups < count_) {
          bring(group, place_of(i + C::kGroups), 0);
        }
      }
    }
  }

  __device__ __forceinline__ void consume(int group) const {
    Epilogue e;
    Base::begin(e);
    uint32_t parity = 0;
#pragma unroll 1
    for (int i = group; i < count_; i += C::kGroups) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const Use use = use_of(i, chunk);
        wait(Base::full(use.slot), use.parity);
      }
      make<0>(group, i, parity, e);
    }
    Base::template leave_sums<0>(group, e);
  }

 private:
  __device__ __forceinline__ uint32_t tile(int group) const {
    return base_ + kStageStart + group * Base::kStagedRow;
  }
  __device__ __forceinline__ uint32_t windows(int group) const { return tile(group) + kTileBytes; }

  __device__ __forceinline__ void bring(int group, Place place, int phase) const {
    const bool first = C::kGathers && phase == 0;
    const int bytes = (kSaved ? kTileBytes : 0) + (first ? kWindowBytes : 0);
    if (bytes == 0) {
      arrive(staged(group));
      return;
    }
    arrive_expecting(staged(group), bytes);
    if (first) {
      load_box(maps_.windows, windows(group), staged(group), o_,
               place.w - Base::before(C::kPoolS, C::kPoolPadW, C::kPhasesW),
               place.h - Base::before(C::kPoolR, C::kPoolPadH, C::kPhasesH), place.n);
    }
    if constexpr (kSaved) {
      load_box(maps_.saved[phase], tile(group), staged(group), o_, place.w, place.h, place.n);
    }
  }

  /// The phases of a tile, from one on.
  template <int phase>
  __device__ __forceinline__ void make(int group, int i, uint32_t& parity, Epilogue& e) const {
    if constexpr (phase < kPhases) {
      float sums[kColumns / 2];
      Base::template start<phase>(i, sums);
      wait_for_products<0>();
      fence_registers(sums);
      if (phase + 1 == kPhases && threadIdx.x % 32 == 0) {
        for (int chunk = 0; chunk < kChunks; ++chunk) arrive(Base::empty(use_of(i, chunk).slot));
      }
      wait(staged(group), parity);
      parity ^= 1;
      finish<phase>(group, Base::target_of(place_of(i), phase), sums, e);
      publish_writes();
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(finished(group));
      make<phase + 1>(group, i, parity, e);
    }
  }

  template <int phase>
  __device__ __forceinline__ void finish(int group, const Target& target,
                                         const float (&sums)[kColumns / 2], Epilogue& e) const {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int column = threadIdx.x % 4 * 2 + which;
#pragma unroll
      for (int row = 0; row < kEights; ++row) {
        const uint32_t at = tile(group) + pair_place(row * 8 + column);
        const float2 v = pair_at<C::kScale>(sums, row, which, e.scale, e.bias);
        float2 more = {}, saved = {};
        if constexpr (C::kGathers) more = gathered<phase>(group, row, column);
        if constexpr (kSaved) saved = pair_in<T>(load_word(at));
        store_word(at, word_of<T>(evaluate<Expression>(v, more, e.offset, saved)));
        if (row < target.rows && which < target.columns) e.sums.take(v, more, e.offset, saved);
      }
    }
  }

  /// The gradient of an average pool at a pixel of a phase.
  template <int phase>
  __device__ __forceinline__ float2 gathered(int group, int row, int column) const {
    constexpr PhaseTaps kDown =
        phase_taps(C::kPoolR, C::kPoolPadH, C::kPhasesH, phase / C::kPhasesW);
    constexpr PhaseTaps kAcross =
        phase_taps(C::kPoolS, C::kPoolPadW, C::kPhasesW, phase % C::kPhasesW);
    constexpr int kFirstRow = Base::before(C::kPoolR, C::kPoolPadH, C::kPhasesH) - kDown.pad;
    constexpr int kFirstColumn = Base::before(C::kPoolS, C::kPoolPadW, C::kPhasesW) - kAcross.pad;
    float2 sum = {};
#pragma unroll
    for (int down = 0; down < kDown.count; ++down) {
#pragma unroll
      for (int across = 0; across < kAcross.count; ++across) {
        const int pixel = (row + kFirstRow + down) * kSide + column + kFirstColumn + across;
        const float2 two = pair_in<T>(load_word(windows(group) + pair_place(pixel)));
        sum.x += two.x, sum.y += two.y;
      }
    }
    return {sum.x * C::kPoolScale, sum.y * C::kPoolScale};
  }
};

}  // namespace plantune
