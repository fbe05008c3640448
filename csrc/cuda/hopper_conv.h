// Convolution of images as an implicit matrix product, with tensor copies and warpgroup products:
//
//   y = relu(conv(x, w) * scale + bias + residual) + offset
//
// x and y are NHWC, w is (O, R * S, C), both of T (2 bytes). Each
// part of the epilogue is optional; `unshifted` takes the value before the offset. It writes `=`,
// sums in float in an order that depends on the configuration alone, and rounds once.
//
// A block computes kTileM pixels (a box of kBoxW x kBoxH x kBoxN) by kTileN channels. One step of
// the reduction is 64 channels of one tap. Boxes of x are copied by tensor maps whose zeros outside
// of the image are the padding; taps that read nothing else are left out. With kReuse a box with
// its margin is copied once per 64 channels, and every tap reads it at an offset of its own.
//
// kSplitK blocks of a cluster share a tile's steps. Each finishes a share of the tile's channels:
// the others send it their sums through shared memory. What is finished leaves by a tensor copy,
// which also leaves out what is outside of y; the residual comes the same way.

#pragma once

#include "cuda/arithmetic.h"
#include "cuda/hopper_async.h"
#include "cuda/hopper_mma.h"
#include "cuda/launch.h"
#include "cuda/parameter.h"
#include "cuda/vector.h"

namespace plantune {

/// What the epilogue reads besides the residual.
struct ConvScalars {
  Parameter scale, bias, offset;
};

/// The tensor maps of a convolution; `residual` and `unshifted` where the epilogue has them.
struct ConvMaps {
  TensorMap x, w, y, residual, unshifted;
};

/// The constants of C are a problem, a configuration, and which parts the epilogue has.
template <class C>
class HopperConv {
  using T = typename C::T;

 protected:
  static constexpr int kWarpgroup = 128;
  static constexpr int kAtomRows = 64;
  static constexpr int kChunk = 64;  // channels of one step
  static constexpr int kGroups = C::kTileM / kAtomRows;
  static constexpr int kConsumers = kGroups * kWarpgroup;

  // A margin is what the taps of a box read beyond it.
  static constexpr int kCopyW = C::kReuse ? C::kBoxW + C::kS - 1 : C::kBoxW;
  static constexpr int kCopyH = C::kReuse ? C::kBoxH + C::kR - 1 : C::kBoxH;
  static constexpr int kCopyBytes = kCopyW * kCopyH * C::kBoxN * kRowBytes;
  static constexpr int kImageBytes =
      C::kReuse ? ceil_div(kCopyBytes, kGroupBytes) * kGroupBytes : C::kTileM * kRowBytes;
  static constexpr int kWeightBytes = C::kTileN * kRowBytes;

  // Of the tile a block finishes kOwn channels, in boxes of up to 64: as many as a row holds whose
  // 16-byte pieces are swizzled.
  static constexpr int kOwn = C::kTileN / C::kSplitK;
  static constexpr int kOwnSums = kOwn / 2;
  static constexpr int kOutBoxes = ceil_div(kOwn, 64);
  static constexpr int kOutRow = kOwn / kOutBoxes * int(sizeof(T));
  static constexpr int kOutBoxBytes = C::kTileM * kOutRow;
  static constexpr int kOutBytes = kOutBoxes * kOutBoxBytes;
  static constexpr int kCopiedOut = C::kBoxW * C::kBoxH * C::kBoxN * kOutRow * kOutBoxes;
  // Sums from one other block, 16 bytes of each thread side by side.
  static constexpr int kPartBytes = kOwnSums * kConsumers * int(sizeof(float));

  // Shared memory.
  static constexpr int kWeightStart = C::kImageStages * kImageBytes;
  static constexpr int kOutStart = kWeightStart + C::kWeightStages * kWeightBytes;
  static constexpr int kUnshiftedStart = kOutStart + kOutBytes;
  static constexpr int kPartStart = kUnshiftedStart + (C::kUnshifted ? kOutBytes : 0);
  static constexpr int kScalesStart = kPartStart + (C::kSplitK - 1) * kPartBytes;
  static constexpr int kBiasStart = kScalesStart + kOwn * int(sizeof(float));
  static constexpr int kBarrierStart = kBiasStart + kOwn * int(sizeof(float));
  static constexpr int kBarrierCount = 2 * (C::kImageStages + C::kWeightStages) + 2;
  static constexpr int kEnd = kBarrierStart + 8 * kBarrierCount;

