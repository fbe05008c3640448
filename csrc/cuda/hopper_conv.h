// Convolution of images as an implicit matrix product, with tensor copies and warpgroup products:
//
//   y = Expression(conv(x, w) * scale + bias, residual, offset)
//
// x and y are NHWC, w is (O, R * S, C), both of T (2 bytes). Scale and bias are optional;
// `unshifted` takes a value on the way, that of the expression Unshifted. It writes `=`, sums in
// float in an order that depends on the configuration alone, and rounds once.
//
// With kTransposed it is the gradient of an image: x is that of the convolution's result, y that of
// its image, O and C are in turn those of x and of the result, and w is read along its other axis,
// from the last tap to the first. A convolution with a stride put zeros between the pixels of x:
// then y has kPhasesH x kPhasesW phases, each a convolution of x with the taps that meet no zero.
//
// With kGathers the residual is the gradient of an average pool with the same phases, whose own
// gradient is read: its pixels are gathered from a box with a margin.
//
// A block computes kTileM pixels (a box of kBoxW x kBoxH x kBoxN) by kTileN channels. One step of
// the reduction is 64 channels of one tap. Boxes of x are copied by tensor maps whose zeros outside
// of the image are the padding; taps that read nothing else are left out. With kReuse a box with
// its margin is copied once per 64 channels, and every tap reads it at an offset of its own.
//
// kSplitK blocks of a cluster share a tile's steps. Each finishes a share of the tile's channels:
// the others send it their sums through shared memory. What is finished leaves by a tensor copy,
// which also leaves out what is outside of y; the residual comes the same way. Sums of what the
// epilogue has on the way leave as parts, see `hopper_sums.h`.

#pragma once

#include "cuda/hopper_conv_loop.h"

namespace plantune {

template <class C>
class HopperConv : public HopperConvLoop<C> {
 protected:
  using Tile = HopperConvTile<C>;
  using Loop = HopperConvLoop<C>;
  using T = typename C::T;
  using Expression = typename C::Expression;
  using typename Tile::Place;
  using typename Tile::Sums;
  using Tile::base_, Tile::first_channel, Tile::gathers_h_, Tile::gathers_w_, Tile::h_,
      Tile::init_barriers, Tile::is_inside, Tile::kConsumers, Tile::kGatherBytes, Tile::kGatherH,
      Tile::kGatherStart, Tile::kGatherW, Tile::kInPlace, Tile::kOutStart, Tile::kOwn,
      Tile::kOwnSums, Tile::kPartBytes, Tile::kPartStart, Tile::kResidualStart, Tile::kSavedStart,
      Tile::kScalesStart, Tile::kSumsStart, Tile::kTilesO, Tile::kUnshiftedStart, Tile::tile_,
      Tile::n_, Tile::o_, Tile::out, Tile::parts_full, Tile::place_of, Tile::rank_,
      Tile::residual_full, Tile::row_of_warp, Tile::scalars_, Tile::w_;
  using typename Tile::TileOfResidual;
  using typename Tile::TileOfSaved;
  using typename Tile::TileOfUnshifted;
  using typename Tile::TileOfY;
  using Loop::copy_images, Loop::copy_weights, Loop::multiply;

  using Loop::Loop;

 public:
  static __device__ __forceinline__ void run(const typename Tile::Maps& maps,
                                             const ConvScalars& scalars) {
    run_as<HopperConv>(maps, scalars);
  }

 protected:
  /// Runs a kernel that consumes in its own way.
  template <class Kernel, class Maps, class Scalars>
  static __device__ __forceinline__ void run_as(const Maps& maps, const Scalars& scalars) {
    extern __shared__ uint8_t memory[];
    release_successor();
    // A swizzled row's place in the pattern is a part of its address.
    const uint32_t start = shared_address(memory);
    const Kernel conv(maps, scalars, (start + kGroupBytes - 1) / kGroupBytes * kGroupBytes);
    conv.init_barriers();
    if constexpr (C::kSplitK > 1) arrive_in_cluster();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < kConsumers / 32) {
      conv.consume();
    } else {
      if (lane == 0 && warp == kConsumers / 32) conv.copy_weights();
      if (lane == 0 && warp > kConsumers / 32) conv.copy_images();
      __syncwarp();
      if constexpr (C::kSplitK > 1) wait_for_cluster();
    }
  }

  __device__ __forceinline__ void consume() const {
    load_scales();
    const float offset = Expression::kOffset ? load_parameter<T>(scalars_.offset, 0) : 0.f;
    float sums[C::kTileN / 2];
    multiply(sums);
    if constexpr (C::kSplitK == 1) {
      scale_sums(sums);
      finish(sums, offset);
    } else {
      float own[kOwnSums];
      exchange(sums, own);
      scale_sums(own);
      finish(own, offset);
    }
    store_tile();
  }

