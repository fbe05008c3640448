// Convolutions that read every weight once for up to 64 pixels, and ask for the next ones ahead.
//
//   x  (count, height, width, channels)                        input, nhwc
//   w  (panels, kernel_height * kernel_width, channels, kWidth)  weights of kWidth outputs a panel,
//                                                              zeros beyond the last output
//   y  (count, rows, columns, outputs) =                       output, nhwc
//
// A thread takes a panel of outputs and a chunk of pixels. It goes through the kernel's places: at
// each the pixels that read inside of the image are multiplied by that place's weights, a few
// pixels at once, with sums in registers. Padding costs nothing. With one image the weights of
// small ones are all that there is to move: for 9.4 MB of 512 x 512 channels that no cache held, a
// first version of this loop took 379 us, oneDNN's kernel on packed weights 779 (2 cores of a Xeon
// with AVX-512, 2026-11-28).
//
// Deterministic: each element is made by one thread, from sums of one place and up to kDepth
// channels.

#include <algorithm>

#include "cpu/lanes.hpp"

extern "C" int omp_get_max_threads();

namespace {

using plantune::Epilogue;
using plantune::kLanes;
using plantune::Lanes;

constexpr int kVectors = 4;
constexpr int kWidth = kVectors * kLanes;
// Pixels at once: their sums take most of 32 or 16 registers.
#if defined(__AVX512F__)
constexpr int kRows = 6;
#elif defined(__AVX2__)
constexpr int kRows = 3;
#else
constexpr int kRows = 1;
#endif
// The most pixels of a chunk: the sums of all stay in the nearest cache.
constexpr int kChunk = 64;
// Channels of one sum: of 9,216 the error would be up to 1.5 of what is allowed (emulated).
constexpr int kDepth = 512;
// So many rows of weights ahead they are asked for.
constexpr int kAhead = 16;
constexpr int kFloatsOfLine = 16;

struct Conv {
  int count, height, width, channels, rows, columns, outputs;
  int kernel_height, kernel_width, stride_y, stride_x, top, left, dilation_y, dilation_x;
};

// sums[i] += x[i] * w of so many pixels and channels from `first` on, for kWidth outputs.
template <int kPixels>
void multiply(const float* const* x, int first, int channels, const float* w, float* const* sums) {
  Lanes products[kPixels][kVectors] = {};
  for (int c = first; c < first + channels; ++c, w += kWidth) {
    for (int i = 0; i < kWidth; i += kFloatsOfLine) __builtin_prefetch(w + kAhead * kWidth + i);
    Lanes weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = plantune::load<Lanes>(w + v * kLanes);
    for (int i = 0; i < kPixels; ++i) {
      for (int v = 0; v < kVectors; ++v) products[i][v] += weights[v] * x[i][c];
    }
  }
  for (int i = 0; i < kPixels; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      float* const sum = sums[i] + v * kLanes;
      plantune::store(sum, plantune::load<Lanes>(sum) + products[i][v]);
    }
  }
}

// The same for any number of pixels up to kPixels.
template <int kPixels>
void multiply_up_to(int pixels, const float* const* x, int first, int channels, const float* w,
                    float* const* sums) {
  if (pixels == kPixels) {
    multiply<kPixels>(x, first, channels, w, sums);
  } else if constexpr (kPixels > 1) {
    multiply_up_to<kPixels - 1>(pixels, x, first, channels, w, sums);
  }
}

// Some output pixels, one after the other, and where the kernel begins for each of them.
struct Chunk {
  int pixels;
  int rows[kChunk], columns[kChunk];
  const float* images[kChunk];

  Chunk(const Conv& conv, const float* x, int first, int last) : pixels(last - first) {
    for (int i = 0; i < pixels; ++i) {
      const int pixel = first + i;
      rows[i] = pixel / conv.columns % conv.rows * conv.stride_y - conv.top;
      columns[i] = pixel % conv.columns * conv.stride_x - conv.left;
      const size_t image = pixel / conv.columns / conv.rows;
      images[i] = x + image * conv.height * conv.width * conv.channels;
    }
  }
};

