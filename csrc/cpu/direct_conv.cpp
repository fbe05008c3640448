// Convolutions that read every weight once for up to 64 pixels, and ask for the next ones ahead.
//
//   x  (count, height, width, channels)        input, nhwc; for patch_conv nchw
//   w  (panels, places, depth, width)          weights of so many outputs a panel, then zeros
//   y  (count, rows, columns, outputs) =       output, nhwc
//
// A thread takes a panel of outputs and a chunk of pixels, whose sums stay in the nearest cache.
// What a pixel reads is multiplied by weights, a few pixels at once, with sums in registers.
//
//   direct_conv   goes through the kernel's places: at each the pixels that read something inside
//                 are multiplied where they lie. Padding costs nothing. Depth is `channels`.
//   patch_conv    copies what the kernel covers of images of few channels, as one place: depth is
//                 channels * kernel_height * kernel_width, in this order. Of one channel at most
//                 kDepth numbers.
//   pooled_conv   makes the mean of each window, which is what the kernel stands for, and is a 1x1
//                 convolution of that: one place of depth `channels`.
//
// With one image the weights of small images are all that there is to move: for 9.4 MB of 512 x 512
// channels that no cache held, a first version of direct_conv took 379 us, oneDNN's kernel on
// packed weights 779 (2 cores of a Xeon with AVX-512, 2026-11-28).
//
// Deterministic: each element is made by one thread, from sums of one place and up to kDepth of its
// numbers.

#include "cpu/panels.hpp"

extern "C" int omp_get_max_threads();

