// The gradient of a convolution's weight of float32 on Hopper, by warpgroup products of bfloat16:
//
//   sums[split][r, s][o][c] = sum over pixels of dy[pixel][o] * x[pixel at tap (r, s)][c]
//
// dy, x and the sums are float, the rest is as in `hopper_wgrad.h`. Every float becomes kPlanes
// planes of bfloat16, see `planes.h`: with three products are as exact as float32, with two as
// tf32 is and more. dy is split by the threads that multiply, in registers; x by three warps, into
// shared memory, once for all taps.
//
// With three planes the sums of 16 pixels leave the tensor cores, which truncate.

#pragma once

#include "cuda/hopper_float_wgrad_tile.h"
#include "cuda/launch.h"
#include "cuda/planes.h"

namespace plantune {

template <class C>
class HopperFloatWgrad : HopperFloatWgradTile<C> {
  using Tile = HopperFloatWgradTile<C>;
  using Tile::arrive_as_warp, Tile::base_, Tile::begin_, Tile::c_, Tile::empty, Tile::end_, Tile::full,
      Tile::image_place, Tile::init_barriers, Tile::kBoxesH, Tile::kBoxesW, Tile::kChunk,
      Tile::kCopyBytes, Tile::kGroups, Tile::kHalf, Tile::kImageStart, Tile::kPartBytes,
      Tile::kPartsC, Tile::kPartsO, Tile::kPixels, Tile::kPlaneBytes, Tile::kResultBytes,
      Tile::kResultHalf, Tile::kSplitters, Tile::kTapsOfGroup, Tile::kWarpgroup, Tile::maps_, Tile::o_, Tile::planes,
      Tile::planes_empty, Tile::planes_full, Tile::reads, Tile::stage;

  static constexpr int kPlanes = C::kPlanes;
  static constexpr bool kLeaves = kPlanes > 2;
  static constexpr int kSteps = kPixels / 16;
  static constexpr int kSums = C::kTileN / 2;
  // What is left of the block's registers, eights of each thread, when the warpgroup that copies and
  // splits keeps few.
  static constexpr int kOtherRegisters = 40;
  static constexpr int kLaunched = 65536 / Tile::kThreads / 8 * 8 * (kGroups + 1);
  static constexpr int kRegisters = smaller((kLaunched - kOtherRegisters) / kGroups / 8 * 8, 232);

  using Tile::Tile;

  struct Factors {
    uint32_t of[kPlanes][4];
  };

 public:
  using Tile::kSharedBytes, Tile::kThreads;

