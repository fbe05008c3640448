// The gradient of an image under a convolution with a stride, whose weights for 64 channels stay in
// shared memory: `resident_conv.h`, but that a tile is a box of dy, from which the pixels of all
// phases are made one phase after the other. With kGathers the residual is the gradient of an
// average pool with the same stride and result's size, whose own gradient is read.

#pragma once

#include "cuda/resident_conv.h"

namespace plantune {

template <class C>
class ResidentPhases : public ResidentConv<C> {
 protected:
  using Base = ResidentConv<C>;
  using T = typename Base::T;
  using Two = typename Base::Two;
  using typename Base::Epilogue;
  using typename Base::Place;
  using typename Base::Target;
  using typename Base::Use;
  using Base::a_, Base::before, Base::begin, Base::box, Base::count_, Base::empty, Base::full,
      Base::kChunks, Base::kColumns, Base::kCopyW, Base::kEights, Base::kPhases, Base::kTapBytes,
      Base::o_, Base::place_of, Base::use_of, Base::weight;

  static_assert(C::kSlots >= kChunks, "a tile's phases read all channels");

 public:
  using Base::Base;

  static __device__ __forceinline__ void run(const ResidentMaps& maps,
                                             const typename Base::Arguments& a) {
    Base::template run_as<ResidentPhases>(maps, a);
  }

  __device__ __forceinline__ void consume(int group) const {
    Epilogue e;
    begin(e);
#pragma unroll 1
    for (int i = group; i < count_; i += C::kGroups) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const Use use = use_of(i, chunk);
        wait(full(use.slot), use.parity);
      }
      make_phases<0>(i, place_of(i), e);
    }
    Base::template leave_sums<0>(group, e);
  }

 protected:
  /// Those from a phase on.
  template <int phase>
  __device__ __forceinline__ void make_phases(int i, Place place, Epilogue& e) const {
    if constexpr (phase < kPhases) {
      const Target target = Base::target_of(place, phase);
      float sums[kColumns / 2];
      start<phase>(i, sums);
      Base::load_images(target, e);
      Windows<phase> windows(a_.residual, place, o_);
      wait_for_products<0>();
      fence_registers(sums);
      if (phase + 1 == kPhases && threadIdx.x % 32 == 0) {
        for (int chunk = 0; chunk < kChunks; ++chunk) arrive(empty(use_of(i, chunk).slot));
      }
      Base::finish_tile(target, sums, e, [&](int row, int which) {
        if constexpr (C::kGathers) return windows.at(row, which);
        if constexpr (!C::kGathers) return Pair<T>::floats(e.residual[row][which]);
      });
      make_phases<phase + 1>(i, place, e);
    }
  }

  static constexpr PhaseTaps rows_of(int phase) {
    return phase_taps(C::kR, C::kPadH, C::kPhasesH, phase / C::kPhasesW);
  }
  static constexpr PhaseTaps columns_of(int phase) {
    return phase_taps(C::kS, C::kPadW, C::kPhasesW, phase % C::kPhasesW);
  }

  /// Starts the products of all taps of a phase.
  template <int phase>
  __device__ __forceinline__ void start(int i, float (&sums)[kColumns / 2]) const {
    constexpr PhaseTaps rows = rows_of(phase), columns = columns_of(phase);
    static_assert(rows.count > 0 && columns.count > 0, "each phase has taps");
    constexpr int kBeforeH = before(C::kR, C::kPadH, C::kPhasesH) - rows.pad;
    constexpr int kBeforeW = before(C::kS, C::kPadW, C::kPhasesW) - columns.pad;
    // Not known to be the same in all tiles, lest all descriptors be kept in registers.
    uint32_t first = weight(0, 0);
    asm volatile("" : "+r"(first));
    fence_registers(sums);
    fence_products();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const uint32_t pixels = box(use_of(i, chunk).slot);
#pragma unroll
      for (int r = 0; r < rows.count; ++r) {
#pragma unroll
        for (int s = 0; s < columns.count; ++s) {
          const int tap = (rows.first + r * C::kPhasesH) * C::kS + columns.first + s * C::kPhasesW;
          const int offset = ((r + kBeforeH) * kCopyW + s + kBeforeW) * kRowBytes;
          const uint64_t b = matrix_descriptor(pixels + offset, kCopyW * kRowBytes);
          const uint64_t a = matrix_descriptor(
              first + (chunk * Base::kTaps + tap) * kTapBytes, kGroupBytes);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            multiply_step<T, kColumns>(a + 2 * k, b + 2 * k, chunk + r + s + k > 0, sums);
          }
        }
      }
    }
    commit_products();
    fence_registers(sums);
  }

  /// The windows of a pool that the thread's pixels of a phase are in.
  template <int phase>
  struct Windows {
    static constexpr PhaseTaps kDown =
        phase_taps(C::kPoolR, C::kPoolPadH, C::kPhasesH, phase / C::kPhasesW);
    static constexpr PhaseTaps kAcross =
        phase_taps(C::kPoolS, C::kPoolPadW, C::kPhasesW, phase % C::kPhasesW);
    static constexpr int kRows = C::kGathers ? kEights + kDown.count - 1 : 1;
    static constexpr int kSide = C::kGathers ? 2 + kAcross.count - 1 : 1;
    Two values[kRows > 0 ? kRows : 1][kSide > 0 ? kSide : 1];

    __device__ __forceinline__ Windows(const T* from, Place place, int o) {
      if constexpr (C::kGathers) {
        const int channel = o + pair_of(threadIdx.x);
        const int h = place.h - kDown.pad, w = place.w + threadIdx.x % 4 * 2 - kAcross.pad;
        const long long first = (((long long)(place.n) * C::kH + h) * C::kW + w) * C::kO + channel;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
#pragma unroll
          for (int column = 0; column < kSide; ++column) {
            const bool there = unsigned(h + row) < unsigned(C::kH) &&
                               unsigned(w + column) < unsigned(C::kW) && channel < C::kO;
            const int further = (row * C::kW + column) * C::kO;
            values[row][column] = Pair<T>::of(0.f, 0.f);
            if (there) values[row][column] = *reinterpret_cast<const Two*>(from + first + further);
          }
        }
      }
    }

    /// What the pool's gradient is at a pixel.
    __device__ __forceinline__ float2 at(int row, int which) const {
      float2 sum = {};
#pragma unroll
      for (int down = 0; down < kDown.count; ++down) {
#pragma unroll
        for (int across = 0; across < kAcross.count; ++across) {
          const float2 two = Pair<T>::floats(values[row + down][which + across]);
          sum.x += two.x, sum.y += two.y;
        }
      }
      return {sum.x * C::kPoolScale, sum.y * C::kPoolScale};
    }
  };
};

}  // namespace plantune
