// Group norm of images, and what follows it place by place.
//
//   y = Expression((x - mean) * rstd * weight[channel] + bias[channel])   =
//   x, y        (N, kPixels, kChannels) if kNhwc, else (N, kChannels, kPixels)
//   mean, rstd  T for each image and group, =; null if not wanted
//
// A block has kGroups neighbouring groups of one image. What a thread reads stays in its registers
// where that is little, else it is read again. A thread's sums are of distances from its first
// element, so that no digits are lost; then the threads' means and squares are merged. All
// arithmetic is float, in a fixed order: deterministic.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/launch.h"
#include "cuda/vector.h"

namespace plantune {

/// Count, mean and squared deviations of some numbers.
struct Moments {
  float count, mean, squares;

  __device__ __forceinline__ void merge(const Moments& other) {
    if (other.count == 0.f) return;
    const float both = count + other.count, part = other.count / both;
    const float distance = other.mean - mean;
    mean += distance * part;
    squares += other.squares + distance * distance * count * part;
    count = both;
  }
};

template <typename Norm>
struct GroupNorm {
  using T = typename Norm::T;
  using Expression = typename Norm::Expression;
  static constexpr bool kNhwc = Norm::kNhwc;
  static constexpr int kVector = Norm::kVector, kGroups = Norm::kGroups;
  static constexpr int kThreads = Norm::kThreads, kWarps = kThreads / 32;
  static constexpr int kChannels = Norm::kChannels, kPixels = Norm::kPixels;
  static constexpr int kOfGroup = Norm::kOfGroup;  // channels of a group
  static constexpr int kSlices = kChannels / (kGroups * kOfGroup);
  // Side by side, threads have the vectors of a pixel's channels, and under each other pixels.
  static constexpr int kColumns = kNhwc ? kGroups * kOfGroup / kVector : 1;
  static constexpr int kColumnsOfGroup = kColumns / kGroups;
  static constexpr int kLanes = kThreads / kColumns;
  static constexpr int kRows = kNhwc ? kPixels : kOfGroup * kPixels / kVector;
  static constexpr int kStride = kNhwc ? kChannels : kVector;  // from row to row
  static constexpr int kWords = ceil_div(kRows, kLanes);
  static constexpr bool kHolds = kWords <= 65536 / kThreads / 12;
  static constexpr int kBatch = kHolds ? kWords : 4;
  static constexpr int kBatches = ceil_div(kWords, kBatch);
  using Word = Vector<T, kVector>;

  static_assert(kLanes > 0 && kChannels % (kGroups * kOfGroup) == 0, "blocks have whole groups");
  static_assert(kNhwc || kGroups == 1, "an image in nchw has its groups one after the other");
  static_assert((kNhwc ? kOfGroup : kPixels) % kVector == 0, "a vector is of one group");

  struct Arguments {
    const T* x;
    T* y;
    const T* weight;
    const T* bias;
    const T* residual;
    T* mean;
    T* rstd;
  };

  struct Shared {
    Moments parts[kThreads];
    float mean[kGroups], rstd[kGroups];
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ Shared shared;
    release_successor();
    wait_for_predecessor();
    const int column = threadIdx.x % kColumns, lane = threadIdx.x / kColumns;
    const int channel = blockIdx.x % kSlices * (kGroups * kOfGroup) + column * kVector;
    const long long image = blockIdx.x / kSlices * (long long)(kChannels)*kPixels;
    const long long first = image + (kNhwc ? channel : channel * (long long)(kPixels));