  static constexpr int kChunks = ceil_div(C::kC, kChunk);
  static constexpr int kTilesW = ceil_div(C::kQ, C::kBoxW);
  static constexpr int kTilesH = ceil_div(C::kP, C::kBoxH);
  static constexpr int kTilesO = ceil_div(C::kO, C::kTileN);

  /// What a block takes that uses so much from an aligned start on.
  static constexpr int shared_bytes(int end) {
    return end + kGroupBytes > C::kSharedFloor ? end + kGroupBytes : C::kSharedFloor;
  }

  static_assert(sizeof(T) == 2, "a swizzled row holds 64 elements of 2 bytes");
  static_assert(C::kTileM % kAtomRows == 0, "a warpgroup multiplies 64 rows");
  static_assert(kOwn >= 8, "each block of the cluster finishes 16 bytes of a pixel or more");
  static_assert(C::kC % 8 == 0 && C::kO % 8 == 0, "pixels start at 16 bytes");
  static_assert(C::kBoxW * C::kBoxH * C::kBoxN <= C::kTileM, "the tile holds the box");
  static_assert(!C::kReuse || (C::kBoxW % 8 == 0 && C::kBoxH % 8 == 0 && C::kStrideW == 1 &&
                               C::kStrideH == 1 && C::kBoxW * C::kBoxH * C::kBoxN == C::kTileM),
                "taps at an offset need 8x8 neighbouring pixels in each 64 rows");

 public:
  /// After the consumers come a warp that copies weights and one that copies images.
  static constexpr int kThreads = kConsumers + 64;
  static constexpr int kSharedBytes = shared_bytes(kEnd);

  static __device__ __forceinline__ void run(const ConvMaps& maps, const ConvScalars& scalars) {
    run_as<HopperConv>(maps, scalars);
  }

 protected:
  /// Runs a kernel that consumes in its own way.
  template <class Kernel, class Maps, class Scalars>
  static __device__ __forceinline__ void run_as(const Maps& maps, const Scalars& scalars) {
    extern __shared__ uint8_t memory[];
    release_successor();
    // A swizzled row's place in the pattern is a part of its address.
    const uint32_t start = shared_address(memory);
    const Kernel conv(maps, scalars, (start + kGroupBytes - 1) / kGroupBytes * kGroupBytes);
    conv.init_barriers();
    if constexpr (C::kSplitK > 1) arrive_in_cluster();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < kConsumers / 32) {
      conv.consume();
    } else {
      if (lane == 0 && warp == kConsumers / 32) conv.copy_weights();
      if (lane == 0 && warp > kConsumers / 32) conv.copy_images();
      __syncwarp();
      if constexpr (C::kSplitK > 1) wait_for_cluster();
    }
  }

  /// One step of the reduction.
  struct Step {
    int chunk, r, s;
  };

  const ConvMaps& maps_;
  const ConvScalars& scalars_;
  uint32_t base_;
  int rank_, n_, h_, w_, o_;               // the place in the cluster, the tile's first pixel
  int r_begin_, r_end_, s_begin_, s_end_;  // the taps that read the image
  int begin_, end_;                        // the block's steps

  __device__ __forceinline__ HopperConv(const ConvMaps& maps, const ConvScalars& scalars,
                                        uint32_t base)
      : maps_(maps), scalars_(scalars), base_(base) {
    int index = blockIdx.x;
    rank_ = index % C::kSplitK, index /= C::kSplitK;
    o_ = index % kTilesO * C::kTileN, index /= kTilesO;
    w_ = index % kTilesW * C::kBoxW, index /= kTilesW;
    h_ = index % kTilesH * C::kBoxH, index /= kTilesH;
    n_ = index * C::kBoxN;
    const int last_h = min(h_ + C::kBoxH, C::kP) - 1, last_w = min(w_ + C::kBoxW, C::kQ) - 1;
    r_begin_ = max(0, C::kPadH - last_h * C::kStrideH);
    s_begin_ = max(0, C::kPadW - last_w * C::kStrideW);
    r_end_ = max(r_begin_, min(C::kR, C::kH + C::kPadH - h_ * C::kStrideH));
    s_end_ = max(s_begin_, min(C::kS, C::kW + C::kPadW - w_ * C::kStrideW));
    const int steps = kChunks * taps();
    begin_ = steps * rank_ / C::kSplitK;
    end_ = steps * (rank_ + 1) / C::kSplitK;
  }

