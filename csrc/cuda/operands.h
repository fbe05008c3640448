// Operands of several element types: lists of types, and neighbouring elements of each operand.
//
// What is read becomes float, what is stored is rounded once; in between nothing has a type.

#pragma once

#include "cuda/vector.h"

namespace plantune {

/// The element types of some operands, in order.
template <typename... Ts>
struct Types {};

template <int k, typename List>
struct TypeAt;
template <int k, typename T, typename... Rest>
struct TypeAt<k, Types<T, Rest...>> : TypeAt<k - 1, Types<Rest...>> {};
template <typename T, typename... Rest>
struct TypeAt<0, Types<T, Rest...>> {
  using Type = T;
};

/// A number that is known when this is compiled.
template <int k>
struct Number {
  static constexpr int kValue = k;
};

/// Calls `what` with Number<0>, Number<1>, ... below kCount.
template <int kCount, int k = 0, typename What>
__device__ __forceinline__ void each(What&& what) {
  if constexpr (k < kCount) {
    what(Number<k>{});
    each<kCount, k + 1>(what);
  }
}

/// kSize neighbours of any type; more than 16 bytes are several words.
template <typename T, int kSize>
struct Neighbours {
  static constexpr int kOfWord = smaller(kSize, kWordBytes / int(sizeof(T)));
  static constexpr int kWords = kSize / kOfWord;
  static_assert(kSize % kOfWord == 0, "neighbours are whole words");

  Vector<T, kOfWord> words[kWords];

  template <bool kAligned>
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w].template load<kAligned>(from + w * kOfWord);
  }

  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w].store(to + w * kOfWord);
  }

  __device__ __forceinline__ float operator[](int i) const {
    return words[i / kOfWord][i % kOfWord];
  }

  __device__ __forceinline__ T& at(int i) { return words[i / kOfWord].values[i % kOfWord]; }

  /// Rounds each of kSize numbers once.
  __device__ __forceinline__ void round(const float* from) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w].round(from + w * kOfWord);
  }
};

}  // namespace plantune
