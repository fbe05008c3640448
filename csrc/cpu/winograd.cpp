// 3x3 convolutions of stride 1 with fewer products (Winograd, Karatsuba), a block of tiles at once.
//
// y = A [(G w) * (B x)] along each axis of the image: the input is transformed tile by tile, one
// product per place of the transformed tile sums over the channels, the result is transformed back.
//
//   x  (count, height, width, channels)             input, nhwc
//   w  (panels, places, channels, width)            transformed weights, as in direct_conv
//   y  (count, rows, columns, outputs) =            output, nhwc; every element is written
//   scratch  (threads, floats_of_block)             the transformed input of a block, and zeros
//
// A thread takes a block of tiles and some panels of outputs. The transformed input of a block is
// made once for these panels; it and the products of one panel stay in the cache of that thread.
//
// Deterministic: each element is made by one thread in a fixed order.

#include "cpu/panels.hpp"

extern "C" int omp_get_max_threads();
extern "C" int omp_get_thread_num();

namespace {

using namespace plantune;

// Outputs of a tile along each axis.
constexpr int kOutputs = 2;

// F(2, 3): four inputs give two outputs by four products. The first is where the kernel begins.
struct Winograd {
  static constexpr int kReads = 4;
  static constexpr int kProducts = 4;
  static constexpr bool kBeginsInside = false;

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
  static constexpr bool kBeginsInside = true;

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

// The most tiles of a block: fewer read the weights more often, more do not fit into the caches.
constexpr int kTiles = 32;
constexpr int kPlaces = Winograd::kProducts * Winograd::kProducts;

// From one place of a block to the next, of so many numbers a tile. Without the one line more all
// places of a tile would share few sets of the nearest cache.
constexpr size_t place_stride(int tiles, int numbers) {
  return size_t(tiles) * numbers + kFloatsOfLine;
}

// A transformed input of up to so many tiles, and zeros for a pixel outside of the image.
size_t floats_of_block(int tiles, int channels) {
  return kPlaces * place_stride(std::min(kTiles, tiles), channels) + channels;
}

struct Range {
  int first, last;

  int size() const { return last - first; }
};

struct Tile {
  int image, row, column;  // of the first output
};

template <typename Algorithm, typename P>
struct TiledConv {
  static constexpr int kReads = Algorithm::kReads;
  static constexpr int kProducts = Algorithm::kProducts;
  static constexpr int kAll = kProducts * kProducts;
  static constexpr int kWidth = P::kWidth;
  static constexpr size_t kStep = place_stride(kTiles, kWidth);  // from place to place of sums
  using Sums = float[kAll * kStep];

  const Conv& conv;
  const int down = ceil_div(conv.rows, kOutputs);
  const int across = ceil_div(conv.columns, kOutputs);
  const int tiles = conv.count * down * across;
  // From place to place of a transformed input.
  const size_t step = place_stride(std::min(kTiles, tiles), conv.channels);

  size_t scratch_floats() const { return floats_of_block(tiles, conv.channels); }

  void run(Range block, Range panels, const float* x, const float* w, const Epilogue& epilogue,
           float* y, float* scratch) const {
    float* const zeros = scratch + kPlaces * step;
    std::fill_n(zeros, conv.channels, 0.0f);
    for (int i = 0; i < block.size(); ++i) {
      float* const to = scratch + size_t(i) * conv.channels;
      transform_input(tile_at(block.first + i), x, zeros, to);
    }
    alignas(64) Sums sums;
    for (int panel = panels.first; panel < panels.last; ++panel) {
      multiply_tiles(block.size(), panel, scratch, w, sums);
      for (int i = 0; i < block.size(); ++i) {
        const float* const from = sums + i * kWidth;
        transform_output(tile_at(block.first + i), from, panel * kWidth, epilogue, y);
      }
    }
  }

 private:
  Tile tile_at(int index) const {
    return {index / (down * across), index / across % down * kOutputs, index % across * kOutputs};
  }

  // Fills the sums of a panel.
  void multiply_tiles(int count, int panel, const float* v, const float* w, Sums& sums) const {
    const size_t of_place = size_t(conv.channels) * kWidth;
    for (int place = 0; place < kAll; ++place) {
      const float* from[kTiles];
      float* to[kTiles];
      for (int i = 0; i < count; ++i) {
        from[i] = v + place * step + size_t(i) * conv.channels;
        to[i] = sums + place * kStep + i * kWidth;
      }
      const float* const weights = w + (size_t(panel) * kAll + place) * of_place;
      P::multiply(count, from, conv.channels, weights, to, false);
    }
  }

