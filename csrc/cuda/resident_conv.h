// Convolution whose weights for 64 output channels stay in shared memory:
//
//   y = Expression(conv(x, w) * scale + bias, residual, offset, saved)
//
// x, y and what else is an image are NHWC, w is (O, R * S, C), all of T (2 bytes); scale and bias
// are float. `unshifted` takes the value of the expression Unshifted. With kFlips the last tap of w
// comes first: the gradient of an image. Of Sums, `hopper_sums.h`, each warpgroup leaves parts.
// The map of w says how 16 rows become 8 even and 8 odd ones, which is the order of hopper_pairs.h.
// It writes `=`, sums in float in a fixed order, and rounds once. A zero of the padding multiplies
// like any other value.
//
// A block takes tiles of 8 x kBoxH pixels, one after the other, until none is left. Warpgroups take
// turns at the tiles; one warp copies boxes of x with their margin, 64 channels at a time, into a
// ring of kSlots for each warpgroup. Channels are the rows of the products and pixels their
// columns, so that one pass over the weights serves all pixels of a tile, and each tap reads the
// box at an offset of its own. While one warpgroup writes its tile, the others multiply.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/hopper_async.h"
#include "cuda/hopper_mma.h"
#include "cuda/hopper_pairs.h"
#include "cuda/hopper_sums.h"
#include "cuda/launch.h"
#include "cuda/parameter.h"
#include "cuda/phases.h"
#include "cuda/vector.h"

namespace plantune {

struct ResidentMaps {
  TensorMap x, w;
};

/// The constants of C are a problem, a configuration, and which parts the epilogue has.
template <class C>
class ResidentConv {
 protected:
  using T = typename C::T;
  using Two = typename Pair<T>::Type;
  using Expression = typename C::Expression;

  static constexpr int kWarpgroup = 128, kConsumers = C::kGroups * kWarpgroup;
  static constexpr int kTileO = 64, kBoxW = 8, kEights = C::kBoxH, kColumns = 8 * C::kBoxH;
  static constexpr int kChunk = 64, kChunks = ceil_div(C::kC, kChunk);
  static constexpr int kTaps = C::kR * C::kS;
  static constexpr int kPhases = C::kPhasesH * C::kPhasesW;
  // With a stride the pixels of a slot come in boxes: taps that are so far apart read the same.
  static constexpr int kCopyW = kBoxW + ceil_div(C::kS, C::kPhasesW * C::kStrideW) - 1;
  static constexpr int kCopyH = C::kBoxH + ceil_div(C::kR, C::kPhasesH * C::kStrideH) - 1;
  static constexpr int kCopyBytes = kCopyW * kCopyH * kRowBytes;
  static constexpr int kBoxBytes = ceil_div(kCopyBytes, kGroupBytes) * kGroupBytes;
  static constexpr int kBoxes = C::kStrideH * C::kStrideW;
  static constexpr int kSlotBytes = kBoxes * kBoxBytes;
  static constexpr int kTapBytes = kTileO * kRowBytes;
  static constexpr int kWeightBytes = kChunks * kTaps * kTapBytes;
  static constexpr int kSlotStart = kWeightBytes;
  static constexpr int kSlots = C::kGroups * C::kSlots;
  // What leaves, and what the epilogue reads: kStaged tiles of each warpgroup or more, see
  // resident_staged.h and resident_phases_staged.h.
  static constexpr int kTileBytes = kColumns * kRowBytes;
  static constexpr int kStageStart = kSlotStart + kSlots * kSlotBytes;
  static constexpr int kStagedRow = ceil_div(C::kStagedBytes, kGroupBytes) * kGroupBytes;
  static constexpr int kBarrierStart =
      kStageStart + (C::kGroups - 1) * kStagedRow + C::kStagedBytes;
  static constexpr int kEnd =
      kBarrierStart + 8 * (2 * kSlots + 1 + (C::kStaged > 0 ? 2 * C::kGroups : 0));

  static constexpr int kTilesW = ceil_div(ceil_div(C::kQ, C::kPhasesW), kBoxW);
  static constexpr int kTilesH = ceil_div(ceil_div(C::kP, C::kPhasesH), C::kBoxH);
  static constexpr int kTiles = C::kN * kTilesH * kTilesW;
  static constexpr int kTilesO = ceil_div(C::kO, kTileO);

  static_assert(sizeof(T) == 2, "a swizzled row holds 64 elements of 2 bytes");
  static_assert(kColumns <= 256, "columns of a product");
  static_assert(C::kC % 8 == 0 && C::kO % 8 == 0, "pixels start at 16 bytes");

