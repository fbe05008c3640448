// The gradients of a batch norm in training, and what its result's gradient follows from place by
// place.
//
//   dy      = the last element of Head::evaluate(in[0][...], in[1][...], ...), of which in[kAgain], if
//             that is not -1, is not read but made: the norm's result, with `bias`
//   out[j]  = element j of it, if it leaves
//   dbias   = sum of dy                                   =, of each channel; null if not wanted
//   dweight = sum of dy * (x - mean) * invstd             =, of each channel; null if not wanted
//   dx      = weight * invstd * (dy - dbias / kRows - (x - mean) * invstd * dweight / kRows)   =
//   in, out, x, dx   kRows pixels of kChannels
//   mean, invstd     float, of the batch
//
// `collect` leaves the sums of each slice, and comes before `run` where the slices are not the blocks
// of a cluster. All arithmetic is float, in a fixed order: deterministic.

#pragma once

#include "cuda/arithmetic.h"  // what Head calls
#include "cuda/channel_slices.h"
#include "cuda/launch.h"

namespace plantune {

template <typename Norm>
struct BatchNormGrad : ChannelSlices<Norm> {
  using Base = ChannelSlices<Norm>;
  using typename Base::Place, typename Base::T, typename Base::Word;
  using Base::kBatch, Base::kBatches, Base::kChannels, Base::kColumns, Base::kHolds, Base::kRows,
      Base::kSlices, Base::kTogether, Base::kVector, Base::kWide;
  using P = typename Norm::P;
  using Head = typename Norm::Head;
  static constexpr int kInputs = Head::kInputs, kStored = Head::kOutputs - 1;
  static constexpr int kAgain = Norm::kAgain;
  using Room = typename Base::template Room<Sums>;

  struct Arguments {
    const T* x;
    const P* weight;
    const float* mean;
    const float* invstd;
    const P* bias;  // of kAgain alone
    T* dx;
    P* dweight;
    P* dbias;
    Sums* parts;  // of each slice and channel
    const T* in[kInputs];
    T* out[kStored + 1];  // the last of them is not there
  };

  /// dx = scale * (dy - constant - (x - mean) * slope) of a block's channels; before the sums are
  /// there, `scale` is the weight.
  struct Line {
    float scale[kWide], constant[kWide], slope[kWide], invstd[kWide];
  };

  /// Of a thread's channels: the mean, and of kAgain how the norm's result follows from x.
  struct Normal {
    float mean[kVector], scale[kAgain < 0 ? 1 : kVector], bias[kAgain < 0 ? 1 : kVector];

    __device__ __forceinline__ void take(const Arguments& a, const Place& place) {
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const int at = place.channel + k;
        mean[k] = a.mean[at];
        if constexpr (kAgain >= 0) {
          scale[k] = to_float(a.weight[at]) * a.invstd[at];
          bias[k] = to_float(a.bias[at]);
        }
      }
    }
  };

