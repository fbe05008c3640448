// Squeeze-and-excite and what follows it, for nhwc images of kPixels pixels:
//
//   mean = mean of x over the pixels        hidden = Hidden(W1 mean + b1)
//   gate = Gate(W2 hidden + b2)             y = Expression(x * gate, residual, offset)
//   unshifted = y without the offset
//
//   x, residual, y, unshifted  (N, kPixels, kChannels)
//   weight1  (kHidden, kChannels) and weight2 (kChannels, kHiddenPadded), zeros after kHidden, or
//            both with zeros up to whole 16 columns for SmallMatrixMma
//   bias1 (kHidden), bias2 (kChannels), offset (1)
//   means (N, kChannels), hidden (N, kHidden), gates (N, kChannels)
//
// Every output is written by `=`. Biases, offset, means, hidden and gates may be null.
//
// Arithmetic is float; what leaves is rounded once. A block keeps its images in registers between
// the mean and the product where they fit, else it reads them again. Deterministic: all sums have a
// fixed order.

#pragma once

#include "cuda/arithmetic.h"
#include "cuda/epilogue.h"
#include "cuda/image_tile.h"
#include "cuda/launch.h"
#include "cuda/small_matrix.h"
#include "cuda/small_matrix_mma.h"

namespace plantune {

template <typename T>
struct SeTailArguments {
  const T *x, *weight1, *bias1, *weight2, *bias2, *residual, *offset;
  T *y, *unshifted, *means[2], *hidden, *gates[2];
  long long images;
};

/// Which parts there are; `kSaved` says that means, hidden or gates leave.
template <class Expression_, class Hidden_, class Gate_, bool kGated_, bool kUnshifted_,
          bool kSaved_>
struct SeTailParts {
  using Expression = Expression_;
  using Hidden = Hidden_;
  using Gate = Gate_;
  static constexpr bool kGated = kGated_, kUnshifted = kUnshifted_, kSaved = kSaved_;
};

template <typename T, int kChannels, int kHidden, int kPixels, typename Parts, int kImages,
          int kThreads_, template <typename, int, int, int, int> typename Matrix>
struct SeTail {
  using Tile = ImageTile<T, kChannels, kChannels, kPixels, kImages, kThreads_>;
  using Word = typename Tile::Word;
  using Channels = typename Tile::Channels;
  using Arguments = SeTailArguments<T>;
  using Expression = typename Parts::Expression;

  static constexpr int kThreads = kThreads_;
  static constexpr int kHiddenPadded = ceil_div(kHidden, 4) * 4;
  static constexpr bool kKept = Tile::kBatches == 1;
  using Squeeze = Matrix<T, kHidden, kChannels, kImages, kThreads>;
  using Excite = Matrix<T, kChannels, kHiddenPadded, kImages, kThreads>;

  struct Shared {
    typename Tile::Shared tile;
    typename Squeeze::Vectors means;
    typename Squeeze::Scratch squeeze;
    typename Excite::Vectors hidden;
    typename Excite::Scratch excite;

    /// In the place of the sums, which are done with by then.
    __device__ __forceinline__ float (&gates(int team)) [Tile::kRow] { return tile.sums[team][0]; }
  };
  static_assert(sizeof(Shared) <= 48 << 10, "static shared memory ends at 48 KiB");

  /// Whether the block has that one of its images.
  static __device__ __forceinline__ bool is_there(const Arguments& a, int team) {
    return blockIdx.x * (long long)(kImages) + team < a.images;
  }

  static __device__ __forceinline__ void put(const Arguments& a, T* to, int team, int width,
                                             int column, float value) {
    if (!Parts::kSaved || to == nullptr || !is_there(a, team)) return;
    to[(blockIdx.x * (long long)(kImages) + team) * width + column] = from_float<T>(value);
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
    Word x[Tile::kBatch], residual[Tile::kBatch];
    typename Tile::Floats sum = {};
    tile.template load<kAligned>(a.x, 0, x);
    if constexpr (kKept && Expression::kResidual) {
      tile.template load<kAligned>(a.residual, 0, residual);
    }
    float offset = 0.f;
    if constexpr (Expression::kOffset) offset = to_float(*a.offset);
    tile.add(x, 0, sum);
#pragma unroll 1
    for (int batch = 1; batch < Tile::kBatches; ++batch) {
      tile.template load<kAligned>(a.x, batch, x);
      tile.add(x, batch, sum);
    }

    tile.reduce(shared.tile, sum, [&](int team, int place, float mean) {
      const int channel = Channels::column_at(place);
      shared.means.put(team, channel, mean);
      put(a, a.means[0], team, kChannels, channel, mean);
      put(a, a.means[1], team, kChannels, channel, mean);
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
      put(a, a.gates[0], team, kChannels, row, gate);
      put(a, a.gates[1], team, kChannels, row, gate);
    });
    if (!Parts::kGated) return;
    __syncthreads();

    if (!tile.active) return;
    typename Tile::Floats gate;
    Channels::load(shared.gates(tile.team), tile.chunk, gate);
#pragma unroll 1
    for (int batch = 0; batch < Tile::kBatches; ++batch) {
      if constexpr (!kKept) {
        tile.template load<kAligned>(a.x, batch, x);
        if constexpr (Expression::kResidual) {
          tile.template load<kAligned>(a.residual, batch, residual);
        }
      }
#pragma unroll
      for (int i = 0; i < Tile::kBatch; ++i) {
        const int round = batch * Tile::kBatch + i;
        if (tile.has(round)) finish(a, tile.at(round), x[i], residual[i], gate, offset);
      }
    }
  }

  static __device__ __forceinline__ void finish(const Arguments& a, long long at, const Word& x,
                                                const Word& residual,
                                                const typename Tile::Floats& gate, float offset) {
    if constexpr (Parts::kUnshifted) {
      store<typename Expression::Inner>(a.unshifted + at, x, residual, gate, offset);
    }
    store<Expression>(a.y + at, x, residual, gate, offset);
  }

  template <class Stored>
  static __device__ __forceinline__ void store(T* to, const Word& x, const Word& residual,
                                               const typename Tile::Floats& gate, float offset) {
    float v[Word::kSize];
#pragma unroll
    for (int k = 0; k < Word::kSize; ++k) {
      v[k] = Stored::of({x[k] * gate[k], Stored::kResidual ? residual[k] : 0.f, offset});
    }
    Word word;
    word.round(v);
    word.store(to);
  }
};

}  // namespace plantune
