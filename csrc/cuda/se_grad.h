// The gradient of squeeze-and-excite, for nhwc images of kPixels pixels, in one pass over each
// image. Of y = x * gate, gate = Gate(W2 hidden + b2), hidden = Hidden(W1 mean + b1) it makes
//
//   dgate = sum over pixels of dy * x       dexcite = Gate'(dgate)
//   dsqueeze = Hidden'(W2^T dexcite)        spread = alpha * W1^T dsqueeze
//   dx = dy * gate + spread
//
// What is done to single elements before and after stands in Chain:
//
//   first(images, small, out)   from the kRead images: dy * x, then kValues, of which the first
//                               kStoredFirst leave, then the kSumsFirst values to be added up
//   second(images, small, spread, out)   from the kHeld images: the kStoredSecond images that leave,
//                                        then the kSumsSecond values to be added up
//
// `small` are values of each image and channel, of each channel, or single ones. kHeldAs says where a
// held image comes from: k is the k-th that is read, kRead + j the j-th of the values.
// Between the passes a block holds its images as se_grad_held.h says.
//
// `add` then makes the gradients of W1, b1, W2 and b2 from dexcite, dsqueeze and what the layers
// read, and the sums from each block's part. Arithmetic is float; what leaves is rounded once.
// Operands may have several element types: see se_grad_types.h. Then what is held is float.
// Deterministic: all sums have a fixed order.

#pragma once

#include "cuda/arithmetic.h"
#include "cuda/image_tile.h"
#include "cuda/launch.h"
#include "cuda/se_grad_held.h"
#include "cuda/se_grad_layers.h"
#include "cuda/se_grad_layers_mma.h"
#include "cuda/se_grad_types.h"
#include "cuda/small_matrix.h"
#include "cuda/small_matrix_mma.h"
#include "cuda/sums.h"

namespace plantune {

template <typename Chain, typename Of,
          template <typename, typename, int, int, int, int> typename Matrix>
struct SeGradOf {
  using Layer = typename Of::Layer;
  using Gradient = typename Of::Gradient;
  using Sum = typename Of::Sum;
  static constexpr int kChannels = Chain::kChannels, kHidden = Chain::kHidden;
  static constexpr int kImages = Chain::kImages, kThreads = Chain::kThreads;
  static constexpr int kAddingThreads = 256;
  static constexpr int kRead = Chain::kRead, kSmall = Chain::kSmall, kHeld = Chain::kHeld;
  static constexpr int kStoredFirst = Chain::kStoredFirst, kSumsFirst = Chain::kSumsFirst;
  static constexpr int kStoredSecond = Chain::kStoredSecond, kSumsSecond = Chain::kSumsSecond;
  static constexpr int kStored = kStoredFirst + kStoredSecond, kSums = kSumsFirst + kSumsSecond;
  static constexpr int kValues = Chain::kValues;
  static constexpr int kFirst = 1 + kValues + kSumsFirst, kSecond = kStoredSecond + kSumsSecond;
  static constexpr int kHiddenPadded = ceil_div(kHidden, 4) * 4;

  using Tile = ImageTile<typename Of::Held, kChannels, kChannels, Chain::kPixels, kImages, kThreads>;
  using Word = typename Tile::Word;
  using Channels = typename Tile::Channels;
  using Squeeze = Matrix<Layer, Layer, kHidden, kChannels, kImages, kThreads>;
  using Excite = Matrix<Layer, Layer, kChannels, kHiddenPadded, kImages, kThreads>;
  static constexpr int kSize = Word::kSize, kRounds = Tile::kRounds;
  static constexpr int kChunk = smaller(kRounds, Chain::kChunk);
  using Held = SeGradHeld<Chain, Word, kRounds>;
  static constexpr bool kInRegisters = Held::kInRegisters;

  template <template <typename, typename, int, int, int, bool, bool> typename Kind>
  using LayersOf = Kind<Layer, Gradient, kChannels, kHidden, kAddingThreads, Chain::kByRows1,
                        Chain::kByRows2>;
  using Layers = typename ChosenLayers<Chain::kLayersMma, LayersOf<SeGradLayers>,
                                       LayersOf<SeGradLayersMma>>::Type;
  static constexpr int kTiles = Chain::kLayers ? Layers::kTiles : 0;
  /// What `add` leaves of each tile and split.
  static constexpr int kTileSums = Chain::kLayers ? Layers::kTileSums : 0;