  // Writes a tile to (place, tile, channel).
  void transform_input(Tile tile, const float* x, const float* zeros, float* to) const {
    const int top = Algorithm::kBeginsInside ? 0 : tile.row - conv.top;
    const int left = Algorithm::kBeginsInside ? 0 : tile.column - conv.left;
    const float* const image = x + size_t(tile.image) * conv.height * conv.width * conv.channels;
    const float* pixels[kReads][kReads];  // zeros outside of the image
    for (int i = 0; i < kReads; ++i) {
      for (int j = 0; j < kReads; ++j) {
        const int row = top + i, column = left + j;
        const bool inside = row >= 0 && row < conv.height && column >= 0 && column < conv.width;
        const size_t pixel = size_t(row) * conv.width + column;
        pixels[i][j] = inside ? image + pixel * conv.channels : zeros;
      }
    }
    for_channels(conv.channels,
                 [&](int c, auto type) { transform_channels<decltype(type)>(pixels, to, c); });
  }

  template <typename T>
  void transform_channels(const float* (*pixels)[kReads], float* to, int c) const {
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
        store(to + (a * kProducts + b) * step + c, transformed[b]);
      }
    }
  }

  // Reads a tile from (place, tile, output) and writes its pixels.
  void transform_output(Tile tile, const float* sums, int first, const Epilogue& epilogue,
                        float* y) const {
    float results[kOutputs][kOutputs][kWidth];
    for (int o = 0; o < kWidth; o += kLanes) {
      Lanes columns[kOutputs][kProducts];
      for (int a = 0; a < kProducts; ++a) {
        Lanes products[kProducts], summed[kOutputs];
        for (int b = 0; b < kProducts; ++b) {
          products[b] = load<Lanes>(sums + (a * kProducts + b) * kStep + o);
        }
        Algorithm::output(summed, products);
        for (int j = 0; j < kOutputs; ++j) columns[j][a] = summed[j];
      }
      for (int j = 0; j < kOutputs; ++j) {
        Lanes pixels[kOutputs];
        Algorithm::output(pixels, columns[j]);
        for (int i = 0; i < kOutputs; ++i) store(results[i][j] + o, pixels[i]);
      }
    }
    for (int i = 0; i < kOutputs && tile.row + i < conv.rows; ++i) {
      for (int j = 0; j < kOutputs && tile.column + j < conv.columns; ++j) {
        const size_t row = size_t(tile.image) * conv.rows + tile.row + i;
        P::finish(conv, epilogue, results[i][j], first, row * conv.columns + tile.column + j, y);
      }
    }
  }
};

template <typename Algorithm, typename P>
void convolve_panels(const Conv& conv, const float* x, const float* w, const Epilogue& epilogue,
                     float* y, float* scratch, int most_threads) {
  const TiledConv<Algorithm, P> tiled{conv};
  const int tiles = tiled.tiles, panels = ceil_div(conv.outputs, P::kWidth);
  const int threads = std::min(most_threads, omp_get_max_threads());
  // Threads share the tiles, so that each writes whole pixels. Where that leaves them less than fit
  // into the registers they share the panels, so that each reads few weights.
  const int fitting = std::min(threads, std::max(1, tiles / P::kRows));
  const int groups = std::min(panels, ceil_div(threads, fitting));
  const int sharing = ceil_div(threads, groups);
  const int size = ceil_div(tiles, sharing * ceil_div(tiles, sharing * kTiles));
  const int blocks = ceil_div(tiles, size);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int task = 0; task < groups * blocks; ++task) {
    const int group = task / blocks, first = task % blocks * size;
    const Range some{group * panels / groups, (group + 1) * panels / groups};
    float* const own = scratch + omp_get_thread_num() * tiled.scratch_floats();
    tiled.run({first, std::min(first + size, tiles)}, some, x, w, epilogue, y, own);
  }
}

template <typename Algorithm>
void convolve(const Conv& conv, const float* x, const float* w, const Epilogue& epilogue, float* y,
              float* scratch, int most_threads) {
  with_panel(conv.outputs, [&](auto kind) {
    convolve_panels<Algorithm, decltype(kind)>(conv, x, w, epilogue, y, scratch, most_threads);
  });
}

}  // namespace

extern "C" {

// How many numbers the scratch memory of a thread has.
size_t winograd_scratch(int tiles, int channels) { return floats_of_block(tiles, channels); }

// How many outputs a panel of weights has, of so many in all.
int winograd_width(int outputs) { return vectors_for(outputs) * kLanes; }

void winograd(const Conv* conv, const float* x, const float* w, const Epilogue* epilogue, float* y,
              float* scratch, int threads) {
  convolve<Winograd>(*conv, x, w, *epilogue, y, scratch, threads);
}

void karatsuba(const Conv* conv, const float* x, const float* w, const Epilogue* epilogue, float* y,
               float* scratch, int threads) {
  convolve<Karatsuba>(*conv, x, w, *epilogue, y, scratch, threads);
}

}  // extern "C"
