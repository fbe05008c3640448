// Batch norm in training, and what follows it place by place.
//
//   y = Expression((x - mean) * invstd * weight[channel] + bias[channel])   =
//   x, y             kRows pixels of kChannels
//   mean, invstd     float of the batch, =; null if not wanted
//   new_mean, _var   the running ones, moved by kMomentum towards the batch's, =; null if not wanted
//
// A block's sums are of distances from a middle one of three of its elements, so that no digits are
// lost, far from zero or beside one large element; then the means and squares of slices are merged.
// `collect` leaves what each slice has, and comes before `run` where the slices are not the blocks of
// a cluster. All arithmetic is float, in a fixed order: deterministic.

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

  /// What a block's channels are normalised with; before the statistics are there, `scale` is the
  /// weight.
  struct Affine {
    float mean[kWide], scale[kWide], bias[kWide], variance[kWide], invstd[kWide];
  };

  template <bool kAligned>
  static __device__ __forceinline__ void collect(const Arguments& a) {
    __shared__ Room room;
    __shared__ float shift[kWide];
    release_successor();
    wait_for_predecessor();
    const Place place;
    Word x[kBatch];
    read<kAligned>(a, place, x, room, shift);
    Base::merge_block(room, [&](int channel, const Sums& sums, int lane, int) {
      const int at = place.slice * kChannels + place.group * kWide + channel;
      if (lane == 0) a.parts[at] = moments(place, sums, shift[channel]);
    });
  }

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ Affine affine;
    Base::begin();
    release_successor();
    wait_for_predecessor();
    const Place place;
    for (int c = threadIdx.x; c < kWide; c += Base::kThreads) {
      affine.scale[c] = to_float(a.weight[place.group * kWide + c]);
      affine.bias[c] = to_float(a.bias[place.group * kWide + c]);
    }
    if constexpr (!kTogether) __syncthreads();
    Word x[kBatch];
    const auto use = [&](int channel, const Moments& all, int lane, int) {
      if (lane == 0) settle(channel, all, affine);
    };
    if constexpr (kTogether) {
      __shared__ Room room;
      __shared__ float shift[kWide];
      read<kAligned>(a, place, x, room, shift);
      const auto of_slice = [&](int channel, const Sums& sums) {
        return moments(place, sums, shift[channel]);
      };
      Base::merge_cluster(room, place, of_slice, use);
    } else {
      Base::template merge<kSlices>(a.parts + place.group * kWide, kChannels, use);
    }
    __syncthreads();
    float mean[kVector], scale[kVector], bias[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      mean[k] = affine.mean[place.column * kVector + k];
      scale[k] = affine.scale[place.column * kVector + k];
      bias[k] = affine.bias[place.column * kVector + k];
    }
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      if constexpr (!kHolds) Base::template load<kAligned>(a.x, place, batch * kBatch, x);
      leave<kAligned>(a, place, batch * kBatch, x, mean, scale, bias);
    }
    if (place.slice == 0) leave_statistics(a, place, affine);
  }

 private:
  /// What each warp has of the slice is left in the room, as distances from `shift`; what a thread
  /// holds is in `x` afterwards.
  template <bool kAligned>
  static __device__ __forceinline__ void read(const Arguments& a, const Place& place,
                                              Word (&x)[kBatch], Room& room, float* shift) {
    float middle[kVector] = {};
    Sums sums[kVector] = {};
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      Base::template load<kAligned>(a.x, place, batch * kBatch, x);
      if (batch == 0) take_middle<kAligned>(a.x, place, middle);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (!place.has(batch * kBatch + i)) continue;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float distance = x[i][k] - middle[k];
          sums[k].merge({distance, distance * distance});
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      if (place.lane == 0) shift[place.column * kVector + k] = middle[k];
    }
    Base::leave_sums(room, place, sums);
  }

  /// Of each channel the middle one of the slice's first, last and middle element.
  template <bool kAligned>
  static __device__ __forceinline__ void take_middle(const T* x, const Place& place,
                                                     float (&middle)[kVector]) {
    if (place.rows <= 0) return;
    const T* first = x + place.first * kChannels + place.channel;
    Word of[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      of[i].template load<kAligned>(first + (place.rows - 1) * i / 2 * kChannels);
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const float low = fminf(of[0][k], of[1][k]), high = fmaxf(of[0][k], of[1][k]);
      middle[k] = fmaxf(low, fminf(high, of[2][k]));
    }
  }

  static __device__ __forceinline__ Moments moments(const Place& place, const Sums& sums,
                                                    float shift) {
    if (place.rows <= 0) return {};
    const float count = float(place.rows), distance = sums.first / count;
    const float squares = sums.second - distance * sums.first;
    return {count, shift + distance, squares < 0.f ? 0.f : squares};
  }

  static __device__ __forceinline__ void settle(int channel, const Moments& all, Affine& affine) {
    const float variance = all.squares * (1.f / kRows), invstd = rsqrtf(variance + Norm::kEps);
    affine.mean[channel] = all.mean, affine.variance[channel] = variance;
    affine.invstd[channel] = invstd;
    affine.scale[channel] *= invstd;
  }

  /// After all else: nothing of this pass waits for them.
  static __device__ __forceinline__ void leave_statistics(const Arguments& a, const Place& place,
                                                          const Affine& affine) {
    constexpr float kUnbiased = float(double(kRows) / double(kRows - 1));
    for (int c = threadIdx.x; c < kWide; c += Base::kThreads) {
      const int at = place.group * kWide + c;
      const float mean = affine.mean[c], variance = affine.variance[c];
      if (a.mean != nullptr) a.mean[at] = mean;
      if (a.invstd != nullptr) a.invstd[at] = affine.invstd[c];
      if (a.new_mean != nullptr) a.new_mean[at] = moved(a.old_mean[at], mean);
      if (a.new_var != nullptr) a.new_var[at] = moved(a.old_var[at], variance * kUnbiased);
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