  struct Arguments {
    const void* read[kRead];
    const void* small[kSmall + 1];
    void* stored[kStored + 1];
    Sum* sums[kSums + 1];
    const Layer *excite, *squeeze;     // W2^T (kHidden, kChannels), W1^T (kChannels, kHiddenPadded)
    const Layer *of_gate, *of_hidden;  // what the derivatives of Gate and Hidden are functions of
    Layer *dexcite, *dsqueeze;
    float *parts, *layers;  // what `add` adds up: of each sum and block, of each tile and split
    unsigned* arrived;      // of each tile
    const Layer *hidden, *mean;  // what the layers read
    Gradient *weight1, *bias1, *weight2, *bias2;
    long long images, splits;
  };

  struct Shared {
    typename Tile::Shared tile;
    typename Squeeze::Vectors dexcite;
    typename Squeeze::Scratch squeeze;
    typename Excite::Vectors dsqueeze;
    typename Excite::Scratch excite;
    Layer saved[kImages][kChannels + kHidden];  // what the derivatives of Gate and Hidden read
    float parts[kSums + 1][kThreads / 32];

    /// In the place of the sums, which are done with by then.
    __device__ __forceinline__ float (&spread(int team)) [Tile::kRow] { return tile.sums[team][0]; }
  };
  static_assert(sizeof(Shared) <= 48 << 10, "static shared memory ends at 48 KiB");

  using Small = Word[kSmall + 1];
  using Sums = LongSum<sizeof(Sum) == sizeof(float)>[kSums + 1];

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ Shared shared;
    release_successor();
    Squeeze squeeze(a.excite, nullptr);
    Excite excite(a.squeeze, nullptr);
    shared.dexcite.clear_from(kChannels);
    shared.dsqueeze.clear_from(kHidden);
    wait_for_predecessor();

    const long long image = blockIdx.x * (long long)(kImages);
    if (blockIdx.x == 0) {
      for (int i = threadIdx.x; i < kTiles; i += kThreads) a.arrived[i] = 0;
    }
    const Tile tile(image, a.images, 0);
    Small small;
    load_small<kAligned>(a, tile, image, small);
    Saved saved;
    if constexpr (Saved::kEarly) saved.fetch(a, image);
    Held held;
    typename Tile::Floats dgate = {};
    Sums sums = {};
    first_pass<kAligned>(a, tile, small, held, dgate, sums);
    if constexpr (!Saved::kEarly) saved.fetch(a, image);
    saved.share(shared);

    tile.add_up(shared.tile, dgate, [&](int team, int place, float value) {
      const int channel = Channels::column_at(place);
      const float d = Chain::gate(value, to_float(shared.saved[team][channel]));
      shared.dexcite.put(team, channel, d);
      put(a, a.dexcite, image, team, kChannels, channel, d);
    });
    __syncthreads();
    squeeze.multiply(shared.dexcite, shared.squeeze, [&](int team, int row, float value) {
      const float d = Chain::hidden(value, to_float(shared.saved[team][kChannels + row]));
      shared.dsqueeze.put(team, row, d);
      put(a, a.dsqueeze, image, team, kHidden, row, d);
    });
    __syncthreads();
    excite.multiply(shared.dsqueeze, shared.excite, [&](int team, int row, float value) {
      shared.spread(team)[Channels::place_of(row)] = value * Chain::kAlpha;
    });
    __syncthreads();

    typename Tile::Floats spread = {};
    if (tile.active) Channels::load(shared.spread(tile.team), tile.chunk, spread);
    second_pass<kAligned>(a, tile, small, held, spread, sums);
    if constexpr (kSums > 0) leave(a, shared, sums);
  }

  /// A block for each tile of both layers and each split of the images, then one for each sum.
  static __device__ __forceinline__ void add(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const int splits = int(a.splits);
    if (blockIdx.x < kTiles * splits) {
      Layers::add(a, blockIdx.x / splits, blockIdx.x % splits);
    } else {
      add_sum(a, blockIdx.x - kTiles * splits);
    }
  }

 private:
  static constexpr int kWarps = kThreads / 32;

  static __device__ __forceinline__ void put(const Arguments& a, Layer* to, long long image, int team,
                                             int width, int column, float value) {
    if (to == nullptr || image + team >= a.images) return;
    to[(image + team) * width + column] = from_float<Layer>(value);
  }