// Adds what one place of the kernel contributes; `w` are its weights.
void add_place(const Conv& conv, const Chunk& chunk, int place, const float* w,
               float (*sums)[kWidth]) {
  const int down = place / conv.kernel_width * conv.dilation_y;
  const int across = place % conv.kernel_width * conv.dilation_x;
  const float* x[kChunk];
  float* to[kChunk];
  int inside = 0;
  for (int i = 0; i < chunk.pixels; ++i) {
    const int row = chunk.rows[i] + down, column = chunk.columns[i] + across;
    if (row < 0 || row >= conv.height || column < 0 || column >= conv.width) continue;
    x[inside] = chunk.images[i] + (size_t(row) * conv.width + column) * conv.channels;
    to[inside++] = sums[i];
  }
  for (int first = 0; first < conv.channels; first += kDepth) {
    const int channels = std::min(kDepth, conv.channels - first);
    const float* const part = w + size_t(first) * kWidth;
    for (int i = 0; i < inside; i += kRows) {
      multiply_up_to<kRows>(std::min(kRows, inside - i), x + i, first, channels, part, to + i);
    }
  }
}

// Writes what follows from the sums of some outputs, of which `first` is the first.
void finish(const Conv& conv, const Epilogue& epilogue, const float* sums, int first, size_t pixel,
            float* y) {
  const size_t place = pixel * conv.outputs + first;
  const float* const bias = epilogue.bias == nullptr ? nullptr : epilogue.bias + first;
  plantune::for_channels(std::min(kWidth, conv.outputs - first), [&](int o, auto type) {
    using T = decltype(type);
    const float* const residual =
        epilogue.residual == nullptr ? nullptr : epilogue.residual + place + o;
    const T sum = plantune::load<T>(sums + o) + plantune::load_or_zero<T>(bias, o);
    plantune::store(y + place + o, plantune::finished(sum, epilogue, residual));
  });
}

// A panel of outputs for the pixels from `first` to `last`.
void run_panel(const Conv& conv, const float* x, const float* w, const Epilogue& epilogue,
               int panel, int first, int last, float* y) {
  const int places = conv.kernel_height * conv.kernel_width;
  const size_t of_place = size_t(conv.channels) * kWidth;
  const Chunk chunk(conv, x, first, last);
  alignas(64) float sums[kChunk][kWidth];
  std::fill_n(sums[0], chunk.pixels * kWidth, 0.0f);
  for (int place = 0; place < places; ++place) {
    add_place(conv, chunk, place, w + (size_t(panel) * places + place) * of_place, sums);
  }
  for (int i = 0; i < chunk.pixels; ++i) {
    finish(conv, epilogue, sums[i], panel * kWidth, size_t(first) + i, y);
  }
}

}  // namespace

extern "C" {

// How many outputs a panel of weights has.
int direct_conv_width() { return kWidth; }

void direct_conv(const Conv* given, const float* x, const float* w, const Epilogue* epilogue,
                 float* y) {
  const Conv conv = *given;
  const int panels = (conv.outputs + kWidth - 1) / kWidth;
  const int pixels = conv.count * conv.rows * conv.columns;
  // Fewer panels than threads share their pixels.
  const int parts = (omp_get_max_threads() + panels - 1) / panels;
  const int size = std::max(1, std::min(kChunk, (pixels + parts - 1) / parts));
  const int chunks = (pixels + size - 1) / size;
#pragma omp parallel for schedule(static)
  for (int task = 0; task < panels * chunks; ++task) {
    const int first = task % chunks * size;
    const int last = std::min(pixels, first + size);
    run_panel(conv, x, w, *epilogue, task / chunks, first, last, y);
  }
}

}  // extern "C"
