// A chain of pointwise ops over tensors that are broadcast to one shape, as one float expression.
//
//   out[j][i] = element j of Chain::evaluate(in[0][...], in[1][...], ...)    for each i < count
//
// Chain says, for each input, how far apart its elements are along each axis of the outputs, 0
// where it is broadcast; axes are merged where they can be, and the last one is the innermost. An
// image of the outputs' shape in nhwc may be a slice of the channels of another (kCut, pitch).
// Outputs are dense and written by `=`; each is rounded once. A thread takes kVectors times kWidth
// neighbours. Deterministic.

#pragma once

#include "cuda/arithmetic.h"
#include "cuda/broadcast.h"
#include "cuda/launch.h"
#include "cuda/vector.h"

namespace plantune {

template <typename Chain>
struct Pointwise {
  using T = typename Chain::T;        // of the outputs
  using From = typename Chain::From;  // of the inputs
  using Index = typename Chain::Index;
  static constexpr int kInputs = Chain::kInputs, kOutputs = Chain::kOutputs;
  static constexpr int kAxes = Chain::kAxes, kWidth = Chain::kWidth, kVectors = Chain::kVectors;
  using Word = Vector<T, kWidth>;
  using Read = Vector<From, kWidth>;

  static_assert(kAxes == 1 || Chain::kSizes[kAxes - 1] % kWidth == 0,
                "a vector does not reach over the end of the innermost axis");

  struct Arguments {
    const From* in[kInputs];
    T* out[kOutputs];
    long long count;
    long long pitch[kInputs];  // between pixels of an input that is a slice of channels; else 0
  };

  /// Neighbours of a slice of channels: pixels are further apart than it is wide.
  template <bool kAligned>
  static __device__ __forceinline__ void load_cut(const From* from, Index pitch, Index i, int there,
                                                  Read& to) {
    constexpr Index kChannels = Chain::kChannels;
    if (kAligned && kChannels % kWidth == 0 && there == kWidth) {
      to.template load<true>(from + i / kChannels * pitch + i % kChannels);
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const Index at = i + e;
        if (e < there) to.values[e] = from[at / kChannels * pitch + at % kChannels];
      }
    }
  }

  /// Neighbours are side by side, one and the same element, or apart.
  template <bool kAligned>
  static __device__ __forceinline__ void load(const From* from, int input, Index i, int there,
                                              Read& to) {
    const int stride = Chain::kStrides[input][kAxes - 1];
    from += place_in<Chain>(input, i);
    if (stride == 0) {
      to.values[0] = *from;
    } else if (stride == 1 && there == kWidth) {
      to.template load<kAligned>(from);
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if (e < there) to.values[e] = from[Index(e) * stride];
      }
    }
  }

  static __device__ __forceinline__ void evaluate(const Read (&in)[kInputs],
                                                  float (&out)[kOutputs][kWidth]) {
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      float x[kInputs], y[kOutputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        x[k] = in[k][Chain::kStrides[k][kAxes - 1] == 0 ? 0 : e];
      }
      Chain::evaluate(x, y);
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) out[j][e] = y[j];
    }
  }

  static __device__ __forceinline__ void store(T* to, int there, const float (&from)[kWidth]) {
    Word word;
    word.round(from);
    if (there == kWidth) {
      word.store(to);
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        if (e < there) to[e] = word.values[e];
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
    Read in[kVectors][kInputs];
    const long long block = blockIdx.x * (long long)(kVectors)*Chain::kThreads;
    long long first[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      first[v] = (block + v * Chain::kThreads + threadIdx.x) * kWidth;
      if (first[v] >= a.count) continue;
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        const int there = elements_at(a, first[v]);
        if (Chain::kCut[k] && a.pitch[k]) {
          load_cut<kAligned>(a.in[k], Index(a.pitch[k]), Index(first[v]), there, in[v][k]);
        } else {
          load<kAligned>(a.in[k], k, Index(first[v]), there, in[v][k]);
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first[v] >= a.count) continue;
      float out[kOutputs][kWidth];
      evaluate(in[v], out);
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) {
        store(a.out[j] + first[v], elements_at(a, first[v]), out[j]);
      }
    }
  }
};

}  // namespace plantune
