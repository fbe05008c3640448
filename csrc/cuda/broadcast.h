// Where tensors that are broadcast to one shape have their elements.

#pragma once

namespace plantune {

/// Where an input of the chain has the element that belongs to element `i` of what it makes.
template <typename Chain>
__device__ __forceinline__ typename Chain::Index place_in(int input, typename Chain::Index i) {
  typename Chain::Index place = 0;
#pragma unroll
  for (int axis = Chain::kAxes - 1; axis > 0; --axis) {
    place += i % Chain::kSizes[axis] * Chain::kStrides[input][axis];
    i /= Chain::kSizes[axis];
  }
  return place + i * Chain::kStrides[input][0];
}

}  // namespace plantune
