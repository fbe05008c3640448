// The gradient of a convolution's weight on Hopper, with tensor copies and warpgroup products:
//
//   sums[split][r, s][o][c] = sum over pixels of dy[pixel][o] * x[pixel at tap (r, s)][c]
//
// dy and x are NHWC, of T (2 bytes); the sums are float. `wgrad_sum.h` adds the splits, in an order
// that depends on the configuration alone; where there is only one, it is stored here, as a Result.
//
// A block takes kTileM by kTileN channels of all taps, and every kSplitK-th part of the pixels, box
// by box: one warpgroup copies, the others multiply. Both operands are read along the pixels. Each
// tap reads the same copy of x, at an offset of its own; a warpgroup has the taps of one row, and
// reads 64 channels of dy into registers once for them.

#pragma once

#include "cuda/hopper_wgrad_tile.h"
#include "cuda/launch.h"

namespace plantune {

template <class C>
class HopperWgrad : HopperWgradTile<C> {
  using Tile = HopperWgradTile<C>;
  using T = typename C::T;
  using Result = typename C::Result;
  using Tile::begin_, Tile::c_, Tile::empty, Tile::end_, Tile::full, Tile::image_place,
      Tile::init_barriers, Tile::kBoxesH, Tile::kBoxesW, Tile::kChunk, Tile::kCopyBytes,
      Tile::kGroups, Tile::kImageStart, Tile::kPartBytes, Tile::kPartsC, Tile::kPartsO,
      Tile::kPixels, Tile::kResultBytes, Tile::kWarpgroup, Tile::maps_, Tile::o_, Tile::reads,
      Tile::stage;

  static constexpr int kSteps = kPixels / 16;
  static constexpr int kSums = C::kTileN / 2;
  // What is left of the registers when the warpgroup that copies keeps few.
  static constexpr int kCopyRegisters = 32;
  static constexpr int kRegisters = smaller((512 - kCopyRegisters) / kGroups / 8 * 8, 232);

  using Tile::Tile;

 public:
  using Tile::kSharedBytes, Tile::kThreads;

  static __device__ __forceinline__ void run(const WgradMaps& maps, float* sums, Result* dw) {
    extern __shared__ uint8_t memory[];
    release_successor();
    // A swizzled row's place in the pattern is a part of its address.
    const uint32_t start = shared_address(memory);
    const HopperWgrad wgrad(maps, (start + kGroupBytes - 1) / kGroupBytes * kGroupBytes);
    wgrad.init_barriers();
    const int group = threadIdx.x / kWarpgroup;
    if (group == kGroups) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyRegisters));
      if (threadIdx.x == kGroups * kWarpgroup) wgrad.copy();
    } else if (group == 0) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
      wgrad.template consume<0>(sums, dw);
    } else if (group == 1) {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
      if constexpr (kGroups > 1) wgrad.template consume<1>(sums, dw);
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
      if constexpr (kGroups > 2) wgrad.template consume<2>(sums, dw);
    }
  }

 private:
  // The warpgroup that copies.

  __device__ __forceinline__ void copy() const {
    wait_for_predecessor();
    Slot<C::kStages> slot;
    for (int i = begin_; i < end_; ++i) {
      const int w = i % kBoxesW * C::kBoxW, h = i / kBoxesW % kBoxesH * C::kBoxH;
      const int n = i / (kBoxesW * kBoxesH) * C::kBoxN;
      const uint32_t to = stage(slot.stage), barrier = full(slot.stage);
      wait(empty(slot.stage), slot.parity ^ 1);
      arrive_expecting(barrier, kCopyBytes);
#pragma unroll
      for (int part = 0; part < kPartsO; ++part) {
        Tile::load(maps_.dy, to + part * kResultBytes, barrier, o_ + part * kChunk, w, h, n);
      }
#pragma unroll
      for (int part = 0; part < kPartsC; ++part) {
        this->copy_image(to + kImageStart + part * kPartBytes, barrier, c_ + part * kChunk, w, h, n);
      }
      slot.advance();
    }
  }

  // The others.

  template <int kGroup>
  __device__ __forceinline__ void consume(float* parts, Result* dw) const {
    constexpr int kRow = kGroup / kPartsO, kPart = kGroup % kPartsO;
    float sums[C::kS][kSums];
#pragma unroll
    for (int s = 0; s < C::kS; ++s) {
#pragma unroll
      for (float& sum : sums[s]) sum = 0.f;
    }
    Slot<C::kStages> slot;
    for (int i = begin_; i < end_; ++i) {
      wait(full(slot.stage), slot.parity);
      multiply_box<kRow>(stage(slot.stage) + kPart * kResultBytes,
                         stage(slot.stage) + kImageStart, sums);
      if (threadIdx.x % kWarpgroup == 0) arrive(empty(slot.stage));
      slot.advance();
    }
    wait_for_predecessor();
#pragma unroll
    for (int s = 0; s < C::kS; ++s) {
      this->store(parts, dw, kRow * C::kS + s, o_ + kPart * kChunk, sums[s]);
    }
  }

  template <int kRow>
  __device__ __forceinline__ void multiply_box(uint32_t result, uint32_t image,
                                               float (&sums)[C::kS][kSums]) const {
    uint32_t rows[2][4];
    load_rows(result, 0, rows[0]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int s = 0; s < C::kS; ++s) fence_registers(sums[s]);
      fence_products();
#pragma unroll
      for (int s = 0; s < C::kS; ++s) {
        if (!reads(kRow, s, 2 * step)) continue;
        const int place = image_place(kRow, s, 2 * step);
        const uint64_t columns = transposed_descriptor(
            image + place, kPartBytes, image_place(kRow, s, 2 * step + 1) - place);
        RegisterProduct<T, C::kTileN>::start(rows[step % 2], columns, sums[s]);
      }
      commit_products();
#pragma unroll
      for (int s = 0; s < C::kS; ++s) fence_registers(sums[s]);
      if (step + 1 < kSteps) {
        wait_for_products<1>();
        load_rows(result, step + 1, rows[(step + 1) % 2]);
      }
    }
    wait_for_products<0>();
#pragma unroll
    for (int s = 0; s < C::kS; ++s) fence_registers(sums[s]);
  }

  /// A warp's 16 channels of 16 pixels, as products take them from registers.
  static __device__ __forceinline__ void load_rows(uint32_t result, int step,
                                                   uint32_t (&rows)[4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const int pixel = lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
    const uint32_t at = result + pixel * kRowBytes + (piece ^ lane % 8) * 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(rows[0]), "=r"(rows[1]), "=r"(rows[2]), "=r"(rows[3])
                 : "r"(at + step * 16 * kRowBytes)
                 : "memory");
  }
};

}  // namespace plantune