  template <bool kAligned>
  static __device__ __forceinline__ void load_small(const Arguments& a, const Tile& tile,
                                                    long long image, Small& small) {
    const long long of = tile.active ? image + tile.team : 0;
    each<kSmall>([&](auto number) {
      constexpr int k = decltype(number)::kValue;
      using From = typename Of::template Small<k>;
      const From* const from = static_cast<const From*>(a.small[k]);
      if constexpr (!Chain::kOfChannels[k]) {
        take_held(*from, small[k].values[0]);
      } else {
        const long long row = Chain::kOfImages[k] ? of * kChannels : 0;
        load_held<kAligned>(from + row + tile.chunk * kSize, small[k]);
      }
    });
  }

  template <int k>
  static __device__ __forceinline__ void store(const Arguments& a, long long at,
                                               const float (&values)[kSize]) {
    using To = typename Of::template Stored<k>;
    Vector<To, kSize> word;
    word.round(values);
    word.store(static_cast<To*>(a.stored[k]) + at);
  }

  /// What the derivatives read: asked for before the images are there, shared after.
  struct Saved {
    static constexpr int kRow = kChannels + kHidden;
    static constexpr int kOfThread = ceil_div(kImages * kRow, kThreads);
    static constexpr bool kEarly = kOfThread <= 8;
    Layer values[kOfThread];

    __device__ __forceinline__ void fetch(const Arguments& a, long long image) {
#pragma unroll
      for (int k = 0; k < kOfThread; ++k) {
        const int i = threadIdx.x + k * kThreads, team = i / kRow, column = i % kRow;
        if (team >= kImages || image + team >= a.images) continue;
        values[k] = column < kChannels
                        ? a.of_gate[(image + team) * kChannels + column]
                        : a.of_hidden[(image + team) * kHidden + column - kChannels];
      }
    }

    __device__ __forceinline__ void share(Shared& shared) const {
#pragma unroll
      for (int k = 0; k < kOfThread; ++k) {
        const int i = threadIdx.x + k * kThreads;
        if (i < kImages * kRow) shared.saved[i / kRow][i % kRow] = values[k];
      }
    }
  };

  static __device__ __forceinline__ void expand(const Small& small, int e, float (&to)[kSmall + 1]) {
#pragma unroll
    for (int k = 0; k < kSmall; ++k) to[k] = small[k][Chain::kOfChannels[k] ? e : 0];
  }

  /// Loads a few vectors of every image at once, then computes with them.
  template <bool kAligned>
  static __device__ __forceinline__ void first_pass(const Arguments& a, const Tile& tile,
                                                    const Small& small,
                                                    Held& held,
                                                    typename Tile::Floats& dgate, Sums& sums) {
    constexpr int kAtOnce = kAligned ? kChunk : 1;
    if (!tile.active) return;
    Held::template ask<kAligned>(a.read, tile);
#pragma unroll(kInRegisters ? kRounds : 1)
    for (int base = 0; base < kRounds; base += kAtOnce) {
      Word in[kAtOnce][kRead];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + i >= kRounds || !tile.has(base + i)) continue;
        each<kRead>([&](auto number) {
          constexpr int k = decltype(number)::kValue;
          using From = typename Of::template Read<k>;
          if constexpr (!Held::template is_asked<kAligned>(k)) {
            load_held<kAligned>(static_cast<const From*>(a.read[k]) + tile.at(base + i), in[i][k]);
          }
        });
      }
      if (base == 0) Held::template wait<kAligned>();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + i >= kRounds || !tile.has(base + i)) continue;
#pragma unroll
        for (int k = 0; k < kRead; ++k) {
          if (Held::template is_asked<kAligned>(k)) {
            in[i][k] = Held::place(Chain::kSlotOf[k], base + i);
          }
        }
        Word made[kValues + 1];
        first_of(in[i], small, made, dgate, sums);
        each<kStoredFirst>([&](auto number) {
          constexpr int j = decltype(number)::kValue;
          using To = typename Of::template Stored<j>;
          store_held(made[j], static_cast<To*>(a.stored[j]) + tile.at(base + i));
        });
