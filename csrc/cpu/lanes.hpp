// Rows of channels, several numbers at once, and what follows a convolution's sums.

#pragma once

#include <cstddef>
#include <cstring>

#include "cpu/functions.hpp"

namespace plantune {

// As many as a register holds: with twice as many Winograd's tiles do not fit into 16 registers
// (Zen 3: half the speed, 2026-11-22).
#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

template <typename T>
inline T load(const float* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Of a null pointer zeros.
template <typename T>
inline T load_or_zero(const float* from, int place) {
  return from != nullptr ? load<T>(from + place) : T{};
}

template <typename T>
inline void store(float* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// Calls `body` for all channels: kLanes at once, then one by one.
template <typename Body>
inline void for_channels(int channels, Body body) {
  int c = 0;
  for (; c + kLanes <= channels; c += kLanes) body(c, Lanes{});
  for (; c < channels; ++c) body(c, 0.0f);
}

// What follows the sums: Function(sum + bias + residual) + offset. `bias` and `residual` may be
// null; the function may be left out, with the offset. `unshifted` is where the value before the
// offset goes, too, null if it does not leave.
struct Epilogue {
  const float *bias, *residual;
  float* unshifted;
  int applies;
  float offset;
};

template <typename T>
inline T before_offset(T sum, const Epilogue& epilogue, const float* residual) {
  if (residual != nullptr) sum += load<T>(residual);
  return epilogue.applies ? Function::of(sum) : sum;
}

template <typename T>
inline T with_offset(T value, const Epilogue& epilogue) {
  return epilogue.applies ? value + epilogue.offset : value;
}

template <typename T>
inline T finished(T sum, const Epilogue& epilogue, const float* residual) {
  return with_offset(before_offset(sum, epilogue, residual), epilogue);
}

}  // namespace plantune
