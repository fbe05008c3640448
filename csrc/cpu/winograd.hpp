// 3x3 convolution of stride 1 and padding 1 with fewer products (Winograd, Karatsuba).
//
// y = A [(G w) * (B x)] along each axis of the image: the input is transformed tile by tile, one
// product per place of the transformed tile sums over the channels, the result is transformed
// back. This header holds the two transforms; the products are a grouped 1x1 convolution between.
//
//   x  (kImages, kHeight, kWidth, kIn)               input, nhwc
//   v  (tiles, kProducts * kProducts, kIn)           transformed input, written by transform_input
//   m  (tiles, kProducts * kProducts, kOut)          products, read by transform_output
//   y  (kImages, kHeight, kWidth, kOut) =            output, nhwc; every element is written
//
// Deterministic: each element is made by one thread in a fixed order.

#pragma once

#include <cstddef>
#include <cstring>

namespace plantune {

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

template <typename T>
inline T load(const float* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
inline void store(float* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// Calls `body` for all channels: kLanes at once, then one by one.
template <int kChannels, typename Body>
inline void for_channels(Body body) {
  int c = 0;
  for (; c + kLanes <= kChannels; c += kLanes) body(c, Lanes{});
  for (; c < kChannels; ++c) body(c, 0.0f);
}

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

// An image of two: its padding is known to be zero, so three products give both outputs.
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

template <typename Algorithm, int kImages, int kHeight, int kWidth, int kIn, int kOut>
struct TiledConv {
  static constexpr int kOutputs = 2;
  static constexpr int kReads = Algorithm::kReads;
  static constexpr int kProducts = Algorithm::kProducts;
  static constexpr int kRows = kHeight / kOutputs;
  static constexpr int kColumns = kWidth / kOutputs;
  static constexpr int kTiles = kImages * kRows * kColumns;

  static_assert(kHeight % kOutputs == 0 && kWidth % kOutputs == 0,
                "the tiles cover the image exactly, so its sizes are even");
  static_assert(Algorithm::kBorder == 1 || (kRows == 1 && kColumns == 1),
                "without a border a tile is the whole image");

  static void transform_input(const float* x, float* v) {
#pragma omp parallel for schedule(static)
    for (int tile = 0; tile < kTiles; ++tile) {
      const float* pixels[kReads][kReads];
      find_pixels(x, tile, pixels);
      float* const to = v + size_t(tile) * kProducts * kProducts * kIn;
      for_channels<kIn>([&](int c, auto type) { transform_tile<decltype(type)>(pixels, to, c); });
    }
  }

  // y = max(A m + bias + residual, least); `bias` and `residual` may be null. Without a ReLU
  // `least` is minus infinity. NaN stays NaN: it is not less than anything.
  static void transform_output(const float* m, const float* bias, const float* residual,
                               float least, float* y) {
    static const float zeros[kOut] = {};
#pragma omp parallel for schedule(static)
    for (int tile = 0; tile < kTiles; ++tile) {
      const float* const from = m + size_t(tile) * kProducts * kProducts * kOut;
      const size_t place = first_pixel(tile, 0) * kOut;
      const float* const shift = bias != nullptr ? bias : zeros;
      const float* const other = residual != nullptr ? residual + place : nullptr;
      for_channels<kOut>([&](int o, auto type) {
        finish_tile<decltype(type)>(from, shift, other, least, y + place, o);
      });
    }
  }

 private:
  // The first pixel that a tile writes, moved by `border` to the one that it reads.
  static ptrdiff_t first_pixel(int tile, int border) {
    const ptrdiff_t image = tile / (kRows * kColumns);
    const ptrdiff_t row = tile / kColumns % kRows * kOutputs - border;
    const ptrdiff_t column = tile % kColumns * kOutputs - border;
    return (image * kHeight + row) * kWidth + column;
  }

  // Outside of the image pixels are zero.
  static void find_pixels(const float* x, int tile, const float* (*pixels)[kReads]) {
    static const float zeros[kIn] = {};
    const int top = tile / kColumns % kRows * kOutputs - Algorithm::kBorder;
    const int left = tile % kColumns * kOutputs - Algorithm::kBorder;
    const ptrdiff_t first = first_pixel(tile, Algorithm::kBorder);
    for (int i = 0; i < kReads; ++i) {
      for (int j = 0; j < kReads; ++j) {
        const bool inside =
            top + i >= 0 && top + i < kHeight && left + j >= 0 && left + j < kWidth;
        pixels[i][j] = inside ? x + (first + i * kWidth + j) * kIn : zeros;
      }
    }
  }

  template <typename T>
  static void transform_tile(const float* (*pixels)[kReads], float* to, int c) {
    T rows[kProducts][kReads];
    for (int j = 0; j < kReads; ++j) {
      T column[kReads], transformed[kProducts];
      for (int i = 0; i < kReads; ++i) column[i] = load<T>(pixels[i][j] + c);
      Algorithm::input(transformed, column);
      for (int a = 0; a < kProducts; ++a) rows[a][j] = transformed[a];
    }
    for (int a = 0; a < kProducts; ++a) {
      T transformed[kProducts];
      Algorithm::input(transformed, rows[a]);
      for (int b = 0; b < kProducts; ++b) {
        store(to + (a * kProducts + b) * kIn + c, transformed[b]);
      }
    }
  }

  template <typename T>
  static void finish_tile(const float* from, const float* bias, const float* residual, float least,
                          float* y, int o) {
    T columns[kOutputs][kProducts];
    for (int a = 0; a < kProducts; ++a) {
      T products[kProducts], summed[kOutputs];
      for (int b = 0; b < kProducts; ++b) {
        products[b] = load<T>(from + (a * kProducts + b) * kOut + o);
      }
      Algorithm::output(summed, products);
      for (int j = 0; j < kOutputs; ++j) columns[j][a] = summed[j];
    }
    const T floor = T{} + least;
    const T shift = load<T>(bias + o);
    for (int j = 0; j < kOutputs; ++j) {
      T results[kOutputs];
      Algorithm::output(results, columns[j]);
      for (int i = 0; i < kOutputs; ++i) {
        const size_t place = size_t(i * kWidth + j) * kOut + o;
        T value = results[i] + shift;
        if (residual != nullptr) value += load<T>(residual + place);
        store(y + place, value < floor ? floor : value);
      }
    }
  }
};

}  // namespace plantune
