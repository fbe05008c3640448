// What becomes of a kernel's sums before they leave: an expression over the value that the kernel
// has, an element of a residual and an offset, and in the backward pass what a ReLU made, as nested
// types. Python writes the type:
//
//   PlusOffset<Applied<Relu, PlusResidual<Value>>>        relu(value + residual) + offset
//
// Relu is a function of the table in `plantune/graph/ops/functions.py`: a struct whose `of` takes
// and returns a float. All of it is float; the kernel rounds what it stores. `Inner` is the
// expression without its last part, for kernels that store that value, too.

#pragma once

#include "cuda/arithmetic.h"  // what the table's functions call

namespace plantune {

/// What an expression reads of one element. Where a binary serves steps with and without a
/// function, `applies` says which this is.
struct At {
  float value, residual = 0.f, offset = 0.f;
  bool applies = true;
  float saved = 0.f;
};

struct Value {
  static constexpr bool kResidual = false, kOffset = false, kSaved = false;
  static __device__ __forceinline__ float of(const At& at) { return at.value; }
};

template <class X>
struct PlusResidual : X {
  using Inner = X;
  static constexpr bool kResidual = true;
  static __device__ __forceinline__ float of(const At& at) { return X::of(at) + at.residual; }
};

template <class X>
struct PlusOffset : X {
  using Inner = X;
  static constexpr bool kOffset = true;
  static __device__ __forceinline__ float of(const At& at) { return X::of(at) + at.offset; }
};

/// How far apart numbers of a type are: of their size, and at least.
struct OfHalf {
  static constexpr float kStep = 0x1p-10f, kLeast = 0x1p-24f;
};
struct OfBfloat16 {
  static constexpr float kStep = 0x1p-7f, kLeast = 0x1p-126f;
};

/// An offset of a ReLU's result that leaves the sign of the result to be read.
template <class Numbers, class X>
struct PlusApart : X {
  using Inner = X;
  static constexpr bool kOffset = true;
  static __device__ __forceinline__ float of(const At& at) {
    return add_apart(X::of(at), at.offset, Numbers::kStep, Numbers::kLeast);
  }
};

/// The gradient of a ReLU whose result was saved with such an offset.
template <class X>
struct MaskedApart : X {
  using Inner = X;
  static constexpr bool kSaved = true, kOffset = true;
  static __device__ __forceinline__ float of(const At& at) {
    return apart_grad(X::of(at), at.saved, at.offset);
  }
};

/// The gradient of a ReLU whose result was saved.
template <class X>
struct Masked : X {
  using Inner = X;
  static constexpr bool kSaved = true;
  static __device__ __forceinline__ float of(const At& at) {
    return relu_grad(X::of(at), at.saved);
  }
};

template <class Function, class X>
struct Applied : X {
  using Inner = X;
  static __device__ __forceinline__ float of(const At& at) {
    const float x = X::of(at);
    return at.applies ? Function::of(x) : x;
  }
};

/// Of two neighbours.
template <class Expression>
__device__ __forceinline__ float2 evaluate(float2 value, float2 residual = {}, float offset = 0.f,
                                           float2 saved = {}) {
  return {Expression::of({value.x, residual.x, offset, true, saved.x}),
          Expression::of({value.y, residual.y, offset, true, saved.y})};
}

}  // namespace plantune