 public:
  static constexpr int kParts = C::kBlocks / kTilesO * C::kGroups;  // of each channel
  using Parts = SumParts<T, typename C::Sums, kParts, kTilesO * 4, C::kO>;
  using Maps = ResidentMaps;
  /// After the consumers come a warp that copies, and with kStaged one for each of their groups.
  static constexpr int kThreads = kConsumers + 32 * (C::kStaged > 0 ? 1 + C::kGroups : 1);
  static constexpr int kSharedBytes = kEnd + kGroupBytes;

  struct Arguments {
    const float* scale;
    const float* bias;
    const T *residual, *saved;
    T *y, *unshifted;
    Parameter offset;
    float* parts;
  };

  static __device__ __forceinline__ void run(const ResidentMaps& maps, const Arguments& a) {
    run_as<ResidentConv>(maps, a);
  }

 protected:
  /// Runs a kernel that consumes in its own way.
  template <class Kernel>
  static __device__ __forceinline__ void run_as(const typename Kernel::Maps& maps,
                                                const Arguments& a) {
    extern __shared__ uint8_t memory[];
    release_successor();
    const uint32_t start = shared_address(memory);
    const Kernel conv(maps, a, (start + kGroupBytes - 1) / kGroupBytes * kGroupBytes);
    conv.init_barriers();
    const int warp = threadIdx.x / 32;
    if (warp < kConsumers / 32) {
      conv.consume(warp / 4);
    } else if (threadIdx.x % 32 == 0) {
      if (warp == kConsumers / 32) {
        conv.copy();
      } else {
        conv.carry(warp - kConsumers / 32 - 1);
      }
    }
  }

  /// What the warp of a group does beside it: see resident_staged.h.
  __device__ __forceinline__ void carry(int) const {}

  const ResidentMaps& maps_;
  const Arguments& a_;
  const uint32_t base_;
  int o_, first_, blocks_, count_;  // of the tiles first_ + i * blocks_ the block takes count_

  __device__ __forceinline__ ResidentConv(const ResidentMaps& maps, const Arguments& a,
                                          uint32_t base)
      : maps_(maps), a_(a), base_(base) {
    o_ = blockIdx.x % kTilesO * kTileO;
    first_ = blockIdx.x / kTilesO;
    blocks_ = C::kBlocks / kTilesO;
    count_ = (kTiles - first_ + blocks_ - 1) / blocks_;
  }

  struct Place {
    int n, h, w;
  };

  __device__ __forceinline__ Place place_of(int i) const {
    const int tile = first_ + i * blocks_, row = tile / kTilesW;
    return {row / kTilesH, row % kTilesH * C::kBoxH, tile % kTilesW * kBoxW};
  }