namespace {

using namespace plantune;

// The most pixels of a chunk: the sums of all stay in the nearest cache.
constexpr int kChunk = 64;
static_assert(kDepth >= 512, "patch_conv copies up to so many pixels of a channel at once");

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

template <typename P>
using Sums = float[kChunk][P::kWidth];

struct Channels {
  int first, count;
};

// Adds what one place of the kernel contributes; `w` are its weights.
template <typename P>
void add_place(const Conv& conv, const Chunk& chunk, int place, const float* w, Sums<P>& sums) {
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
  P::multiply(inside, x, conv.channels, w, to, true);
}

// Writes what a pixel reads of some channels of an image, from a row and column on.
typedef void (*Fill)(const Conv&, Channels, const float* image, int row, int column, float* to);

// Adds the products of what `fill` writes for each pixel: `numbers` of each channel.
template <typename P>
void add_filled(const Conv& conv, const Chunk& chunk, int numbers, const float* w, Sums<P>& sums,
                Fill fill) {
  alignas(64) float room[kChunk][kDepth];
  const float* x[kChunk];
  float* to[kChunk];
  for (int i = 0; i < chunk.pixels; ++i) x[i] = room[i], to[i] = sums[i];
  const int at_once = kDepth / numbers;
  for (int first = 0; first < conv.channels; first += at_once) {
    const Channels part{first, std::min(at_once, conv.channels - first)};
    for (int i = 0; i < chunk.pixels; ++i) {
      fill(conv, part, chunk.images[i], chunk.rows[i], chunk.columns[i], room[i]);
    }
    const float* const weights = w + size_t(first) * numbers * P::kWidth;
    P::multiply(chunk.pixels, x, part.count * numbers, weights, to, true);
  }
}

// What the kernel covers of an image in nchw, zeros outside. Kernels of `kRun` columns are copied
// by runs where they lie inside.
template <int kRun>
void copy_patch(const Conv& conv, Channels part, const float* image, int row, int column,
                float* to) {
  const int last = column + (conv.kernel_width - 1) * conv.dilation_x;
  const bool is_run =
      conv.kernel_width == kRun && conv.dilation_x == 1 && column >= 0 && last < conv.width;
  for (int c = part.first; c < part.first + part.count; ++c) {
    const float* const plane = image + size_t(c) * conv.height * conv.width;
    for (int i = 0; i < conv.kernel_height; ++i, to += conv.kernel_width) {
      const int y = row + i * conv.dilation_y;
      const bool is_inside = y >= 0 && y < conv.height;
      const float* const from = is_inside ? plane + size_t(y) * conv.width : nullptr;
      if (is_inside && is_run) {
        std::memcpy(to, from + column, kRun * sizeof(float));
        continue;
      }
      for (int j = 0; j < conv.kernel_width; ++j) {
        const int x = column + j * conv.dilation_x;
        to[j] = is_inside && x >= 0 && x < conv.width ? from[x] : 0.0f;
      }
    }
  }
}

// The mean of each channel in a window of an image in nhwc; pixels outside count as zeros.
void average(const Conv& conv, Channels part, const float* image, int row, int column, float* to) {
  const float share = 1.0f / float(conv.kernel_height * conv.kernel_width);
  const int first_x = std::max(column, 0),
            last_x = std::min(column + conv.kernel_width, conv.width);
  const int first_y = std::max(row, 0), last_y = std::min(row + conv.kernel_height, conv.height);
  for_channels(part.count, [&](int c, auto type) {
    using T = decltype(type);
    T sum{};
    for (int y = first_y; y < last_y; ++y) {
      const float* const from = image + size_t(y) * conv.width * conv.channels + part.first + c;
      for (int x = first_x; x < last_x; ++x) {
        sum += load<T>(from + size_t(x) * conv.channels);
      }
    }
    store(to + c, sum * share);
  });
}

// A convolution whose `add` adds to sums what a chunk contributes to a panel.
template <typename P, typename Add>
void convolve_panels(const Conv& conv, const float* x, const Epilogue& epilogue, float* y,
                     Add add) {
  const int panels = ceil_div(conv.outputs, P::kWidth);
  const int pixels = conv.count * conv.rows * conv.columns;
  // Fewer panels than threads share their pixels.
  const int parts = ceil_div(omp_get_max_threads(), panels);
  const int size = std::max(1, std::min(kChunk, ceil_div(pixels, parts)));
  const int chunks = ceil_div(pixels, size);
#pragma omp parallel for schedule(static)
  for (int task = 0; task < panels * chunks; ++task) {
    const int panel = task / chunks, first = task % chunks * size;
    const Chunk chunk(conv, x, first, std::min(pixels, first + size));
    alignas(64) Sums<P> sums;
    std::fill_n(sums[0], chunk.pixels * P::kWidth, 0.0f);
    add(chunk, panel, sums);
    for (int i = 0; i < chunk.pixels; ++i) {
      P::finish(conv, epilogue, sums[i], panel * P::kWidth, size_t(first) + i, y);
    }
  }
}

// A convolution of what `fill` writes of each pixel: `numbers` of each channel.
void convolve_filled(const Conv& conv, int numbers, const float* x, const float* w,
                     const Epilogue& epilogue, float* y, Fill fill) {
  with_panel(conv.outputs, [&](auto kind) {
    using P = decltype(kind);
    const size_t of_panel = size_t(conv.channels) * numbers * P::kWidth;
    convolve_panels<P>(conv, x, epilogue, y, [&](const Chunk& chunk, int panel, Sums<P>& sums) {
      add_filled<P>(conv, chunk, numbers, w + panel * of_panel, sums, fill);
    });
  });
}

Fill copy_of(int kernel_width) {
  switch (kernel_width) {
    case 3:
      return copy_patch<3>;
    case 4:
      return copy_patch<4>;
    case 5:
      return copy_patch<5>;
    case 7:
      return copy_patch<7>;
    default:
      return copy_patch<8>;
  }
}

}  // namespace

extern "C" {

// How many outputs a panel of weights has, of so many in all.
int direct_conv_width(int outputs) { return vectors_for(outputs) * kLanes; }

void direct_conv(const Conv* conv, const float* x, const float* w, const Epilogue* epilogue,
                 float* y) {
  const int places = conv->kernel_height * conv->kernel_width;
  with_panel(conv->outputs, [&](auto kind) {
    using P = decltype(kind);
    const size_t of_place = size_t(conv->channels) * P::kWidth;
    convolve_panels<P>(*conv, x, *epilogue, y, [&](const Chunk& chunk, int panel, Sums<P>& sums) {
      for (int place = 0; place < places; ++place) {
        const float* const weights = w + (size_t(panel) * places + place) * of_place;
        add_place<P>(*conv, chunk, place, weights, sums);
      }
    });
  });
}

void patch_conv(const Conv* conv, const float* x, const float* w, const Epilogue* epilogue,
                float* y) {
  const int numbers = conv->kernel_height * conv->kernel_width;
  convolve_filled(*conv, numbers, x, w, *epilogue, y, copy_of(conv->kernel_width));
}

void pooled_conv(const Conv* conv, const float* x, const float* w, const Epilogue* epilogue,
                 float* y) {
  convolve_filled(*conv, 1, x, w, *epilogue, y, average);
}

}  // extern "C"
