// Numbers in another type, where they are.
//
//   out[i] = in[i], rounded once    for each i < count
//
// A thread takes kWords times kEach neighbours, which leave as one word: threads write side by side,
// for parts of sectors took half as long again. It asks for all of them before it writes any. `out`
// begins at a whole word; `in` does if kAligned. Deterministic.

#pragma once

#include "cuda/image_layout.h"

namespace plantune {

template <typename In, typename Out, int kThreads, int kWords>
struct Cast {
  static constexpr int kEach = kWordBytes / int(sizeof(Out));
  static constexpr int kIn = smaller(kEach, kWordBytes / int(sizeof(In)));

  struct Arguments {
    Out* out;
    const In* in;
    long long count;
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const long long block = blockIdx.x * (long long)(kThreads)*kWords;
    alignas(16) In read[kWords][kEach];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const long long first = (block + w * kThreads + threadIdx.x) * kEach;
      if (first + kEach <= a.count) load<kAligned>(a.in + first, read[w]);
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const long long first = (block + w * kThreads + threadIdx.x) * kEach;
      if (first + kEach <= a.count) {
        store_word(a.out + first, read[w]);
      } else {
        for (long long i = first; i < a.count; ++i) a.out[i] = Converted<Out>::of(a.in[i]);
      }
    }
  }

 private:
  template <bool kAligned>
  static __device__ __forceinline__ void load(const In* from, In (&to)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach; i += kIn) {
      load_word<kAligned>(reinterpret_cast<In(&)[kIn]>(to[i]), from + i);
    }
  }
};

}  // namespace plantune
