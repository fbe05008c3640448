// Squeeze-and-excite and what follows it, for nhwc images of kPixels pixels:
//
//   x = scale * image + shift               mean = mean of x over the pixels
//   hidden = Hidden(W1 mean + b1)           gate = Gate(W2 hidden + b2)
//   y = Expression(x * gate, residual, offset), unshifted = y without the offset
//   pooled = mean of y over the windows of Pool
//
//   image, residual, y, unshifted  (N, kPixels, kChannels), pooled (N, Pool::kPixels, kChannels)
//   weight1  (kHidden, kChannels) and weight2 (kChannels, kHiddenPadded), zeros after kHidden, or
//            both with zeros up to whole 16 columns for SmallMatrixMma
//   bias1 (kHidden), bias2 (kChannels), offset, scale, shift (1)
//   means (N, kChannels), hidden (N, kHidden), gates (N, kChannels)
//
// Every output is written by `=`. Biases, scale, shift, offset, means, hidden and gates may be null.
// Each operand has an element type of its own; `also` is y in one more type.
//
// Arithmetic is float; what leaves is rounded once. A block keeps its images in registers between
// the mean and the product where they fit, else it reads them again. With a Pool it also has y in
// shared memory: rounded if all operands are of one type, else as float. Deterministic: all sums
// have a fixed order.

#pragma once

#include "cuda/arithmetic.h"
#include "cuda/epilogue.h"
#include "cuda/image_tile.h"
#include "cuda/launch.h"
#include "cuda/operands.h"
#include "cuda/small_matrix.h"
#include "cuda/small_matrix_mma.h"

namespace plantune {

/// The element types of operands that are all of one.
template <typename T>
struct SeTailTypes {
  using Image = T;
  using Residual = T;
  using Weight = T;
  using Number = T;  // of biases, scale, shift and offset
  using Y = T;
  using Unshifted = T;
  using Pooled = T;
  using Hidden = T;
  using Means = Types<T, T>;
  using Gates = Types<T, T>;
  using Kept = T;  // of y in shared memory
  static constexpr int kVector = Vector<T>::kSize;
  static constexpr bool kAlso = false, kSharedAtLaunch = false;
  using Also = T;
};

template <typename Of>
struct SeTailArguments {
  const typename Of::Image* image;
  const typename Of::Weight* weight1;
  const typename Of::Number* bias1;
  const typename Of::Weight* weight2;
  const typename Of::Number *bias2, *scale, *shift;
  const typename Of::Residual* residual;
  const typename Of::Number* offset;
  typename Of::Y* y;
  typename Of::Unshifted* unshifted;
  typename Of::Pooled* pooled;
  void* means[2];
  typename Of::Hidden* hidden;
  void* gates[2];
  long long images;
  typename Of::Also* also;
};

/// Windows of kSide x kSide pixels, kApart apart, from kBefore pixels before the image on; none if
/// kSide is 0. What is outside counts as zeros.
template <int kSide_, int kApart, int kBefore_, int kHigh_, int kWide_>
struct TailPool {
  static constexpr int kSide = kSide_, kStep = kApart, kBefore = kBefore_;
  static constexpr int kHigh = kHigh_, kWide = kWide_;
  static constexpr int kDown = (kHigh + 2 * kBefore - kSide) / kStep + 1;
  static constexpr int kAcross = (kWide + 2 * kBefore - kSide) / kStep + 1;
  static constexpr int kPixels = kDown * kAcross;
};
using NoPool = TailPool<0, 1, 0, 0, 0>;

/// Which parts there are; `kSaved` says that means, hidden or gates leave, `kHead` that the image is
/// scaled or shifted.
template <class Expression_, class Hidden_, class Gate_, bool kGated_, bool kUnshifted_,
          bool kSaved_, bool kHead_, class Pool_>
struct SeTailParts {
  using Expression = Expression_;
  using Hidden = Hidden_;
  using Gate = Gate_;
  using Pool = Pool_;
  static constexpr bool kGated = kGated_, kUnshifted = kUnshifted_, kSaved = kSaved_,
                        kHead = kHead_;
};

template <typename Of, int kChannels, int kHidden, int kPixels, typename Parts, int kImages,
          int kThreads_, template <typename, typename, int, int, int, int> typename Matrix>
struct SeTailOf {
  using Word = Vector<typename Of::Image, Of::kVector>;
  using Residual = Vector<typename Of::Residual, Of::kVector>;
  using Kept = Vector<typename Of::Kept, Of::kVector>;
  using Tile = ImageTile<typename Of::Image, kChannels, kChannels, kPixels, kImages, kThreads_, Word>;
  using Floats = typename Tile::Floats;
  using Channels = typename Tile::Channels;
  using Arguments = SeTailArguments<Of>;
  using Expression = typename Parts::Expression;

