// Convolutions' sums: products of pixels with panels of weights, and what follows them.
//
// A panel has the weights of a few registers of outputs, one row for each channel that is read. It
// is multiplied by several pixels at once, with their sums in registers.

#pragma once

#include <algorithm>

#include "cpu/lanes.hpp"

namespace plantune {

struct Conv {
  int count, height, width, channels, rows, columns, outputs;
  int kernel_height, kernel_width, stride_y, stride_x, top, left, dilation_y, dilation_x;
};

// Channels of one sum: of 9,216 the error would be up to 1.5 of what is allowed (emulated).
constexpr int kDepth = 512;
// So many rows of weights ahead they are asked for.
constexpr int kAhead = 16;
constexpr int kFloatsOfLine = 16;
// How many registers hold sums, of 32, of 16, or of those for four numbers.
#if defined(__AVX512F__)
constexpr int kSums = 24;
#elif defined(__AVX2__)
constexpr int kSums = 12;
#else
constexpr int kSums = 4;
#endif
// More pixels at once have more addresses than there are registers for.
constexpr int kMostRows = 12;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <int kVectors>
struct Panel {
  static constexpr int kWidth = kVectors * kLanes;                     // outputs
  static constexpr int kRows = std::min(kMostRows, kSums / kVectors);  // pixels at once

  // sums[i] += x[i] * w of so many pixels, or = where it does not add.
  static void multiply(int pixels, const float* const* x, int depth, const float* w,
                       float* const* sums, bool adds) {
    for (int first = 0; first < depth; first += kDepth) {
      const int part = std::min(kDepth, depth - first);
      const float* const weights = w + size_t(first) * kWidth;
      // Nearly as many each time: few pixels make little use of a weight in a register.
      for (int i = 0, times = ceil_div(pixels, kRows); times > 0; --times) {
        const int rows = ceil_div(pixels - i, times);
        multiply_up_to<kRows>(rows, x + i, first, part, weights, sums + i, adds || first > 0);
        i += rows;
      }
    }
  }

  // Writes what follows from the sums of some outputs, of which `first` is the first.
  static void finish(const Conv& conv, const Epilogue& epilogue, const float* sums, int first,
                     size_t pixel, float* y) {
    const size_t place = pixel * conv.outputs + first;
    const float* const bias = epilogue.bias == nullptr ? nullptr : epilogue.bias + first;
    for_channels(std::min(kWidth, conv.outputs - first), [&](int o, auto type) {
      using T = decltype(type);
      const float* const residual =
          epilogue.residual == nullptr ? nullptr : epilogue.residual + place + o;
      const T sum = load<T>(sums + o) + load_or_zero<T>(bias, o);
      const T value = before_offset(sum, epilogue, residual);
      store(y + place + o, with_offset(value, epilogue));
      if (epilogue.unshifted != nullptr) store(epilogue.unshifted + place + o, value);
    });
  }

 private:
  // What `multiply` does, of some channels and up to kPixels pixels.
  template <int kPixels>
  static void multiply_up_to(int pixels, const float* const* x, int first, int channels,
                             const float* w, float* const* sums, bool adds) {
    if (pixels == kPixels) {
      multiply_rows<kPixels>(x, first, channels, w, sums, adds);
    } else if constexpr (kPixels > 1) {
      multiply_up_to<kPixels - 1>(pixels, x, first, channels, w, sums, adds);
    }
  }

  // The same of just as many pixels: their sums stay in registers.
  template <int kPixels>
  static void multiply_rows(const float* const* x, int first, int channels, const float* w,
                            float* const* sums, bool adds) {
    Lanes products[kPixels][kVectors] = {};
    for (int c = first; c < first + channels; ++c, w += kWidth) {
      for (int i = 0; i < kWidth; i += kFloatsOfLine) __builtin_prefetch(w + kAhead * kWidth + i);
      Lanes weights[kVectors];
      for (int v = 0; v < kVectors; ++v) weights[v] = load<Lanes>(w + v * kLanes);
      for (int i = 0; i < kPixels; ++i) {
        for (int v = 0; v < kVectors; ++v) products[i][v] += weights[v] * x[i][c];
      }
    }
    for (int i = 0; i < kPixels; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        float* const sum = sums[i] + v * kLanes;
        if (adds) products[i][v] += load<Lanes>(sum);
        store(sum, products[i][v]);
      }
    }
  }
};

// How many registers the panels for so many outputs have: those that leave fewest lanes empty, and
// of these the most, which make most use of a pixel.
inline int vectors_for(int outputs) {
  const auto lanes = [=](int vectors) { return ceil_div(outputs, vectors * kLanes) * vectors; };
  const int few = lanes(2) <= lanes(1) ? 2 : 1;
  return lanes(4) <= lanes(few) ? 4 : few;
}

// Calls `body` with the kind of panel for so many outputs.
template <typename Body>
inline void with_panel(int outputs, Body body) {
  switch (vectors_for(outputs)) {
    case 1:
      return body(Panel<1>{});
    case 2:
      return body(Panel<2>{});
    default:
      return body(Panel<4>{});
  }
}

}  // namespace plantune
