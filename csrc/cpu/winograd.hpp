// 3x3 convolution of stride 1 and padding 1 with fewer products (Winograd, Karatsuba).
//
// y = A [(G w) * (B x)] along each axis of the image: the input is transformed tile by tile, one
// product per place of the transformed tile sums over the channels, the result is transformed
// back. This header holds the two transforms; the products are a grouped 1x1 convolution between.
//
//   x  (count, height, width, channels)              input, nhwc
//   v  (tiles, kProducts * kProducts, channels)      transformed input, written by transform_input
//   m  (tiles, kProducts * kProducts, channels)      products, read by transform_output
//   y  (count, height, width, channels) =            output, nhwc; every element is written
//
// Sizes are arguments, so one compiled library serves every network. Deterministic: each element is
// made by one thread in a fixed order, from sums alone, so that every instruction set gives the
// same bits.

#pragma once

#include "cpu/lanes.hpp"

namespace plantune {

// Images in nhwc. Height and width are even: tiles of 2x2 outputs cover an image exactly.
struct Images {
  int count, height, width, channels;
};

// F(2, 3): four inputs, one over each border, give two outputs by four products.
struct Winograd {
  static constexpr int kReads = 4;
  static constexpr int kProducts = 4;
  static constexpr int kBorder = 1;

  template <typename T>
  static void input(T* v, const T* d) {
    v[0] = d[0] - d[2];
    v[1] = d[1] + d[2];
    v[2] = d[2] - d[1];
    v[3] = d[1] - d[3];
  }

  template <typename T>
  static void output(T* y, const T* m) {
    y[0] = m[0] + m[1] + m[2];
    y[1] = m[1] - m[2] - m[3];
  }
};

// An image of 2x2 is one tile: its padding is known to be zero, so three products a row give both
// outputs.
struct Karatsuba {
  static constexpr int kReads = 2;
  static constexpr int kProducts = 3;
  static constexpr int kBorder = 0;

  template <typename T>
  static void input(T* v, const T* d) {
    v[0] = d[0];
    v[1] = d[0] + d[1];
    v[2] = d[1];
  }

  template <typename T>
  static void output(T* y, const T* m) {
    y[0] = m[1] + m[2];
    y[1] = m[1] + m[0];
  }
};

template <typename Algorithm>
struct TiledConv {
  static constexpr int kOutputs = 2;
  static constexpr int kReads = Algorithm::kReads;
  static constexpr int kProducts = Algorithm::kProducts;

  static void transform_input(const Images& images, const float* x, float* v) {
    const int channels = images.channels, tiles = tiles_of(images);
#pragma omp parallel for schedule(static)
    for (int tile = 0; tile < tiles; ++tile) {
      const float* pixels[kReads][kReads];
      find_pixels(images, x, tile, pixels);
      float* const to = v + size_t(tile) * kProducts * kProducts * channels;
      for_channels(channels, [&](int c, auto type) {
        transform_tile<decltype(type)>(pixels, to, channels, c);
      });
    }
  }

  // y = Function(A m + bias + residual) + offset.
  static void transform_output(const Images& images, const float* m, const Epilogue& epilogue,
                               float* y) {
    const int channels = images.channels, tiles = tiles_of(images);
#pragma omp parallel for schedule(static)
    for (int tile = 0; tile < tiles; ++tile) {
      const float* const from = m + size_t(tile) * kProducts * kProducts * channels;
      const size_t place = first_pixel(images, tile, 0) * channels;
      Epilogue here = epilogue;
      if (here.residual != nullptr) here.residual += place;
      for_channels(channels, [&](int o, auto type) {
        finish_tile<decltype(type)>(images, from, here, y + place, o);
      });
    }
  }

 private:
  static int tiles_of(const Images& images) {
    return images.count * (images.height / kOutputs) * (images.width / kOutputs);
  }

  // The first pixel that a tile writes, moved by `border` to the one that it reads.
  static ptrdiff_t first_pixel(const Images& images, int tile, int border) {
    const int rows = images.height / kOutputs, columns = images.width / kOutputs;
    const ptrdiff_t image = tile / (rows * columns);
    const ptrdiff_t row = tile / columns % rows * kOutputs - border;
    const ptrdiff_t column = tile % columns * kOutputs - border;
    return (image * images.height + row) * images.width + column;
  }

  // Null outside of the image, where pixels are zero.
  static void find_pixels(const Images& images, const float* x, int tile,
                          const float* (*pixels)[kReads]) {
    const int rows = images.height / kOutputs, columns = images.width / kOutputs;
    const int top = tile / columns % rows * kOutputs - Algorithm::kBorder;
    const int left = tile % columns * kOutputs - Algorithm::kBorder;
    const ptrdiff_t first = first_pixel(images, tile, Algorithm::kBorder);
    for (int i = 0; i < kReads; ++i) {
      for (int j = 0; j < kReads; ++j) {
        const bool inside = top + i >= 0 && top + i < images.height && left + j >= 0 &&
                            left + j < images.width;
        const ptrdiff_t pixel = first + ptrdiff_t(i) * images.width + j;
        pixels[i][j] = inside ? x + pixel * images.channels : nullptr;
      }
    }
  }

  template <typename T>
  static void transform_tile(const float* (*pixels)[kReads], float* to, int channels, int c) {
    T rows[kProducts][kReads];
    for (int j = 0; j < kReads; ++j) {
      T column[kReads], transformed[kProducts];
      for (int i = 0; i < kReads; ++i) column[i] = load_or_zero<T>(pixels[i][j], c);
      Algorithm::input(transformed, column);
      for (int a = 0; a < kProducts; ++a) rows[a][j] = transformed[a];
    }
    for (int a = 0; a < kProducts; ++a) {
      T transformed[kProducts];
      Algorithm::input(transformed, rows[a]);
      for (int b = 0; b < kProducts; ++b) {
        store(to + ptrdiff_t(a * kProducts + b) * channels + c, transformed[b]);
      }
    }
  }

  template <typename T>
  static void finish_tile(const Images& images, const float* from, const Epilogue& epilogue,
                          float* y, int o) {
    T columns[kOutputs][kProducts];
    for (int a = 0; a < kProducts; ++a) {
      T products[kProducts], summed[kOutputs];
      for (int b = 0; b < kProducts; ++b) {
        products[b] = load<T>(from + ptrdiff_t(a * kProducts + b) * images.channels + o);
      }
      Algorithm::output(summed, products);
      for (int j = 0; j < kOutputs; ++j) columns[j][a] = summed[j];
    }
    const T shift = load_or_zero<T>(epilogue.bias, o);
    for (int j = 0; j < kOutputs; ++j) {
      T results[kOutputs];
      Algorithm::output(results, columns[j]);
      for (int i = 0; i < kOutputs; ++i) {
        const size_t place = size_t(i * images.width + j) * images.channels + o;
        const float* const residual =
            epilogue.residual == nullptr ? nullptr : epilogue.residual + place;
        store(y + place, finished(results[i] + shift, epilogue, residual));
      }
    }
  }
};

}  // namespace plantune
