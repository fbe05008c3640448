// A chain of pointwise ops over tensors that are broadcast to one shape, as one float expression.
//
//   out[j][i] = element j of Chain::evaluate(in[0][...], in[1][...], ...)    for each i < count
//
// Each input and each output has an element type of its own. Chain says, for each input, how far
// apart its elements are along each axis of the outputs, 0 where it is broadcast; axes are merged
// where they can be, and the last one is the innermost. An image of the outputs' shape in nhwc may
// be a slice of the channels of another (kCut, pitch). Outputs are dense and written by `=`; each is
// rounded once. A thread takes kVectors times kWidth neighbours. Deterministic.

#pragma once

#include "cuda/arithmetic.h"
#include "cuda/broadcast.h"
#include "cuda/launch.h"
#include "cuda/operands.h"

namespace plantune {

template <typename Chain>
struct Pointwise {
  using Index = typename Chain::Index;
  static constexpr int kInputs = Chain::kInputs, kOutputs = Chain::kOutputs;
  static constexpr int kAxes = Chain::kAxes, kWidth = Chain::kWidth, kVectors = Chain::kVectors;
  template <int k>
  using Input = typename TypeAt<k, typename Chain::Inputs>::Type;
  template <int j>
  using Output = typename TypeAt<j, typename Chain::Outputs>::Type;

  static_assert(kAxes == 1 || Chain::kSizes[kAxes - 1] % kWidth == 0,
                "a vector does not reach over the end of the innermost axis");

  struct Arguments {
    const void* in[kInputs];
    void* out[kOutputs];
    long long count;
    long long pitch[kInputs];  // between pixels of an input that is a slice of channels; else 0
  };

  /// Whether all neighbours are one and the same element of an input.
  static constexpr bool is_one(int input) { return Chain::kStrides[input][kAxes - 1] == 0; }

  /// What a thread reads of the inputs from number k on, for one vector of the outputs.
  template <int k, bool kMore>
  struct ReadFrom {};
  template <int k>
  struct ReadFrom<k, true> : ReadFrom<k + 1, (k + 1 < kInputs)> {
    Neighbours<Input<k>, is_one(k) ? 1 : kWidth> own;
  };
  struct Read : ReadFrom<0, true> {
    template <int k>
    __device__ __forceinline__ auto& at() {
      return static_cast<ReadFrom<k, true>&>(*this).own;
    }
    template <int k>
    __device__ __forceinline__ float element(int e) const {
      return static_cast<const ReadFrom<k, true>&>(*this).own[is_one(k) ? 0 : e];
    }
  };

  /// Neighbours of a slice of channels: pixels are further apart than it is wide.
  template <bool kAligned, int k>
  static __device__ __forceinline__ void load_cut(const void* in, Index pitch, Index i, int there,
                                                  Read& to) {
    constexpr Index kChannels = Chain::kChannels;
    const auto* from = static_cast<const Input<k>*>(in);
    if (kAligned && kChannels % kWidth == 0 && there == kWidth) {
      to.template at<k>().template load<true>(from + i / kChannels * pitch + i % kChannels);
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const Index at = i + e;
        if (e < there) to.template at<k>().at(e) = from[at / kChannels * pitch + at % kChannels];
      }
    }
  }

  /// Neighbours are side by side, one and the same element, or apart.
  template <bool kAligned, int k>
  static __device__ __forceinline__ void load(const void* in, Index i, int there, Read& to) {
    constexpr int kStride = Chain::kStrides[k][kAxes - 1];
    const auto* from = static_cast<const Input<k>*>(in) + place_in<Chain>(k, i);
    if constexpr (kStride == 0) {
      to.template at<k>().at(0) = *from;
    } else {
      if (kStride == 1 && there == kWidth) {
        to.template at<k>().template load<kAligned>(from);
        return;
      }
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if (e < there) to.template at<k>().at(e) = from[Index(e) * kStride];
      }
    }
  }

  static __device__ __forceinline__ void evaluate(const Read& in, float (&out)[kOutputs][kWidth]) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      float x[kInputs], y[kOutputs];
      each<kInputs>([&](auto k) { x[k.kValue] = in.template element<k.kValue>(e); });
      Chain::evaluate(x, y);
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) out[j][e] = y[j];
    }
  }

  /// Writes an output's neighbours from element `i` on.
  template <int j>
  static __device__ __forceinline__ void store(void* out, long long i, int there,
                                               const float (&from)[kWidth]) {
    auto* to = static_cast<Output<j>*>(out) + i;
    Neighbours<Output<j>, kWidth> made;
    made.round(from);
    if (there == kWidth) {
      made.store(to);
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if (e < there) to[e] = made.at(e);
      }
    }
  }

  /// Of the vector that begins at `i`, how many elements there are; may be negative.
  static __device__ __forceinline__ int elements_at(const Arguments& a, long long i) {
    return a.count - i < kWidth ? int(a.count - i) : kWidth;
  }

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    Read in[kVectors];
    const long long block = blockIdx.x * (long long)(kVectors)*Chain::kThreads;
    long long first[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      first[v] = (block + v * Chain::kThreads + threadIdx.x) * kWidth;
      if (first[v] >= a.count) continue;
      const int there = elements_at(a, first[v]);
      each<kInputs>([&](auto number) {
        constexpr int k = decltype(number)::kValue;
        if (Chain::kCut[k] && a.pitch[k]) {
          load_cut<kAligned, k>(a.in[k], Index(a.pitch[k]), Index(first[v]), there, in[v]);
        } else {
          load<kAligned, k>(a.in[k], Index(first[v]), there, in[v]);
        }
      });
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first[v] >= a.count) continue;
      float out[kOutputs][kWidth];
      evaluate(in[v], out);
      each<kOutputs>([&](auto j) {
        store<j.kValue>(a.out[j.kValue], first[v], elements_at(a, first[v]), out[j.kValue]);
      });
    }
  }
};

}  // namespace plantune
