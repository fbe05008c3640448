// Batch norm in training, and what follows it place by place.
//
//   y = Expression((x - mean) * invstd * weight[channel] + bias[channel])   =
//   x, y             kRows pixels of kChannels
//   mean, invstd     float of the batch, =; null if not wanted
//   new_mean, _var   the running ones, moved by kMomentum towards the batch's, =; null if not wanted
//
// A thread's sums are of distances from its first element, so that no digits are lost; then the
// threads' means and squares are merged. `collect` leaves what each slice has, and comes before
// `run` where the slices are not the blocks of a cluster. All arithmetic is float, in a fixed order:
// deterministic.

#pragma once

#include "cuda/channel_slices.h"
#include "cuda/epilogue.h"
#include "cuda/launch.h"

namespace plantune {

template <typename Norm>
struct BatchNorm : ChannelSlices<Norm> {
  using Base = ChannelSlices<Norm>;
  using typename Base::Place, typename Base::T, typename Base::Word;
  using Base::kBatch, Base::kBatches, Base::kChannels, Base::kColumns, Base::kHolds, Base::kRows,
      Base::kSlices, Base::kTogether, Base::kVector, Base::kWide;
  using P = typename Norm::P;
  using Expression = typename Norm::Expression;
  using Room = typename Base::template Room<Moments>;

  struct Arguments {
    const T* x;
    T* y;
    const P* weight;
    const P* bias;
    const T* residual;
    const P* old_mean;
    const P* old_var;
    float* mean;
    float* invstd;
    P* new_mean;
    P* new_var;
    Moments* parts;  // of each slice and channel
  };

  /// What a block's channels are normalised with.
  struct Affine {
    float mean[kWide], scale[kWide];
  };

  template <bool kAligned>
  static __device__ __forceinline__ void collect(const Arguments& a) {
    __shared__ Room room;
    release_successor();
    wait_for_predecessor();
    const Place place;
    Word x[kBatch];
    read<kAligned>(a, place, x, room);
    Base::merge_block(room, [&](int channel, const Moments& all, int lane, int) {
      const int at = place.slice * kChannels + place.group * kWide + channel;
      if (lane == 0) a.parts[at] = all;
    });
  }

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ Affine affine;
    Base::begin();
    release_successor();
    wait_for_predecessor();
    const Place place;
    Word x[kBatch];
    const auto use = [&](int channel, const Moments& all, int lane, int) {
      if (lane == 0) settle(a, place, channel, all, affine);
    };
    if constexpr (kTogether) {
      __shared__ Room room;
      read<kAligned>(a, place, x, room);
      Base::merge_cluster(room, place, use);
    } else {
      Base::template merge<kSlices>(a.parts + place.group * kWide, kChannels, use);
    }
    __syncthreads();
    float mean[kVector], scale[kVector], bias[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      mean[k] = affine.mean[place.column * kVector + k];
      scale[k] = affine.scale[place.column * kVector + k];
      bias[k] = to_float(a.bias[place.channel + k]);
    }
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      if constexpr (!kHolds) Base::template load<kAligned>(a.x, place, batch * kBatch, x);
      leave<kAligned>(a, place, batch * kBatch, x, mean, scale, bias);
    }
  }

 private:
  /// What each warp has of the slice is left in the room; what a thread holds is in `x` afterwards.
  template <bool kAligned>
  static __device__ __forceinline__ void read(const Arguments& a, const Place& place,
                                              Word (&x)[kBatch], Room& room) {
    float shift[kVector] = {}, sum[kVector] = {}, squares[kVector] = {};
    int words = 0;
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      Base::template load<kAligned>(a.x, place, batch * kBatch, x);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        if (batch == 0 && place.has(0)) shift[k] = x[0][k];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (!place.has(batch * kBatch + i)) continue;
        ++words;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float distance = x[i][k] - shift[k];
          sum[k] += distance;
          squares[k] += distance * distance;
        }
      }
    }
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const float distance = words == 0 ? 0.f : sum[k] / words;
      Moments all = {float(words), shift[k] + distance, squares[k] - distance * sum[k]};
#pragma unroll
      for (int i = 16; i >= kColumns; i /= 2) all.merge(all.of_lane(i));
      if (threadIdx.x % 32 < kColumns) {
        room.warps[warp * kWide + place.column * kVector + k] = all;
      }
    }
  }

  /// The statistics of a channel; those that leave, from the block of the first slice.
  static __device__ __forceinline__ void settle(const Arguments& a, const Place& place, int channel,
                                                const Moments& all, Affine& affine) {
    const int at = place.group * kWide + channel;
    const float invstd = rsqrtf(all.squares * (1.f / kRows) + Norm::kEps);
    affine.mean[channel] = all.mean, affine.scale[channel] = invstd * to_float(a.weight[at]);
    if (place.slice != 0) return;
    if (a.mean != nullptr) a.mean[at] = all.mean;
    if (a.invstd != nullptr) a.invstd[at] = invstd;
    if (a.new_mean != nullptr) a.new_mean[at] = moved(a.old_mean[at], all.mean);
    if (a.new_var != nullptr) {
      a.new_var[at] = moved(a.old_var[at], all.squares * (1.f / (kRows - 1)));
    }
  }

  static __device__ __forceinline__ P moved(P old, float batch) {
    return from_float<P>(to_float(old) * (1.f - Norm::kMomentum) + batch * Norm::kMomentum);
  }

  /// Writes a batch of words; what they are added to is read first.
  template <bool kAligned>
  static __device__ __forceinline__ void leave(const Arguments& a, const Place& place, int start,
                                               const Word (&x)[kBatch],
                                               const float (&mean)[kVector],
                                               const float (&scale)[kVector],
                                               const float (&bias)[kVector]) {
    constexpr int kAtOnce = smaller(kBatch, 2);
#pragma unroll
    for (int j = 0; j < kBatch; j += kAtOnce) {
      Word residual[kAtOnce];
      if constexpr (Expression::kResidual) {
        Base::template load<kAligned>(a.residual, place, start + j, residual);
      }
#pragma unroll
      for (int i = j; i < smaller(j + kAtOnce, kBatch); ++i) {
        if (!place.has(start + i)) continue;
        float y[kVector];
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          At at{(x[i][k] - mean[k]) * scale[k] + bias[k]};
          if constexpr (Expression::kResidual) at.residual = residual[i - j][k];
          y[k] = Expression::of(at);
        }
        Word rounded;
        rounded.round(y);
        rounded.store(a.y + place.at(start + i));
      }
    }
  }
};

}  // namespace plantune