  static __device__ __forceinline__ void run(const WgradMaps& maps, float* sums, float* dw) {
    extern __shared__ uint8_t memory[];
    release_successor();
    // A swizzled row's place in the pattern is a part of its address.
    const uint32_t start = shared_address(memory);
    const HopperFloatWgrad wgrad(maps, (start + kGroupBytes - 1) / kGroupBytes * kGroupBytes);
    wgrad.init_barriers();
    const int group = threadIdx.x / kWarpgroup;
    if (group == kGroups) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kOtherRegisters));
      const int thread = threadIdx.x % kWarpgroup;
      if (thread < kSplitters) wgrad.split_images(thread);
      if (thread == kSplitters) wgrad.copy();
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
  // The thread that copies.

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
      for (int half = 0; half < 2 * kPartsO; ++half) {
        Tile::load(maps_.dy, to + half * kResultHalf, barrier, o_ + half * kHalf, w, h, n);
      }
#pragma unroll
      for (int half = 0; half < 2 * kPartsC; ++half) {
        const uint32_t image = to + kImageStart + half * kPartBytes;
        this->copy_image(image, barrier, c_ + half * kHalf, w, h, n);
      }
      slot.advance();
    }
  }

  // The warps that split x.

  __device__ __forceinline__ void split_images(int thread) const {
    Slot<C::kStages> slot;
    Slot<C::kPlaneStages> made;
    for (int i = begin_; i < end_; ++i) {
      wait(full(slot.stage), slot.parity);
      wait(planes_empty(made.stage), made.parity ^ 1);
#pragma unroll
      for (int part = 0; part < kPartsC; ++part) {
        split_part(stage(slot.stage) + kImageStart + part * 2 * kPartBytes,
                   planes(made.stage) + part * kPartBytes, thread);
      }
      publish_writes();
      arrive_as_warp(planes_full(made.stage));
      arrive_as_warp(empty(slot.stage));
      slot.advance();
      made.advance();
    }
  }

  /// 64 channels of each row: a thread has 8 of them, 16 bytes of each plane.
  static __device__ __forceinline__ void split_part(uint32_t from, uint32_t to, int thread) {
    constexpr int kRows = kPartBytes / kRowBytes;
    const int eight = thread % 8;
    const uint32_t half = from + eight / 4 * kPartBytes;
#pragma unroll 1
    for (int row = thread / 8; row < kRows; row += kSplitters / 8) {
      const int piece = eight % 4 * 2, place = row % 8;
      const float4 low = load_four(half + row * kRowBytes + (piece ^ place) * 16);
      const float4 high = load_four(half + row * kRowBytes + ((piece + 1) ^ place) * 16);
      uint32_t words[4][kPlanes];
      split<__nv_bfloat16>({low.x, low.y}, words[0]);
      split<__nv_bfloat16>({low.z, low.w}, words[1]);
      split<__nv_bfloat16>({high.x, high.y}, words[2]);
      split<__nv_bfloat16>({high.z, high.w}, words[3]);
      const uint32_t at = to + row * kRowBytes + (eight ^ place) * 16;
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        store_words(at + plane * kPlaneBytes,
                    {words[0][plane], words[1][plane], words[2][plane], words[3][plane]});
      }
    }
  }

  // The others.

  template <int kGroup>
  __device__ __forceinline__ void consume(float* parts, float* dw) const {
    constexpr int kFirst = kGroup / kPartsO * kTapsOfGroup, kPart = kGroup % kPartsO;
    constexpr int kTaps = smaller(kTapsOfGroup, C::kR * C::kS - kFirst);
    float sums[kTaps][kSums];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
      for (float& sum : sums[tap]) sum = 0.f;
    }
    Slot<C::kStages> slot;
    Slot<C::kPlaneStages> made;
    for (int left = end_ - begin_; left > 0; --left) {
      wait(full(slot.stage), slot.parity);
      wait(planes_full(made.stage), made.parity);
      const uint32_t result = stage(slot.stage) + kPart * kResultBytes;
      if constexpr (kLeaves) {
        multiply_and_leave<kFirst>(result, planes(made.stage), sums);
      } else {
        multiply_box<kFirst>(result, planes(made.stage), sums);
      }
      arrive_as_warp(empty(slot.stage));
      arrive_as_warp(planes_empty(made.stage));
      slot.advance();
      made.advance();
    }
    wait_for_predecessor();
    const HopperFloatWgrad again(maps_, base_, block_again());
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      again.store(parts, dw, kFirst + tap, again.o_ + kPart * kChunk, sums[tap]);
    }
  }

  /// The block's number, so that what follows from it takes no registers meanwhile.
  static __device__ __forceinline__ int block_again() {
    int block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return block;
  }

  /// Whether a tap reads more than padding at a step.
  static __device__ __forceinline__ bool reads_at(int tap, int step) {
    return reads(tap / C::kS, tap % C::kS, 2 * step);
  }

  /// Sums stay where they are made.
  template <int kFirst, int kTaps>
  static __device__ __forceinline__ void multiply_box(uint32_t result, uint32_t image,
                                                      float (&sums)[kTaps][kSums]) {
    Factors even, odd;
    read_factors(result, 0, even);
#pragma unroll 1
    for (int step = 0; step < kSteps; step += 2) {
      multiply_step<kFirst>(even, image, step, sums);
      wait_for_products<1>();
      read_factors(result, step + 1, odd);
      multiply_step<kFirst>(odd, image, step + 1, sums);
      if (step + 2 < kSteps) {
        wait_for_products<1>();
        read_factors(result, step + 2, even);
      }
    }
    wait_for_products<0>();
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) fence_registers(sums[tap]);
    keep(even);
    keep(odd);
  }

  template <int kFirst, int kTaps>
  static __device__ __forceinline__ void multiply_step(const Factors& factors, uint32_t image,
                                                       int step, float (&sums)[kTaps][kSums]) {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) fence_registers(sums[tap]);
    fence_products();
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      if (reads_at(kFirst + tap, step)) start(factors, image, kFirst + tap, step, true, sums[tap]);
    }
    commit_products();
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) fence_registers(sums[tap]);
  }

  /// Sums of 16 pixels and one tap are added to others as floats.
  template <int kFirst, int kTaps>
  static __device__ __forceinline__ void multiply_and_leave(uint32_t result, uint32_t image,
                                                            float (&sums)[kTaps][kSums]) {
    float partial[kSums] = {};
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      Factors factors;
      read_factors(result, step, factors);
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        if (!reads_at(kFirst + tap, step)) continue;
        fence_registers(partial);
        fence_products();
        start(factors, image, kFirst + tap, step, false, partial);
        commit_products();
        fence_registers(partial);
        wait_for_products<0>();
        fence_registers(partial);
#pragma unroll
        for (int j = 0; j < kSums; ++j) sums[tap][j] += partial[j];
      }
      keep(factors);
    }
  }

  /// Starts the products of 16 pixels and a tap, small ones first; the first begins a sum, or adds.
  static __device__ __forceinline__ void start(const Factors& factors, uint32_t image, int tap,
                                               int step, bool adds, float (&sums)[kSums]) {
    const int r = tap / C::kS, s = tap % C::kS, place = image_place(r, s, 2 * step);
    const uint64_t columns = transposed_descriptor(image + place, kPartBytes,
                                                   image_place(r, s, 2 * step + 1) - place);
#pragma unroll
    for (int both = kPlanes - 1; both >= 0; --both) {
#pragma unroll
      for (int plane = 0; plane <= both; ++plane) {
        PlaneProduct<__nv_bfloat16, C::kTileN>::start(
            factors.of[plane], columns + (both - plane) * kPlaneBytes / 16, adds, sums);
        adds = true;
      }
    }
  }

  /// Products under way read them.
  static __device__ __forceinline__ void keep(Factors& factors) {
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) fence_registers(factors.of[plane]);
  }

  /// Two channels of two pairs of pixels, as products take them from registers.
  static __device__ __forceinline__ void read_factors(uint32_t result, int step,
                                                      Factors& factors) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kWarpgroup / 32;
    const uint32_t half = result + warp / 2 * kResultHalf + step * 16 * kRowBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pixel = lane % 4 * 2 + i / 2 * 8, channel = warp % 2 * 16 + lane / 4 + i % 2 * 8;
      uint32_t words[kPlanes];
      split<__nv_bfloat16>({number_at(half, pixel, channel), number_at(half, pixel + 1, channel)},
                           words);
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) factors.of[plane][i] = words[plane];
    }
  }

  static __device__ __forceinline__ float number_at(uint32_t half, int pixel, int channel) {
    const int piece = (channel / 4) ^ (pixel % 8);
    return __uint_as_float(load_word(half + pixel * kRowBytes + piece * 16 + channel % 4 * 4));
  }
};

}  // namespace plantune
