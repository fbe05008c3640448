// Images one after the other along their channels, and what follows place by place.
//
//   x[s]  (N, pixels, channels of image s), nhwc; pixels may be further apart, by pitch[s] elements
//   y     (N, pixels, kChannels) =  Expression(value * scale[channel] + bias[channel])
//
// Images are of up to two element types, y is of its own. A thread keeps its channels from pixel to pixel, so that it looks for their image once.
// All arithmetic is float; deterministic.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/launch.h"
#include "cuda/parameter.h"
#include "cuda/operands.h"

namespace plantune {

/// Join says where images begin among the channels; a thread reads kVectors pixels at once.
template <typename Join>
struct Concat {
  using T = typename Join::T;          // of images
  using Other = typename Join::Other;  // of those of kOther
  using Expression = typename Join::Expression;
  static constexpr int kSources = Join::kSources, kChannels = Join::kBegins[kSources];
  static constexpr int kVector = Join::kVector, kVectors = Join::kVectors;
  static constexpr int kThreads = Join::kThreads;
  static constexpr int kColumns = kChannels / kVector;
  static constexpr int kOfBlock = smaller(kColumns, kThreads);
  static constexpr int kLanes = kThreads / kOfBlock;  // pixels that a block reads at once
  using Word = Neighbours<T, kVector>;
  using OtherWord = Neighbours<Other, kVector>;

  static_assert(kChannels % kVector == 0, "a vector is of one image");

  struct Arguments {
    const void* x[kSources];
    int pitch[kSources];
    typename Join::Y* y;
    long long pixels;  // of all images
    Parameter scale, bias;
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    const int column = blockIdx.y * kOfBlock + threadIdx.x % kOfBlock;
    const int lane = threadIdx.x / kOfBlock, channel = column * kVector;
    const long long first = blockIdx.x * (long long)(kVectors)*kLanes + lane;
    release_successor();
    wait_for_predecessor();
    if (lane >= kLanes || column >= kColumns) return;

    const void* from = a.x[0];
    int begin = 0, pitch = a.pitch[0];
    bool other = Join::kOther[0];
#pragma unroll
    for (int s = 1; s < kSources; ++s) {
      if (channel < Join::kBegins[s]) continue;
      from = a.x[s];
      begin = Join::kBegins[s], pitch = a.pitch[s];
      other = Join::kOther[s];
    }
    other &= Join::kMixed;
    Word x[kVectors];
    OtherWord z[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const long long pixel = first + i * kLanes;
      if (pixel >= a.pixels) continue;
      const long long at = pixel * pitch + channel - begin;
      if (other) {
        z[i].template load<kAligned>(static_cast<const Other*>(from) + at);
      } else {
        x[i].template load<kAligned>(static_cast<const T*>(from) + at);
      }
    }
    float scale[kVector], bias[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      scale[k] = Join::kScale ? load_parameter<T>(a.scale, channel + k) : 1.f;
      bias[k] = Join::kBias ? load_parameter<T>(a.bias, channel + k) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const long long pixel = first + i * kLanes;
      if (pixel >= a.pixels) continue;
      float y[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        float value = other ? z[i][k] : x[i][k];
        if constexpr (Join::kScale) value *= scale[k];
        if constexpr (Join::kBias) value += bias[k];
        y[k] = Expression::of({value});
      }
      Neighbours<typename Join::Y, kVector> rounded;
      rounded.round(y);
      rounded.store(a.y + pixel * kChannels + channel);
    }
  }
};

}  // namespace plantune