#pragma unroll
        for (int k = 0; k < kHeld; ++k) {
          const int from = Chain::kHeldAs[k];
          if (from < kRead && !Held::template is_asked<kAligned>(from < kRead ? from : 0)) {
            held.put(k, base + i, in[i][from < kRead ? from : 0]);
          }
          if (from >= kRead) held.put(k, base + i, made[from < kRead ? 0 : from - kRead]);
        }
      }
    }
  }

  static __device__ __forceinline__ void first_of(const Word (&in)[kRead], const Small& small,
                                                  Word (&made)[kValues + 1],
                                                  typename Tile::Floats& dgate, Sums& sums) {
    float values[kValues + 1][kSize], added[kSumsFirst + 1] = {};
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      float x[kRead], s[kSmall + 1], out[kFirst];
#pragma unroll
      for (int k = 0; k < kRead; ++k) x[k] = in[k][e];
      expand(small, e, s);
      Chain::first(x, s, out);
      dgate[e] += out[0];
#pragma unroll
      for (int j = 0; j < kValues; ++j) values[j][e] = out[1 + j];
#pragma unroll
      for (int j = 0; j < kSumsFirst; ++j) added[j] += out[1 + kValues + j];
    }
#pragma unroll
    for (int j = 0; j < kSumsFirst; ++j) sums[j].add(added[j]);
#pragma unroll
    for (int j = 0; j < kValues; ++j) made[j].round(values[j]);
  }

  template <bool kAligned>
  static __device__ __forceinline__ void second_pass(const Arguments& a, const Tile& tile,
                                                     const Small& small,
                                                     const Held& held,
                                                     const typename Tile::Floats& spread,
                                                     Sums& sums) {
    if (!tile.active) return;
#pragma unroll(kInRegisters ? kRounds : 1)
    for (int round = 0; round < kRounds; ++round) {
      if (!tile.has(round)) continue;
      Word in[kHeld];
      each<kHeld>([&](auto number) {
        constexpr int k = decltype(number)::kValue;
        if constexpr (Chain::kHold == 0) {
          load_again<kAligned, k>(a, tile.at(round), in[k]);
        } else {
          in[k] = held.get(k, round);
        }
      });
      float values[kStoredSecond][kSize], added[kSumsSecond + 1] = {};
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        float x[kHeld], s[kSmall + 1], out[kSecond];
#pragma unroll
        for (int k = 0; k < kHeld; ++k) x[k] = in[k][e];
        expand(small, e, s);
        Chain::second(x, s, spread[e], out);
#pragma unroll
        for (int j = 0; j < kStoredSecond; ++j) values[j][e] = out[j];
#pragma unroll
        for (int j = 0; j < kSumsSecond; ++j) added[j] += out[kStoredSecond + j];
      }
#pragma unroll
      for (int j = 0; j < kSumsSecond; ++j) sums[kSumsFirst + j].add(added[j]);
      each<kStoredSecond>([&](auto number) {
        constexpr int j = decltype(number)::kValue;
        store<kStoredFirst + j>(a, tile.at(round), values[j]);
      });
    }
  }

  /// A held image from memory: a thread reads what it has written itself.
  template <bool kAligned, int k>
  static __device__ __forceinline__ void load_again(const Arguments& a, long long at, Word& to) {
    constexpr int from = Chain::kHeldAs[k];
    if constexpr (from < kRead) {
      using From = typename Of::template Read<from>;
      load_held<kAligned>(static_cast<const From*>(a.read[from]) + at, to);
    } else {
      using From = typename Of::template Stored<from - kRead>;
      load_held<kAligned>(static_cast<const From*>(a.stored[from - kRead]) + at, to);
    }
  }

  static __device__ __forceinline__ void leave(const Arguments& a, Shared& shared,
                                               const Sums& sums) {
#pragma unroll
    for (int j = 0; j < kSums; ++j) {
      const float sum = sum_of_warp(sums[j].value);
      if (threadIdx.x % 32 == 0) shared.parts[j][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= kSums) return;
    float sum = 0.f;
    for (int warp = 0; warp < kWarps; ++warp) sum += shared.parts[threadIdx.x][warp];
    a.parts[threadIdx.x * gridDim.x + blockIdx.x] = sum;
  }

  static __device__ __forceinline__ void add_sum(const Arguments& a, int which) {
    __shared__ float parts[kAddingThreads / 32];
    const int blocks = int((a.images + kImages - 1) / kImages);
    float sum = 0.f;
#pragma unroll 8
    for (int i = threadIdx.x; i < blocks; i += kAddingThreads) sum += a.parts[which * blocks + i];
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < kAddingThreads / 32; ++warp) sum += parts[warp];
    a.sums[which][0] = from_float<Sum>(sum);
  }
};

template <typename Chain, template <typename, typename, int, int, int, int> typename Matrix>
using SeGrad = SeGradOf<Chain, SeGradTypes<typename Chain::T>, Matrix>;

}  // namespace plantune