  /// Starts the copies of what all threads have put into the tile.
  __device__ __forceinline__ void store_tile() const {
    // Every thread's part of the tile is there.
    publish_writes();
    sync_first<kConsumers>();
    if (threadIdx.x == 0) {
      wait_for_predecessor();
      store_tiles();
      wait_for_stores();
    }
    leave_sums<0>();
  }

  __device__ __forceinline__ void store_tiles() const {
    store_boxes<TileOfY>(out().y, kOutStart);
    if constexpr (C::kUnshifted) store_boxes<TileOfUnshifted>(out().unshifted, kUnshiftedStart);
  }

  /// The tile's part of each sum from s on, once every thread's part of it is there.
  template <int s>
  __device__ __forceinline__ void leave_sums() const {
    if constexpr (s < Sums::kCount) {
      constexpr bool kOfChannels = C::Sums::kOfChannels[s];
      constexpr int kBlocksOfTile = kTilesO * C::kSplitK;
      const int first = first_channel();
      wait_for_predecessor();
      // The last threads: the first starts copies.
      for (int i = kConsumers - 1 - threadIdx.x; i < (kOfChannels ? kOwn : 1); i += kConsumers) {
        if (kOfChannels && first + i >= C::kO) continue;
        const int at = kOfChannels ? tile_ / kBlocksOfTile * C::kO + first + i : tile_;
        scalars_.parts[Tile::Parts::start(s) + at] = Sums::whole(base_ + kSumsStart, s, i);
      }
      leave_sums<s + 1>();
    }
  }

  // Phase 3, in a cluster: sums go to the block that finishes their channels, and there to the
  // thread that has the same ones.

  __device__ __forceinline__ void exchange(const float (&sums)[C::kTileN / 2],
                                           float (&own)[kOwnSums]) const {
    wait_for_cluster();  // they all run, and have their barriers
#pragma unroll
    for (int peer = 0; peer < C::kSplitK; ++peer) {
      if (peer == rank_) continue;
      const uint32_t to = peer_address(part_at(rank_ - (rank_ > peer)), peer);
      const uint32_t barrier = peer_address(parts_full(), peer);
#pragma unroll
      for (int i = 0; i < kOwnSums; i += 4) {
        const float* four = sums + peer * kOwnSums + i;
        send_to_peer(to + i / 4 * kConsumers * 16, barrier, {four[0], four[1], four[2], four[3]});
      }
    }
#pragma unroll
    for (int i = 0; i < kOwnSums; ++i) {
      own[i] = sums[i];
#pragma unroll
      for (int peer = 1; peer < C::kSplitK; ++peer) {
        own[i] = select(peer == rank_, sums[peer * kOwnSums + i], own[i]);
      }
    }
    wait(parts_full(), 0);
#pragma unroll
    for (int part = 0; part < C::kSplitK - 1; ++part) {
#pragma unroll
      for (int i = 0; i < kOwnSums; i += 4) {
        const float4 four = load_four(part_at(part) + i / 4 * kConsumers * 16);
        own[i] += four.x, own[i + 1] += four.y, own[i + 2] += four.z, own[i + 3] += four.w;
      }
    }
  }

  /// A choice that the compiler cannot make an index of, which would put registers into memory.
  static __device__ __forceinline__ float select(bool first, float a, float b) {
    float chosen;
    asm("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nselp.f32 %0, %1, %2, p;\n}\n"
        : "=f"(chosen)
        : "f"(a), "f"(b), "r"(uint32_t(first)));
    return chosen;
  }

  /// Where this thread finds what one other block sends it.
  __device__ __forceinline__ uint32_t part_at(int part) const {
    return base_ + kPartStart + part * kPartBytes + threadIdx.x * 16;
  }

  // Phase 4: the epilogue, in place of the residual.

  /// The row of the copied box that has this row of the product.
  static __device__ __forceinline__ int out_row(int row) {
    if constexpr (!C::kReuse) return row;
    const Place place = place_of(row);
    return (place.n * C::kBoxH + place.h) * C::kBoxW + place.w;
  }

  template <class Boxes>
  __device__ __forceinline__ void store_boxes(const TensorMap& map, int start) const {
    for (int i = 0; i < Boxes::kBoxes; ++i) {
      store_box(map, base_ + start + i * Boxes::kBoxBytes, first_channel() + i * Boxes::kChannels,
                w_, h_, n_);
    }
  }

  __device__ __forceinline__ void load_scales() const {
    if constexpr (C::kScale || C::kBias) {
      const int first = first_channel();
      for (int i = threadIdx.x; i < kOwn && first + i < C::kO; i += kConsumers) {
        const uint32_t to = base_ + kScalesStart + i * 4;
        if constexpr (C::kScale) {
          store_word(to, __float_as_uint(load_parameter<T>(scalars_.scale, first + i)));
        }
        if constexpr (C::kBias) {
          store_word(to + kOwn * 4, __float_as_uint(load_parameter<T>(scalars_.bias, first + i)));
        }
      }
      sync_first<kConsumers>();
    }
  }