  __device__ __forceinline__ int taps() const {
    return (r_end_ - r_begin_) * (s_end_ - s_begin_);
  }

  __device__ __forceinline__ Step first_step() const {
    const int tap = begin_ % taps(), columns = s_end_ - s_begin_;
    return {begin_ / taps(), r_begin_ + tap / columns, s_begin_ + tap % columns};
  }

  __device__ __forceinline__ void advance(Step& step) const {
    if (++step.s < s_end_) return;
    step.s = s_begin_;
    if (++step.r < r_end_) return;
    step.r = r_begin_;
    ++step.chunk;
  }

  /// Whether this step, which is not the block's first, needs a box of its own.
  __device__ __forceinline__ bool starts_box(const Step& step) const {
    return !C::kReuse || (step.r == r_begin_ && step.s == s_begin_);
  }

  __device__ __forceinline__ uint32_t image(int stage) const { return base_ + stage * kImageBytes; }
  __device__ __forceinline__ uint32_t weight(int stage) const {
    return base_ + kWeightStart + stage * kWeightBytes;
  }
  __device__ __forceinline__ uint32_t residual_full() const { return base_ + kBarrierStart; }
  __device__ __forceinline__ uint32_t parts_full() const { return residual_full() + 8; }
  __device__ __forceinline__ uint32_t image_full(int stage) const {
    return residual_full() + 16 + 8 * stage;
  }
  __device__ __forceinline__ uint32_t image_empty(int stage) const {
    return image_full(C::kImageStages + stage);
  }
  __device__ __forceinline__ uint32_t weight_full(int stage) const {
    return image_full(2 * C::kImageStages + stage);
  }
  __device__ __forceinline__ uint32_t weight_empty(int stage) const {
    return weight_full(C::kWeightStages + stage);
  }

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == kConsumers) {
      prefetch(maps_.w);
      prefetch(maps_.x);
      init_barrier(residual_full(), 1);
      init_barrier(parts_full(), 1);
      // A warp arrives when it has read a slot.
      for (int i = 0; i < C::kImageStages; ++i) {
        init_barrier(image_full(i), 1);
        init_barrier(image_empty(i), kConsumers / 32);
      }
      for (int i = 0; i < C::kWeightStages; ++i) {
        init_barrier(weight_full(i), 1);
        init_barrier(weight_empty(i), kConsumers / 32);
      }
      publish_barriers();
      if constexpr (C::kSplitK > 1) arrive_expecting(parts_full(), (C::kSplitK - 1) * kPartBytes);
    }
    __syncthreads();
  }

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
    for (int i = begin_; i < end_; ++i) {
      copy_weight(maps_.w, slot, step.chunk, step.r * C::kS + step.s);
      advance(step);
    }
  }

  __device__ __forceinline__ void copy_weight(const TensorMap& map, Slot<C::kWeightStages>& slot,
                                              int chunk, int tap) const {
    wait(weight_empty(slot.stage), slot.parity ^ 1);
    arrive_expecting(weight_full(slot.stage), kWeightBytes);
    load_box(map, weight(slot.stage), weight_full(slot.stage), chunk * kChunk, tap, o_);
    slot.advance();
  }

  __device__ __forceinline__ void copy_residual() const {
    if constexpr (C::kResidual) {
      wait_for_predecessor();
      arrive_expecting(residual_full(), kCopiedOut);
      for (int i = 0; i < kOutBoxes; ++i) {
        load_box(maps_.residual, base_ + kOutStart + i * kOutBoxBytes, residual_full(),
                 out_channel(i), w_, h_, n_);
      }
    }
  }

  __device__ __forceinline__ void copy_images() const {
    wait_for_predecessor();
    if (begin_ == end_) return;
    Slot<C::kImageStages> slot;
    Step step = first_step();
    for (int i = begin_; i < end_; ++i) {
      if (i == begin_ || starts_box(step)) {
        wait(image_empty(slot.stage), slot.parity ^ 1);
        arrive_expecting(image_full(slot.stage), kCopyBytes);
        load_box(maps_.x, image(slot.stage), image_full(slot.stage), step.chunk * kChunk,
                 w_ * C::kStrideW - C::kPadW + (C::kReuse ? 0 : step.s),
                 h_ * C::kStrideH - C::kPadH + (C::kReuse ? 0 : step.r), n_);
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

  __device__ __forceinline__ void multiply(float (&sums)[C::kTileN / 2]) const {
    Slot<C::kWeightStages> weight_slot;
    multiply(sums, weight_slot);
  }

  __device__ __forceinline__ void multiply(float (&sums)[C::kTileN / 2],
                                           Slot<C::kWeightStages>& weight_slot) const {
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    if (begin_ == end_) return;
    Slot<C::kImageStages> image_slot;
    Step step = first_step();
    int read_image = -1, read_weight = -1;  // slots of the step before
    wait(image_full(0), 0);
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
    multiply_row<T, C::kTileN>(rows, matrix_descriptor(weight(weight_slot.stage), kGroupBytes),
                               sums);
    commit_products();
    fence_registers(sums);
    wait_for_products<1>();
  }

  /// Gives a slot back that this warp has read, where it is one.
  static __device__ __forceinline__ void release(int slot, uint32_t empty) {
    if (threadIdx.x % 32 == 0 && slot >= 0) arrive(empty);
  }

  __device__ __forceinline__ void consume() const {
    load_scales();
    const float offset = C::kOffset ? load_parameter<T>(scalars_.offset, 0) : 0.f;
    float sums[C::kTileN / 2];
    multiply(sums);
    if constexpr (C::kSplitK == 1) {
      scale_sums(sums);
      finish(sums, offset);
    } else {
      float own[kOwnSums];
      exchange(sums, own);
      scale_sums(own);
      finish(own, offset);
    }
    store_tile();
  }

  /// Starts the copies of what all threads have put into the tile.
  __device__ __forceinline__ void store_tile() const {
    // Every thread's part of the tile is there.
    publish_writes();
    sync_first<kConsumers>();
    if (threadIdx.x == 0) {
      wait_for_predecessor();
      store_boxes(maps_.y, kOutStart);
      if constexpr (C::kUnshifted) store_boxes(maps_.unshifted, kUnshiftedStart);
      wait_for_stores();
    }
  }

  // Phase 3, in a cluster: sums go to the block that finishes their channels, and there to the
  // thread that has the same ones.

  __device__ __forceinline__ void exchange(const float (&sums)[C::kTileN / 2],
                                           float (&own)[kOwnSums]) const {
    wait_for_cluster();  // they all run, and have their barriers
#pragma unroll
    for (int peer = 0; peer < C::kSplitK; ++peer) {
      if (peer == rank_) continue;
      const uint32_t to = peer_address(part_at(rank_ - (rank_ > peer)), peer);
      const uint32_t barrier = peer_address(parts_full(), peer);
#pragma unroll
      for (int i = 0; i < kOwnSums; i += 4) {
        const float* four = sums + peer * kOwnSums + i;
        send_to_peer(to + i / 4 * kConsumers * 16, barrier, {four[0], four[1], four[2], four[3]});
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnSums; ++i) {
      own[i] = sums[i];
#pragma unroll
      for (int peer = 1; peer < C::kSplitK; ++peer) {
        own[i] = select(peer == rank_, sums[peer * kOwnSums + i], own[i]);
      }
    }
    wait(parts_full(), 0);
#pragma unroll
    for (int part = 0; part < C::kSplitK - 1; ++part) {
#pragma unroll
      for (int i = 0; i < kOwnSums; i += 4) {
        const float4 four = load_four(part_at(part) + i / 4 * kConsumers * 16);
        own[i] += four.x, own[i + 1] += four.y, own[i + 2] += four.z, own[i + 3] += four.w;
      }
    }
  }

  /// A choice that the compiler cannot make an index of, which would put registers into memory.
  static __device__ __forceinline__ float select(bool first, float a, float b) {
    float chosen;
    asm("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nselp.f32 %0, %1, %2, p;\n}\n"
        : "=f"(chosen)
        : "f"(a), "f"(b), "r"(uint32_t(first)));
    return chosen;
  }

  /// Where this thread finds what one other block sends it.
  __device__ __forceinline__ uint32_t part_at(int part) const {
    return base_ + kPartStart + part * kPartBytes + threadIdx.x * 16;
  }

  // Phase 4: the epilogue, in place of the residual.

  /// A pixel of the tile.
  struct Place {
    int w, h, n;
  };

  /// With reuse, each 64 rows of the product are 8x8 pixels.
  static __device__ __forceinline__ Place place_of(int row) {
    if constexpr (!C::kReuse) {
      return {row % C::kBoxW, row / C::kBoxW % C::kBoxH, row / (C::kBoxW * C::kBoxH)};
    } else {
      constexpr int kAtomsW = C::kBoxW / 8, kAtomsH = C::kBoxH / 8;
      const int atom = row / kAtomRows;
      return {atom % kAtomsW * 8 + row % 8, atom / kAtomsW % kAtomsH * 8 + row / 8 % 8,
              atom / (kAtomsW * kAtomsH)};
    }
  }

  /// The row of the copied box that has this row of the product.
  static __device__ __forceinline__ int out_row(int row) {
    if constexpr (!C::kReuse) return row;
    const Place place = place_of(row);
    return (place.n * C::kBoxH + place.h) * C::kBoxW + place.w;
  }

  __device__ __forceinline__ int out_channel(int box) const {
    return o_ + rank_ * kOwn + box * (kOwn / kOutBoxes);
  }

  __device__ __forceinline__ void store_boxes(const TensorMap& map, int start) const {
    for (int i = 0; i < kOutBoxes; ++i) {
      store_box(map, base_ + start + i * kOutBoxBytes, out_channel(i), w_, h_, n_);
    }
  }

  __device__ __forceinline__ void load_scales() const {
    if constexpr (C::kScale || C::kBias) {
      const int first = o_ + rank_ * kOwn;
      for (int i = threadIdx.x; i < kOwn && first + i < C::kO; i += kConsumers) {
        const uint32_t to = base_ + kScalesStart + i * 4;
        if constexpr (C::kScale) {
          store_word(to, __float_as_uint(load_parameter<T>(scalars_.scale, first + i)));
        }
        if constexpr (C::kBias) {
          store_word(to + kOwn * 4, __float_as_uint(load_parameter<T>(scalars_.bias, first + i)));
        }
      }
      sync_first<kConsumers>();
    }
  }

  __device__ __forceinline__ void scale_sums(float (&sums)[kOwnSums]) const {
#pragma unroll
    for (int j = 0; j < kOwn / 8; ++j) {
      const uint32_t at = base_ + kScalesStart + (8 * j + threadIdx.x % 4 * 2) * 4;
      const float2 scale = C::kScale ? load_pair(at) : float2{1.f, 1.f};
      const float2 bias = C::kBias ? load_pair(at + kOwn * 4) : float2{0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (C::kScale) sums[4 * j + i] *= i % 2 ? scale.y : scale.x;
        if constexpr (C::kBias) sums[4 * j + i] += i % 2 ? bias.y : bias.x;
      }
    }
  }

  __device__ __forceinline__ void finish(const float (&sums)[kOwnSums], float offset) const {
    const int lane = threadIdx.x % 32;
    const int row = threadIdx.x / 32 * 16 + lane / 4;  // a warpgroup's four warps hold 64 rows
    const int rows[2] = {out_row(row), out_row(row + 8)};
    if constexpr (C::kResidual) wait(residual_full(), 0);
#pragma unroll
    for (int j = 0; j < kOwn / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = base_ + out_place(rows[half], j) + lane % 4 * 4;
        float2 v = {sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]};
        if constexpr (C::kResidual) {
          const float2 residual = unpacked(load_word(at + kOutStart));
          v.x += residual.x, v.y += residual.y;
        }
        if constexpr (C::kRelu) v = {relu(v.x), relu(v.y)};
        if constexpr (C::kUnshifted) store_word(at + kUnshiftedStart, packed(v));
        if constexpr (C::kOffset) v.x += offset, v.y += offset;
        store_word(at + kOutStart, packed(v));
      }
    }
  }

  /// Where the copied boxes have 8 channels of a row: 16-byte pieces of 128 bytes are swizzled.
  static __device__ __forceinline__ int out_place(int row, int j) {
    constexpr int kPieces = kOutRow / 16;
    const int piece = (j % kPieces) ^ (row * kOutRow / kRowBytes % kPieces);
    return j / kPieces * kOutBoxBytes + row * kOutRow + piece * 16;
  }

  static __device__ __forceinline__ float2 unpacked(uint32_t word) {
    Vector<T, 2> two;
    *reinterpret_cast<uint32_t*>(two.values) = word;
    return {two[0], two[1]};
  }

  static __device__ __forceinline__ uint32_t packed(float2 v) {
    Vector<T, 2> two;
    const float values[2] = {v.x, v.y};
    two.round(values);
    return *reinterpret_cast<const uint32_t*>(two.values);
  }
};

}  // namespace plantune
