// Squeeze-and-excite of a convolution's sums, of images that a block of threads has whole:
//
//   gate = sigmoid(W2 relu(W1 mean(v) + b1) + b2),  and v becomes v * gate
//
// v stays in registers. W1 is (hidden, C) and W2 (C, hidden), both of T and aligned to 16 bytes;
// kHidden is a multiple of 4 that holds the hidden channels. All arithmetic is float, and sums have
// a fixed order.

#pragma once

#include "cuda/hopper_conv.h"

namespace plantune {

struct GateScalars : ConvScalars {
  const void *weight1, *weight2;
  Parameter bias1, bias2;
};

template <class C>
class HopperGate : public HopperConv<C> {
  using Base = HopperConv<C>;
  using T = typename C::T;

 protected:
  using Base::kConsumers;

  static constexpr int kImages = C::kBoxN, kChannels = C::kTileN, kHidden = C::kHidden;
  static constexpr int kWarps = kConsumers / 32, kWarpsOfImage = kWarps / kImages;

  struct Layers {
    float weight1[kHidden][kChannels], weight2[kHidden][kChannels];
    float bias1[kHidden], bias2[kChannels];
  };

  struct Shared {
    alignas(16) Layers layers;
    float sums[kWarps][kChannels], means[kImages][kChannels];
    float hidden[kImages][kHidden], gates[kImages][kChannels];
  };

  static constexpr int kLayersStart = ceil_div(Base::kEnd, 16) * 16;
  static constexpr int kEnd = kLayersStart + int(sizeof(Shared));

  static_assert(C::kSplitK == 1 && C::kTileN == C::kO, "a block has all channels of its pixels");
  static_assert(C::kBoxW == C::kQ && C::kBoxH == C::kP, "a block has whole images");
  static_assert(C::kTileM == kImages * C::kP * C::kQ && C::kTileM / kImages % 64 == 0,
                "a warpgroup has pixels of one image");
  static_assert(kHidden % 4 == 0, "rows of the layers are whole vectors of floats");

 public:
  __device__ __forceinline__ HopperGate(const ConvMaps<1>& maps, const GateScalars& scalars,
                                        uint32_t base)
      : Base(maps, scalars, base), layers_(scalars) {}

 protected:
  const GateScalars& layers_;

  __device__ __forceinline__ Shared& shared() const {
    extern __shared__ uint8_t memory[];
    const uint32_t start = this->base_ - shared_address(memory) + kLayersStart;
    return *reinterpret_cast<Shared*>(memory + start);
  }

  /// What is loaded here is read only after later barriers.
  __device__ __forceinline__ void load_layers() const {
    constexpr int kVectors = ceil_div(kHidden * kChannels / 8, kConsumers);
    constexpr int kSingles = ceil_div(kHidden * kChannels, kConsumers);
    constexpr int kBiases = ceil_div(kChannels, kConsumers);
    const T* weight1 = static_cast<const T*>(layers_.weight1);
    const T* weight2 = static_cast<const T*>(layers_.weight2);
    // All loads are under way before the first is needed.
    Vector<T, 8> vectors[kVectors];
    float singles[kSingles], biases1[kBiases] = {}, biases2[kBiases] = {};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = k * kConsumers + threadIdx.x;
      vectors[k].clear();
      if (i < C::kHiddenUsed * kChannels / 8) {
        *reinterpret_cast<uint4*>(vectors[k].values) =
            __ldg(reinterpret_cast<const uint4*>(weight1) + i);
      }
    }
#pragma unroll
    for (int k = 0; k < kSingles; ++k) {
      const int i = k * kConsumers + threadIdx.x, row = i % kHidden, channel = i / kHidden;
      const bool there = row < C::kHiddenUsed && channel < kChannels;
      singles[k] = there ? to_float(weight2[channel * C::kHiddenUsed + row]) : 0.f;
    }
#pragma unroll
    for (int k = 0; k < kBiases; ++k) {
      const int i = k * kConsumers + threadIdx.x;
      if (C::kBias1 && i < C::kHiddenUsed) biases1[k] = load_parameter<T>(layers_.bias1, i);
      if (C::kBias2 && i < kChannels) biases2[k] = load_parameter<T>(layers_.bias2, i);
    }
    put_layers(vectors, singles, biases1, biases2);
  }

