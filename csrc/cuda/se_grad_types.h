// Of which element types the operands of SeGrad are, and how it reads them: between memory and its
// passes it holds one type.

#pragma once

#include "cuda/operands.h"
#include "cuda/vector.h"

namespace plantune {

/// The element types of operands that are all of one.
template <typename T>
struct SeGradTypes {
  using Held = T;
  using Layer = T;
  using Gradient = T;
  using Sum = T;
  template <int k>
  using Read = T;
  template <int k>
  using Small = T;
  template <int k>
  using Stored = T;
};

/// Several types: of both layers' weights, of what they read and of its gradients; of the gradients
/// of weights and biases; of the sums; of each image that is read, each small value, each image that
/// is stored.
template <typename Layer_, typename Gradient_, typename Sum_, typename Read_, typename Small_,
          typename Stored_>
struct SeGradMixed {
  using Held = float;
  using Layer = Layer_;
  using Gradient = Gradient_;
  using Sum = Sum_;
  template <int k>
  using Read = typename TypeAt<k, Read_>::Type;
  template <int k>
  using Small = typename TypeAt<k, Small_>::Type;
  template <int k>
  using Stored = typename TypeAt<k, Stored_>::Type;
};

/// An element of any type as one of those that are held.
template <typename From, typename Held>
__device__ __forceinline__ void take_held(From value, Held& to) {
  to = from_float<Held>(to_float(value));
}

template <typename Held>
__device__ __forceinline__ void take_held(Held value, Held& to) {
  to = value;
}

/// A vector of any type as one of those that are held.
template <bool kAligned, typename From, typename Held, int kSize>
__device__ __forceinline__ void load_held(const From* from, Vector<Held, kSize>& to) {
  Vector<From, kSize> found;
  found.template load<kAligned>(from);
#pragma unroll
  for (int e = 0; e < kSize; ++e) take_held(found.values[e], to.values[e]);
}

template <bool kAligned, typename Held, int kSize>
__device__ __forceinline__ void load_held(const Held* from, Vector<Held, kSize>& to) {
  to.template load<kAligned>(from);
}

/// Stores what is held in any type; what is held is float then, or has that type.
template <typename Held, int kSize, typename To>
__device__ __forceinline__ void store_held(const Vector<Held, kSize>& from, To* to) {
  Vector<To, kSize> word;
  word.round(from.values);
  word.store(to);
}

template <typename Held, int kSize>
__device__ __forceinline__ void store_held(const Vector<Held, kSize>& from, Held* to) {
  from.store(to);
}

}  // namespace plantune