    Word x[kBatch];
    shared.parts[threadIdx.x] = read<kAligned>(a.x + first, lane, x);
    __syncthreads();
    merge(a, shared);
    __syncthreads();
    const int group = column / kColumnsOfGroup;
    const float mean = shared.mean[group], rstd = shared.rstd[group];
    Affine affine;
    if constexpr (kNhwc) affine.load(a, channel);
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      if constexpr (!kHolds) load<kAligned>(a.x + first, lane, batch, x);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = row_at(lane, batch, i);
        if (lane >= kLanes || row >= kRows) continue;
        if constexpr (!kNhwc) affine.load(a, channel + row * kVector / kPixels);
        leave<kAligned>(a, first + row * (long long)(kStride), x[i], mean, rstd, affine);
      }
    }
  }

 private:
  /// Weight and bias of a thread's channels.
  struct Affine {
    static constexpr int kCount = kNhwc ? kVector : 1;
    float weight[kCount], bias[kCount];

    __device__ __forceinline__ void load(const Arguments& a, int channel) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if constexpr (Norm::kWeight) weight[k] = to_float(a.weight[channel + k]);
        if constexpr (Norm::kBias) bias[k] = to_float(a.bias[channel + k]);
      }
    }
  };

  static __device__ __forceinline__ int row_at(int lane, int batch, int i) {
    return (batch * kBatch + i) * kLanes + lane;
  }

  template <bool kAligned>
  static __device__ __forceinline__ void load(const T* from, int lane, int batch,
                                              Word (&x)[kBatch]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = row_at(lane, batch, i);
      if (lane >= kLanes || row >= kRows) continue;
      x[i].template load<kAligned>(from + row * (long long)(kStride));
    }
  }

  /// What a thread has of its group; what it holds is in `x` afterwards.
  template <bool kAligned>
  static __device__ __forceinline__ Moments read(const T* from, int lane, Word (&x)[kBatch]) {
    float shift = 0.f, sum = 0.f, squares = 0.f;
    int words = 0;
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      load<kAligned>(from, lane, batch, x);
      if (batch == 0) shift = x[0][0];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (lane >= kLanes || row_at(lane, batch, i) >= kRows) continue;
        ++words;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float distance = x[i][k] - shift;
          sum += distance;
          squares += distance * distance;
        }
      }
    }
    if (words == 0) return {0.f, 0.f, 0.f};
    const float count = float(words * kVector), distance = sum / count;
    return {count, shift + distance, squares - distance * sum};
  }

  /// The statistics of each group; a warp merges those of one.
  static __device__ __forceinline__ void merge(const Arguments& a, Shared& shared) {
    for (int group = threadIdx.x / 32; group < kGroups; group += kWarps) {
      Moments all = {0.f, 0.f, 0.f};
      for (int i = threadIdx.x % 32; i < kLanes * kColumnsOfGroup; i += 32) {
        const int column = group * kColumnsOfGroup + i % kColumnsOfGroup;
        all.merge(shared.parts[i / kColumnsOfGroup * kColumns + column]);
      }
#pragma unroll
      for (int i = 16; i > 0; i /= 2) {
        const Moments other = {__shfl_down_sync(0xFFFFFFFFu, all.count, i),
                               __shfl_down_sync(0xFFFFFFFFu, all.mean, i),
                               __shfl_down_sync(0xFFFFFFFFu, all.squares, i)};
        all.merge(other);
      }
      if (threadIdx.x % 32 != 0) continue;
      const float rstd = rsqrtf(all.squares * (1.f / (kOfGroup * kPixels)) + Norm::kEps);
      shared.mean[group] = all.mean, shared.rstd[group] = rstd;
      const long long place = blockIdx.x * (long long)(kGroups) + group;
      if (a.mean != nullptr) a.mean[place] = from_float<T>(all.mean);
      if (a.rstd != nullptr) a.rstd[place] = from_float<T>(rstd);
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void leave(const Arguments& a, long long place, const Word& x,
                                               float mean, float rstd, const Affine& affine) {
    Word residual;
    if constexpr (Expression::kResidual) residual.template load<kAligned>(a.residual + place);
    float y[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const int channel = kNhwc ? k : 0;
      float value = (x[k] - mean) * rstd;
      if constexpr (Norm::kWeight) value *= affine.weight[channel];
      if constexpr (Norm::kBias) value += affine.bias[channel];
      At at{value};
      if constexpr (Expression::kResidual) at.residual = residual[k];
      y[k] = Expression::of(at);
    }
    Word rounded;
    rounded.round(y);
    rounded.store(a.y + place);
  }
};

}  // namespace plantune