  template <int kVectors, int kSingles, int kBiases>
  __device__ __forceinline__ void put_layers(const Vector<T, 8> (&vectors)[kVectors],
                                             const float (&singles)[kSingles],
                                             const float (&biases1)[kBiases],
                                             const float (&biases2)[kBiases]) const {
    Layers& to = shared().layers;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int i = k * kConsumers + threadIdx.x;
      if (i >= kHidden * kChannels / 8) continue;
      float4* const row = reinterpret_cast<float4*>(&to.weight1[0][0] + i * 8);
      row[0] = {vectors[k][0], vectors[k][1], vectors[k][2], vectors[k][3]};
      row[1] = {vectors[k][4], vectors[k][5], vectors[k][6], vectors[k][7]};
    }
#pragma unroll
    for (int k = 0; k < kSingles; ++k) {
      const int i = k * kConsumers + threadIdx.x;
      if (i < kHidden * kChannels) to.weight2[i % kHidden][i / kHidden] = singles[k];
    }
#pragma unroll
    for (int k = 0; k < kBiases; ++k) {
      const int i = k * kConsumers + threadIdx.x;
      if (i < kHidden) to.bias1[i] = biases1[k];
      if (i < kChannels) to.bias2[i] = biases2[k];
    }
  }

  /// Multiplies the sums by what the layers make of their means.
  __device__ __forceinline__ void gate(float (&sums)[kChannels / 2]) const {
    Shared& s = shared();
    average(sums, s);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = warp; i < kImages * kHidden; i += kWarps) {
      const int image = i / kHidden, row = i % kHidden;
      float sum = 0.f;
#pragma unroll
      for (int k = lane; k < kChannels; k += 32) {
        sum += s.layers.weight1[row][k] * s.means[image][k];
      }
      sum = sum_of_warp(sum);
      if (lane == 0) s.hidden[image][row] = relu(sum + s.layers.bias1[row]);
    }
    sync_first<kConsumers>();
    for (int i = threadIdx.x; i < kImages * kChannels; i += kConsumers) {
      const int image = i / kChannels, channel = i % kChannels;
      float sum = s.layers.bias2[channel];
#pragma unroll
      for (int k = 0; k < kHidden; ++k) sum += s.layers.weight2[k][channel] * s.hidden[image][k];
      s.gates[image][channel] = sigmoid(sum);
    }
    sync_first<kConsumers>();
    const float* gates = s.gates[warp / kWarpsOfImage] + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kChannels / 2; ++i) sums[i] *= gates[i / 4 * 8 + i % 2];
  }

 private:
  /// The mean of each channel of each image.
  __device__ __forceinline__ void average(const float (&v)[kChannels / 2], Shared& s) const {
    constexpr int kSums = kChannels / 4;  // of a thread: two rows each
    float sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = v[i / 2 * 4 + i % 2] + v[i / 2 * 4 + i % 2 + 2];
    // Of two lanes that have other rows of the same channels each goes on with half of them.
    int first = 0;
#pragma unroll
    for (int step = 0; step < 3; ++step) {
      const int distance = 4 << step, half = kSums >> (step + 1);
      const bool upper = threadIdx.x & distance;
      if (upper) first += half;
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        if (i >= half) continue;
        const float given = upper ? sums[i] : sums[i + half];
        const float kept = upper ? sums[i + half] : sums[i];
        sums[i] = kept + __shfl_xor_sync(~0u, given, distance);
      }
    }
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < kSums / 8; ++i) {
      const int of = first + i;
      s.sums[warp][of / 2 * 8 + threadIdx.x % 4 * 2 + of % 2] = sums[i];
    }
    sync_first<kConsumers>();
    for (int i = threadIdx.x; i < kImages * kChannels; i += kConsumers) {
      const int image = i / kChannels, channel = i % kChannels;
      float total = 0.f;
#pragma unroll
      for (int k = 0; k < kWarpsOfImage; ++k) total += s.sums[image * kWarpsOfImage + k][channel];
      s.means[image][channel] = total * (1.f / (C::kP * C::kQ));
    }
    sync_first<kConsumers>();
  }
};

}  // namespace plantune