  static constexpr int kThreads = kThreads_;
  static constexpr int kHiddenPadded = ceil_div(kHidden, 4) * 4;
  static constexpr bool kKept = Tile::kBatches == 1;
  using Weight = typename Of::Weight;
  using Number = typename Of::Number;
  using Squeeze = Matrix<Weight, Number, kHidden, kChannels, kImages, kThreads>;
  using Excite = Matrix<Weight, Number, kChannels, kHiddenPadded, kImages, kThreads>;

  using Pool = typename Parts::Pool;
  static constexpr bool kPools = Pool::kSide > 0;
  static constexpr int kChunks = Tile::kChunks, kVector = Of::kVector;
  static constexpr int kResults = kPools ? kImages * kPixels * kChunks : 1;
  static_assert(!kPools || Pool::kHigh * Pool::kWide == kPixels, "the pool's image is the tile's");

  struct Shared {
    typename Tile::Shared tile;
    typename Squeeze::Vectors means;
    typename Squeeze::Scratch squeeze;
    typename Excite::Vectors hidden;
    typename Excite::Scratch excite;
    Kept results[Of::kSharedAtLaunch ? 1 : kResults];

    /// In the place of the sums, which are done with by then.
    __device__ __forceinline__ float (&gates(int team)) [Tile::kRow] { return tile.sums[team][0]; }
  };
  static_assert(sizeof(Shared) <= 48 << 10, "static shared memory ends at 48 KiB");

  /// What the image goes through before its mean.
  struct Head {
    float scale = 1.f, shift = 0.f;

    __device__ __forceinline__ explicit Head(const Arguments& a) {
      if (Parts::kHead && a.scale != nullptr) scale = to_float(*a.scale);
      if (Parts::kHead && a.shift != nullptr) shift = to_float(*a.shift);
    }
    __device__ __forceinline__ float operator()(float value) const {
      return Parts::kHead ? scale * value + shift : value;
    }
  };

  /// What an element is computed from beside the images.
  struct Numbers {
    Head head;
    float offset;
  };

  /// Whether the block has that one of its images.
  static __device__ __forceinline__ bool is_there(const Arguments& a, int team) {
    return blockIdx.x * (long long)(kImages) + team < a.images;
  }

  template <typename T>
  static __device__ __forceinline__ void put(const Arguments& a, T* to, int team, int width,
                                             int column, float value) {
    if (!Parts::kSaved || to == nullptr || !is_there(a, team)) return;
    to[(blockIdx.x * (long long)(kImages) + team) * width + column] = from_float<T>(value);
  }

  /// The same for a value that leaves in up to two types.
  template <typename Pair>
  static __device__ __forceinline__ void put_both(const Arguments& a, void* const (&to)[2],
                                                  int team, int column, float value) {
    using First = typename TypeAt<0, Pair>::Type;
    using Second = typename TypeAt<1, Pair>::Type;
    put(a, static_cast<First*>(to[0]), team, kChannels, column, value);
    put(a, static_cast<Second*>(to[1]), team, kChannels, column, value);
  }

