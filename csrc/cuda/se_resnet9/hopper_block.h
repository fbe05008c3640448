// A residual block of images that a block of threads has whole: two convolutions of the same output
// size with squeeze-and-excite after the second,
//
//   m = MidExpression(conv(x, w) * mid_scale + mid_bias, mid_offset),  rounded to T
//   v = conv(m, w2) * scale + bias
//   y = Expression(v * gate, residual, offset)
//
// with the gate of hopper_gate.h. Each convolution is HopperConv's, with its layouts, options and
// roles. It writes `=`, and what leaves is rounded once. m never leaves shared memory: it is written
// there with a margin of zeros, as the second convolution reads it, each tap at an offset of its own.
// Weights of both come through one ring.

#pragma once

#include "cuda/se_resnet9/hopper_gate.h"

namespace plantune {

struct BlockMaps : ConvMaps<1> {
  TensorMap w2;
};

struct BlockScalars : GateScalars {
  Parameter mid_scale, mid_bias, mid_offset;
};

template <class C>
class HopperBlock : public HopperGate<C> {
  using Base = HopperGate<C>;
  using T = typename C::T;
  using MidExpression = typename C::MidExpression;
  using Base::kChannels;
  using Base::kConsumers;

  static constexpr int kR2 = C::kR2, kS2 = C::kS2;
  static constexpr int kMidW = C::kQ + kS2 - 1, kMidH = C::kP + kR2 - 1;
  static constexpr int kMidChunks = C::kO / Base::kChunk;
  static constexpr int kMidBytes =
      ceil_div(C::kBoxN * kMidH * kMidW * kRowBytes, kGroupBytes) * kGroupBytes;  // of a chunk
  static constexpr int kMidStart = ceil_div(Base::kEnd, kGroupBytes) * kGroupBytes;
  static constexpr int kMidScalesStart = kMidStart + kMidChunks * kMidBytes;
  static constexpr int kEnd = kMidScalesStart + 2 * kChannels * int(sizeof(float));

  static_assert(C::kReuse || C::kQ == 8, "64 rows are 8x8 pixels in both convolutions");
  static_assert(C::kO % Base::kChunk == 0, "the second convolution reads whole rows");
  static_assert(kR2 % 2 == 1 && kS2 % 2 == 1, "the margin is the same on both sides");

 public:
  static constexpr int kSharedBytes = Base::shared_bytes(kEnd);

  static __device__ __forceinline__ void run(const BlockMaps& maps, const BlockScalars& scalars) {
    Base::template run_as<HopperBlock>(maps, scalars);
  }

  __device__ __forceinline__ HopperBlock(const BlockMaps& maps, const BlockScalars& scalars,
                                         uint32_t base)
      : Base(maps, scalars, base), w2_(maps.w2), mid_(scalars) {}

  __device__ __forceinline__ void copy_weights() const {
    Slot<C::kWeightStages> slot;
    this->copy_first_weights(slot);
    for (int chunk = 0; chunk < kMidChunks; ++chunk) {
      for (int tap = 0; tap < kR2 * kS2; ++tap) this->copy_weight(w2_, slot, chunk, tap);
    }
    this->copy_residual();
  }

  __device__ __forceinline__ void consume() const {
    clear_mid();
    this->load_layers();
    load_mid_scales();
    this->load_scales();
    sync_first<kConsumers>();
    const float offset =
        Base::Expression::kOffset ? load_parameter<T>(this->scalars_.offset, 0) : 0.f;
    const float mid_offset = MidExpression::kOffset ? load_parameter<T>(mid_.mid_offset, 0) : 0.f;
    float sums[kChannels / 2];
    Slot<C::kWeightStages> slot;
    this->multiply(sums, slot);
    put_mid(sums, mid_offset);
    publish_writes();
    sync_first<kConsumers>();
    multiply_mid(sums, slot);
    this->scale_sums(sums);
    this->gate(sums);
    this->finish(sums, offset);
    this->store_tile();
  }

 private:
  const TensorMap& w2_;
  const BlockScalars& mid_;

  __device__ __forceinline__ uint32_t mid(int chunk) const {
    return this->base_ + kMidStart + chunk * kMidBytes;
  }

  __device__ __forceinline__ uint32_t mid_scale_at(int channel) const {
    return this->base_ + kMidScalesStart + channel * 4;
  }

  /// The row of a chunk that has this pixel, or the tap (r, s) of it before the margin.
  static __device__ __forceinline__ int mid_row(typename Base::Place place, int r, int s) {
    return (place.n * kMidH + place.h + r) * kMidW + place.w + s;
  }

  __device__ __forceinline__ void clear_mid() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < kMidChunks * kMidBytes / 16; i += kConsumers) {
      store_zeros(mid(0) + i * 16);
    }
  }

  __device__ __forceinline__ void load_mid_scales() const {
    for (int i = threadIdx.x; i < kChannels; i += kConsumers) {
      const float scale = C::kMidScale ? load_parameter<T>(mid_.mid_scale, i) : 1.f;
      const float bias = C::kMidBias ? load_parameter<T>(mid_.mid_bias, i) : 0.f;
      store_word(mid_scale_at(i), __float_as_uint(scale));
      store_word(mid_scale_at(i + kChannels), __float_as_uint(bias));
    }
  }

  __device__ __forceinline__ void put_mid(const float (&sums)[kChannels / 2], float offset) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    const int rows[2] = {mid_row(Base::place_of(row), kR2 / 2, kS2 / 2),
                         mid_row(Base::place_of(row + 8), kR2 / 2, kS2 / 2)};
#pragma unroll
    for (int j = 0; j < kChannels / 8; ++j) {
      const int channel = 8 * j + lane % 4 * 2;
      const float2 scale = load_pair(mid_scale_at(channel));
      const float2 bias = load_pair(mid_scale_at(channel + kChannels));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 v = {sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]};
        v.x = v.x * scale.x + bias.x, v.y = v.y * scale.y + bias.y;
        v = evaluate<MidExpression>(v, {}, offset);
        const int piece = j % 8 ^ rows[half] % 8;
        store_word(mid(j / 8) + rows[half] * kRowBytes + piece * 16 + lane % 4 * 4,
                   packed<T>(v));
      }
    }
  }

  __device__ __forceinline__ void multiply_mid(float (&sums)[kChannels / 2],
                                               Slot<C::kWeightStages>& slot) const {
#pragma unroll
    for (float& sum : sums) sum = 0.f;
    const auto place = Base::place_of(threadIdx.x / Base::kWarpgroup * Base::kAtomRows);
    int read = -1;  // the slot of the step before
#pragma unroll 1
    for (int chunk = 0; chunk < kMidChunks; ++chunk) {
#pragma unroll 1
      for (int tap = 0; tap < kR2 * kS2; ++tap) {
        const int row = mid_row(place, tap / kS2, tap % kS2);
        const uint64_t rows = matrix_descriptor(mid(chunk) + row * kRowBytes, kMidW * kRowBytes);
        this->multiply_step(rows, slot, sums);
        this->release(read, this->weight_empty(read));
        read = slot.stage;
        slot.advance();
      }
    }
    wait_for_products<0>();
    fence_registers(sums);
  }
};

}  // namespace plantune