  __device__ __forceinline__ uint32_t weight(int chunk, int tap) const {
    return base_ + (chunk * kTaps + tap) * kTapBytes;
  }
  __device__ __forceinline__ uint32_t box(int slot) const {
    return base_ + kSlotStart + slot * kSlotBytes;
  }
  __device__ __forceinline__ uint32_t weights_full() const { return base_ + kBarrierStart; }
  __device__ __forceinline__ uint32_t full(int slot) const { return weights_full() + 8 + 8 * slot; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return full(kSlots + slot); }
  __device__ __forceinline__ uint32_t staged(int group) const { return full(2 * kSlots + group); }
  __device__ __forceinline__ uint32_t finished(int group) const {
    return staged(C::kGroups + group);
  }

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == kConsumers) {
      prefetch(maps_.w);
      prefetch(maps_.x);
      init_barrier(weights_full(), 1);
      for (int i = 0; i < kSlots; ++i) {
        init_barrier(full(i), 1);
        init_barrier(empty(i), kWarpgroup / 32);  // a warp arrives when it has read a slot
      }
      for (int i = 0; C::kStaged > 0 && i < C::kGroups; ++i) {
        init_barrier(staged(i), 1);
        init_barrier(finished(i), kWarpgroup / 32);
      }
      publish_barriers();
    }
    __syncthreads();
  }

  // Phase 1: copies.

  /// The slot of a tile's box, and the parity of the ring's round.
  struct Use {
    int slot;
    uint32_t parity;
  };

  static __device__ __forceinline__ Use use_of(int i, int chunk) {
    const int turn = i / C::kGroups * kChunks + chunk;
    return {i % C::kGroups * C::kSlots + turn % C::kSlots, uint32_t(turn / C::kSlots % 2)};
  }

  /// Weights are written by kernels that release no successor before they end.
  __device__ __forceinline__ void copy() const {
    arrive_expecting(weights_full(), kWeightBytes);
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      for (int tap = 0; tap < kTaps; ++tap) {
        load_box(maps_.w, weight(chunk, tap), weights_full(), chunk * kChunk,
                 C::kFlips ? kTaps - 1 - tap : tap, 0, 0, o_ / 16);
      }
    }
    wait_for_predecessor();
    for (int i = 0; i < count_; ++i) {
      const Place place = place_of(i);
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const Use use = use_of(i, chunk);
        wait(empty(use.slot), use.parity ^ 1);
        arrive_expecting(full(use.slot), kBoxes * kCopyBytes);
        for (int i = 0; i < kBoxes; ++i) {
          const int h = place.h * C::kStrideH - before(C::kR, C::kPadH, C::kPhasesH);
          const int w = place.w * C::kStrideW - before(C::kS, C::kPadW, C::kPhasesW);
          load_box(maps_.x, box(use.slot) + i * kBoxBytes, full(use.slot), chunk * kChunk,
                   w + i % C::kStrideW, h + i / C::kStrideW, place.n);
        }
      }
    }
  }

  /// The pixels before a box that its taps read, along one axis: the most of a phase.
  static constexpr int before(int taps, int padding, int phases, int phase = 0) {
    const int own = phase_taps(taps, padding, phases, phase).pad;
    if (phase + 1 == phases) return own;
    const int others = before(taps, padding, phases, phase + 1);
    return own > others ? own : others;
  }

  // Phase 2: products of one tile.

  __device__ __forceinline__ void start_chunk(int slot, int chunk,
                                              float (&sums)[kColumns / 2]) const {
    constexpr int kStepUnits = 2;  // of 16 elements: 32 bytes, counted in 16
    // Not known to be the same in all tiles, lest all descriptors be kept in registers.
    uint32_t first = weight(chunk, 0);
    asm volatile("" : "+r"(first));
    fence_registers(sums);
    fence_products();
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      const int r = tap / C::kS, s = tap % C::kS;
      const int of_box = r % C::kStrideH * C::kStrideW + s % C::kStrideW;
      const int pixel = r / C::kStrideH * kCopyW + s / C::kStrideW;
      const int offset = of_box * kBoxBytes + pixel * kRowBytes;
      const uint64_t pixels = matrix_descriptor(box(slot) + offset, kCopyW * kRowBytes);
      const uint64_t weights = matrix_descriptor(first + tap * kTapBytes, kGroupBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        multiply_step<T, kColumns>(weights + k * kStepUnits, pixels + k * kStepUnits,
                                   chunk + tap + k > 0, sums);
      }
    }
    commit_products();
    fence_registers(sums);
  }

  static __device__ __forceinline__ void finish_chunk(float (&sums)[kColumns / 2]) {
    wait_for_products<0>();
    fence_registers(sums);
  }

  // Phase 3: what leaves.

  /// Elements from the first pixel's first channel to one of the thread's, and whether it is there.
  struct Target {
    long long first;
    int rows, columns;  // of the tile that are in the image, from the thread's first column on
  };

  /// Of the tile's pixels of one phase.
  __device__ __forceinline__ Target target_of(Place place, int phase = 0) const {
    const int channel = o_ + pair_of(threadIdx.x), column = place.w + threadIdx.x % 4 * 2;
    const int h = phase / C::kPhasesW, w = phase % C::kPhasesW;
    const long long row = (long long)(place.n) * C::kP + place.h * C::kPhasesH + h;
    const long long pixel = row * C::kQ + column * C::kPhasesW + w;
    const int rows = (C::kP - h + C::kPhasesH - 1) / C::kPhasesH - place.h;
    const int columns = (C::kQ - w + C::kPhasesW - 1) / C::kPhasesW - column;
    return {pixel * C::kO + channel, channel < C::kO ? rows : 0, columns};
  }

  static __device__ __forceinline__ int offset_of(int row, int which) {
    return (row * C::kPhasesH * C::kQ + which * C::kPhasesW) * C::kO;
  }

  /// What the epilogue reads and adds up.
  struct Epilogue {
    Two residual[Expression::kResidual && !C::kGathers ? kEights : 1][2];
    Two saved[Expression::kSaved ? kEights : 1][2];
    float scale[2] = {}, bias[2] = {}, offset = 0.f;
    ThreadSums<typename C::Sums> sums;
  };

  __device__ __forceinline__ void load_images(const Target& target, Epilogue& epilogue) const {
    if constexpr (Expression::kResidual && !C::kGathers) {
      load(a_.residual, target, epilogue.residual);
    }
    if constexpr (Expression::kSaved) load(a_.saved, target, epilogue.saved);
  }

  /// Without branches: products are under way.
  static __device__ __forceinline__ void load(const T* from, const Target& target,
                                              Two (&to)[kEights][2]) {
#pragma unroll
    for (int row = 0; row < kEights; ++row) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const bool there = row < target.rows && which < target.columns;
        const long long at = there ? target.first + offset_of(row, which) : 0;
        to[row][which] = *reinterpret_cast<const Two*>(from + at);
      }
    }
  }

  /// `residual` gives what is added to a pixel.
  template <class More>
  __device__ __forceinline__ void finish_tile(const Target& target,
                                              const float (&sums)[kColumns / 2], Epilogue& e,
                                              More residual) const {
#pragma unroll
    for (int row = 0; row < kEights; ++row) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const float2 v = pair_at<C::kScale>(sums, row, which, e.scale, e.bias);
        float2 more = {}, saved = {};
        if constexpr (Expression::kResidual) more = residual(row, which);
        if constexpr (Expression::kSaved) saved = Pair<T>::floats(e.saved[row][which]);
        if (row < target.rows && which < target.columns) {
          const long long at = target.first + offset_of(row, which);
          store(a_.y + at, evaluate<Expression>(v, more, e.offset, saved));
          if constexpr (C::kUnshifted) {
            store(a_.unshifted + at, evaluate<typename C::Unshifted>(v, more, e.offset, saved));
          }
          e.sums.take(v, more, e.offset, saved);
        }
      }
    }
  }

  static __device__ __forceinline__ void store(T* to, float2 v) {
    *reinterpret_cast<Two*>(to) = Pair<T>::of(v.x, v.y);
  }

  /// A warpgroup's part of each sum of a channel, a warp's of each of all.
  template <int s>
  __device__ __forceinline__ void leave_sums(int group, const Epilogue& e) const {
    if constexpr (s < C::Sums::kCount) {
      float* const parts = a_.parts + Parts::start(s);
      const int lane = threadIdx.x % 32;
      if constexpr (C::Sums::kOfChannels[s]) {
        const float2 sum = e.sums.template of_pair<s>();
        const int row = blockIdx.x / kTilesO * C::kGroups + group;
        const int channel = o_ + pair_of(threadIdx.x);
        if (lane % 4 == 0 && channel < C::kO) {
          parts[row * C::kO + channel] = sum.x, parts[row * C::kO + channel + 1] = sum.y;
        }
      } else {
        const float sum = e.sums.template of_warp<s>();
        const int warp = (blockIdx.x * C::kGroups + group) * 4 + threadIdx.x / 32 % 4;
        if (lane == 0) parts[warp] = sum;
      }
      leave_sums<s + 1>(group, e);
    }
  }

  /// Takes what the epilogue has of channels, and waits until it may read what others have written.
  __device__ __forceinline__ void begin(Epilogue& e) const {
    const int channel = o_ + pair_of(threadIdx.x);
    if constexpr (C::kScale)
      e.scale[0] = __ldg(a_.scale + channel), e.scale[1] = __ldg(a_.scale + channel + 1);
    if constexpr (C::kBias)
      e.bias[0] = __ldg(a_.bias + channel), e.bias[1] = __ldg(a_.bias + channel + 1);
    if constexpr (Expression::kOffset) e.offset = load_parameter<T>(a_.offset, 0);
    wait(weights_full(), 0);
    wait_for_predecessor();
  }

  __device__ __forceinline__ void consume(int group) const {
    Epilogue e;
    begin(e);
#pragma unroll 1
    for (int i = group; i < count_; i += C::kGroups) {
      const Target target = target_of(place_of(i));
      float sums[kColumns / 2];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const Use use = use_of(i, chunk);
        wait(full(use.slot), use.parity);
        start_chunk(use.slot, chunk, sums);
        if (chunk == 0) load_images(target, e);
        finish_chunk(sums);
        if (threadIdx.x % 32 == 0) arrive(empty(use.slot));
      }
      finish_tile(target, sums, e, [&](int row, int which) {
        return Pair<T>::floats(e.residual[row][which]);
      });
    }
    leave_sums<0>(group, e);
  }
};

}  // namespace plantune