  /// Where y is kept for the pool.
  static __device__ __forceinline__ Kept* results(Shared& shared) {
    if constexpr (Of::kSharedAtLaunch) {
      extern __shared__ uint4 memory[];
      return reinterpret_cast<Kept*>(memory);
    } else {
      return shared.results;
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ Shared shared;
    release_successor();
    Squeeze squeeze(a.weight1, a.bias1);
    Excite excite(a.weight2, a.bias2);
    shared.means.clear_from(kChannels);
    shared.hidden.clear_from(kHidden);
    wait_for_predecessor();

    const Tile tile(blockIdx.x * (long long)(kImages), a.images, 0);
    Word x[Tile::kBatch];
    Residual residual[Tile::kBatch];
    Floats sum = {};
    tile.template load<kAligned>(a.image, 0, x);
    if constexpr (kKept && Expression::kResidual) {
      tile.template load<kAligned>(a.residual, 0, residual);
    }
    const Numbers numbers{Head(a), Expression::kOffset ? to_float(*a.offset) : 0.f};
    tile.add(x, 0, sum);
#pragma unroll 1
    for (int batch = 1; batch < Tile::kBatches; ++batch) {
      tile.template load<kAligned>(a.image, batch, x);
      tile.add(x, batch, sum);
    }

    tile.reduce(shared.tile, sum, [&](int team, int place, float image) {
      const int channel = Channels::column_at(place);
      const float mean = numbers.head(image);
      shared.means.put(team, channel, mean);
      put_both<typename Of::Means>(a, a.means, team, channel, mean);
    });
    __syncthreads();
    squeeze.multiply(shared.means, shared.squeeze, [&](int team, int row, float value) {
      const float hidden = Parts::Hidden::of(value);
      shared.hidden.put(team, row, hidden);
      put(a, a.hidden, team, kHidden, row, hidden);
    });
    __syncthreads();
    excite.multiply(shared.hidden, shared.excite, [&](int team, int row, float value) {
      const float gate = Parts::Gate::of(value);
      shared.gates(team)[Channels::place_of(row)] = gate;
      put_both<typename Of::Gates>(a, a.gates, team, row, gate);
    });
    if (!Parts::kGated) return;
    __syncthreads();

    if (!kPools && !tile.active) return;
    Floats gate = {};
    if (tile.active) Channels::load(shared.gates(tile.team), tile.chunk, gate);
#pragma unroll 1
    for (int batch = 0; batch < Tile::kBatches; ++batch) {
      if constexpr (!kKept) {
        tile.template load<kAligned>(a.image, batch, x);
        if constexpr (Expression::kResidual) {
          tile.template load<kAligned>(a.residual, batch, residual);
        }
      }
#pragma unroll
      for (int i = 0; i < Tile::kBatch; ++i) {
        const int round = batch * Tile::kBatch + i;
        if (!tile.has(round) || (kPools && !tile.active)) continue;
        const Kept y = finish(a, tile.at(round), x[i], residual[i], gate, numbers);
        if constexpr (kPools) {
          const int pixel = tile.team * kPixels + tile.group + round * Tile::kGroups;
          results(shared)[pixel * kChunks + tile.chunk] = y;
        }
      }
    }
    if constexpr (kPools) {
      __syncthreads();
      pool(a, results(shared));
    }
  }

  static __device__ __forceinline__ void pool(const Arguments& a, const Kept* kept) {
    constexpr int kPooled = kImages * Pool::kPixels * kChunks;
#pragma unroll 1
    for (int i = threadIdx.x; i < kPooled; i += kThreads) {
      const int chunk = i % kChunks, pixel = i / kChunks % Pool::kPixels;
      const int team = i / (kChunks * Pool::kPixels);
      if (!is_there(a, team)) return;
      const int top = pixel / Pool::kAcross * Pool::kStep - Pool::kBefore;
      const int left = pixel % Pool::kAcross * Pool::kStep - Pool::kBefore;
      float sum[kVector] = {};
#pragma unroll
      for (int tap = 0; tap < Pool::kSide * Pool::kSide; ++tap) {
        const int h = top + tap / Pool::kSide, w = left + tap % Pool::kSide;
        if (unsigned(h) >= unsigned(Pool::kHigh) || unsigned(w) >= unsigned(Pool::kWide)) continue;
        const Kept& y = kept[(team * kPixels + h * Pool::kWide + w) * kChunks + chunk];
#pragma unroll
        for (int k = 0; k < kVector; ++k) sum[k] += y[k];
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) sum[k] *= 1.f / (Pool::kSide * Pool::kSide);
      Vector<typename Of::Pooled, kVector> word;
      word.round(sum);
      const long long image = blockIdx.x * (long long)(kImages) + team;
      word.store(a.pooled + ((image * Pool::kPixels + pixel) * kChunks + chunk) * kVector);
    }
  }

  static __device__ __forceinline__ Kept finish(const Arguments& a, long long at, const Word& x,
                                                const Residual& residual, const Floats& gate,
                                                const Numbers& numbers) {
    float v[kVector];
    if constexpr (Parts::kUnshifted) {
      evaluate<typename Expression::Inner>(x, residual, gate, numbers, v);
      store(a.unshifted + at, v);
    }
    evaluate<Expression>(x, residual, gate, numbers, v);
    store(a.y + at, v);
    if constexpr (Of::kAlso) store(a.also + at, v);
    Kept kept;
    kept.round(v);
    return kept;
  }

  template <class Stored>
  static __device__ __forceinline__ void evaluate(const Word& x, const Residual& residual,
                                                  const Floats& gate, const Numbers& numbers,
                                                  float (&v)[kVector]) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const float gated = numbers.head(x[k]) * gate[k];
      v[k] = Stored::of({gated, Stored::kResidual ? residual[k] : 0.f, numbers.offset});
    }
  }

  template <typename T>
  static __device__ __forceinline__ void store(T* to, const float (&v)[kVector]) {
    Vector<T, kVector> word;
    word.round(v);
    word.store(to);
  }
};

template <typename T, int kChannels, int kHidden, int kPixels, typename Parts, int kImages,
          int kThreads, template <typename, typename, int, int, int, int> typename Matrix>
using SeTail =
    SeTailOf<SeTailTypes<T>, kChannels, kHidden, kPixels, Parts, kImages, kThreads, Matrix>;

}  // namespace plantune