  __device__ __forceinline__ void scale_sums(float (&sums)[kOwnSums]) const {
#pragma unroll
    for (int j = 0; j < kOwn / 8; ++j) {
      const uint32_t at = base_ + kScalesStart + (8 * j + threadIdx.x % 4 * 2) * 4;
      const float2 scale = C::kScale ? load_pair(at) : float2{1.f, 1.f};
      const float2 bias = C::kBias ? load_pair(at + kOwn * 4) : float2{0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (C::kScale) sums[4 * j + i] *= i % 2 ? scale.y : scale.x;
        if constexpr (C::kBias) sums[4 * j + i] += i % 2 ? bias.y : bias.x;
      }
    }
  }

  /// `parity` is that of the tile, of those that the block makes.
  __device__ __forceinline__ void finish(const float (&sums)[kOwnSums], float offset,
                                         uint32_t parity = 0) const {
    if constexpr (Expression::kResidual || Expression::kSaved) wait(residual_full(), parity);
    const int rows = gathers_h_.count, columns = gathers_w_.count;
    if constexpr (!C::kGathers) {
      finish_with<0, 0>(sums, offset);
    } else if (rows == 2 && columns == 2) {
      finish_with<2, 2>(sums, offset);
    } else if (rows == 2 && columns == 1) {
      finish_with<2, 1>(sums, offset);
    } else if (rows == 1 && columns == 2) {
      finish_with<1, 2>(sums, offset);
    } else if (rows == 1 && columns == 1) {
      finish_with<1, 1>(sums, offset);
    } else {
      finish_with<0, 0>(sums, offset);
    }
  }

  /// With so many windows of a pool along each axis of a pixel.
  template <int kRows, int kColumns>
  __device__ __forceinline__ void finish_with(const float (&sums)[kOwnSums], float offset) const {
    const int row = threadIdx.x / 32 * 16 + row_of_warp();  // four warps of a group: 64 rows
    const int rows[2] = {out_row(row), out_row(row + 8)};
    const bool inside[2] = {is_inside(row), is_inside(row + 8)};
    uint32_t from[2][kRows * kColumns + 1];
    find_windows<kRows, kColumns>(row, from[0]);
    find_windows<kRows, kColumns>(row + 8, from[1]);
    Sums added(base_ + kSumsStart);
#pragma unroll
    for (int j = 0; j < kOwn / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int pixel = rows[half];
        const float2 v = {sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]};
        float2 residual = {}, saved = {};
        if constexpr (C::kGathers) residual = gathered<kRows * kColumns>(from[half], j);
        if constexpr (kInPlace) residual = loaded<TileOfResidual>(kResidualStart, pixel, j);
        if constexpr (Expression::kSaved) saved = loaded<TileOfSaved>(kSavedStart, pixel, j);
        if constexpr (C::kUnshifted) {
          const float2 inner = evaluate<typename C::Unshifted>(v, residual, offset, saved);
          put<TileOfUnshifted>(kUnshiftedStart, pixel, j, inner);
        }
        added.take(inside[half], v, residual, offset, saved);
        put<TileOfY>(kOutStart, pixel, j, evaluate<Expression>(v, residual, offset, saved));
      }
      added.end_pair(j);
    }
    added.end();
  }

  /// This thread's two of eight channels of a pixel, in the tile that begins there.
  template <class Of>
  __device__ __forceinline__ float2 loaded(int start, int pixel, int j) const {
    return Of::load(Of::place(base_, pixel, j) + start);
  }
  template <class Of>
  __device__ __forceinline__ void put(int start, int pixel, int j, float2 v) const {
    Of::store(Of::place(base_, pixel, j) + start, v);
  }

  /// Where this thread reads the windows of a pixel, but for the channels' place in the swizzle.
  template <int kRows, int kColumns>
  __device__ __forceinline__ void find_windows(int row, uint32_t* from) const {
    const Place place = place_of(row);
    const int first = (min(place.n, C::kBoxN - 1) * kGatherH + place.h) * kGatherW + place.w;
#pragma unroll
    for (int i = 0; i < kRows * kColumns; ++i) {
      const int pixel = first + i / kColumns * kGatherW + i % kColumns;
      from[i] = TileOfResidual::place(base_ + kGatherStart, pixel, 0);
    }
  }

  /// The gradient of an average pool at two channels of a pixel, from its windows.
  template <int kWindows>
  __device__ __forceinline__ float2 gathered(const uint32_t* from, int j) const {
    float2 sum = {};
#pragma unroll
    for (int i = 0; i < kWindows; ++i) {
      const float2 two = TileOfResidual::load(TileOfResidual::moved(from[i], j, kGatherBytes));
      sum.x += two.x, sum.y += two.y;
    }
    return {sum.x * C::kPoolScale, sum.y * C::kPoolScale};
  }
};

}  // namespace plantune