  template <bool kAligned>
  static __device__ __forceinline__ void collect(const Arguments& a) {
    __shared__ Room room;
    release_successor();
    wait_for_predecessor();
    const Place place;
    Word dy[kBatch], x[kBatch];
    Normal normal;
    read<kAligned>(a, place, dy, x, normal, room);
    Base::merge_block(room, [&](int channel, const Sums& all, int lane, int) {
      const int at = place.slice * kChannels + place.group * kWide + channel;
      if (lane == 0) a.parts[at] = all;
    });
  }

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ Line line;
    Base::begin();
    release_successor();
    wait_for_predecessor();
    const Place place;
    Word dy[kBatch], x[kBatch];
    Normal normal;
    for (int c = threadIdx.x; c < kWide; c += Base::kThreads) {
      line.scale[c] = to_float(a.weight[place.group * kWide + c]);
      line.invstd[c] = a.invstd[place.group * kWide + c];
    }
    if constexpr (!kTogether) __syncthreads();
    const auto use = [&](int channel, const Sums& all, int lane, int) {
      if (lane == 0) settle(a, place, channel, all, line);
    };
    if constexpr (kTogether) {
      __shared__ Room room;
      read<kAligned>(a, place, dy, x, normal, room);
      const auto same = [](int, const Sums& sums) { return sums; };
      Base::merge_cluster(room, place, same, use);
    } else {
      normal.take(a, place);
      Base::template merge<kSlices>(a.parts + place.group * kWide, kChannels, use);
    }
    __syncthreads();
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      if constexpr (!kHolds) {
        Base::template load<kAligned>(a.x, place, batch * kBatch, x);
        take<kAligned, false>(a, place, batch * kBatch, x, normal, dy);
      }
      leave(a, place, batch * kBatch, dy, x, normal.mean, line);
    }
  }

 private:
  /// The words of dy, rounded as if they had left; what leaves beside them is written if `kStores`.
  template <bool kAligned, bool kStores>
  static __device__ __forceinline__ void take(const Arguments& a, const Place& place, int start,
                                              const Word (&x)[kBatch], const Normal& normal,
                                              Word (&dy)[kBatch]) {
    Word in[kInputs][kBatch];
#pragma unroll
    for (int j = 0; j < kInputs; ++j) {
      if (j == kAgain) continue;
      Base::template load<kAligned>(a.in[j], place, start, in[j]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (!place.has(start + i)) continue;
      float out[kStored + 1][kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        float read[kInputs], made[kStored + 1];
#pragma unroll
        for (int j = 0; j < kInputs; ++j) {
          if constexpr (kAgain >= 0) {
            const float made_again = (x[i][k] - normal.mean[k]) * normal.scale[k] + normal.bias[k];
            read[j] = j == kAgain ? made_again : in[j][i][k];
          } else {
            read[j] = in[j][i][k];
          }
        }
        Head::evaluate(read, made);
#pragma unroll
        for (int j = 0; j <= kStored; ++j) out[j][k] = made[j];
      }
      dy[i].round(out[kStored]);
#pragma unroll
      for (int j = 0; kStores && j < kStored; ++j) {
        Word rounded;
        rounded.round(out[j]);
        rounded.store(a.out[j] + place.at(start + i));
      }
    }
  }

  /// What each warp has of the slice is left in the room; what a thread holds is in `dy` and `x`.
  template <bool kAligned>
  static __device__ __forceinline__ void read(const Arguments& a, const Place& place,
                                              Word (&dy)[kBatch], Word (&x)[kBatch],
                                              Normal& normal, Room& room) {
    Sums sums[kVector] = {};
    normal.take(a, place);
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      Base::template load<kAligned>(a.x, place, batch * kBatch, x);
      take<kAligned, true>(a, place, batch * kBatch, x, normal, dy);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (!place.has(batch * kBatch + i)) continue;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          sums[k].merge({dy[i][k], dy[i][k] * (x[i][k] - normal.mean[k])});
        }
      }
    }
    Base::leave_sums(room, place, sums);
  }

  /// What a channel's gradient follows from; the sums leave from the block of the first slice.
  static __device__ __forceinline__ void settle(const Arguments& a, const Place& place, int channel,
                                                const Sums& all, Line& line) {
    const int at = place.group * kWide + channel;
    const float invstd = line.invstd[channel];
    line.scale[channel] *= invstd;
    line.constant[channel] = all.first * (1.f / kRows);
    line.slope[channel] = all.second * (1.f / kRows) * invstd * invstd;
    if (place.slice != 0) return;
    if (a.dweight != nullptr) a.dweight[at] = from_float<P>(all.second * invstd);
    if (a.dbias != nullptr) a.dbias[at] = from_float<P>(all.first);
  }

  static __device__ __forceinline__ void leave(const Arguments& a, const Place& place, int start,
                                               const Word (&dy)[kBatch], const Word (&x)[kBatch],
                                               const float (&mean)[kVector], const Line& line) {
    float scale[kVector], constant[kVector], slope[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const int channel = place.column * kVector + k;
      scale[k] = line.scale[channel], constant[k] = line.constant[channel];
      slope[k] = line.slope[channel];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (!place.has(start + i)) continue;
      float dx[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        dx[k] = scale[k] * (dy[i][k] - constant[k] - (x[i][k] - mean[k]) * slope[k]);
      }
      Word rounded;
      rounded.round(dx);
      rounded.store(a.dx + place.at(start + i));
    }
  }
};

}  // namespace plantune
