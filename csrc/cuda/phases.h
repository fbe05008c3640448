// The gradient of an image under a convolution or pool with a stride: only every so many rows and
// columns of it, a phase, are read by the same taps.

#pragma once

namespace plantune {

/// The taps of a phase along one axis: so many, from the first on, of pixels after a padding.
struct PhaseTaps {
  int first, count, pad;
};

__host__ __device__ constexpr PhaseTaps phase_taps(int taps, int padding, int phases, int phase) {
  const int before = padding - phase, first = (before + phases) % phases;
  return {first, (taps - first + phases - 1) / phases, (before - first) / phases};
}

}  // namespace plantune
