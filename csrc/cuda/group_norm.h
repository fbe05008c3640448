// Group norm of images, and what follows it place by place.
//
//   y = Expression((x - mean) * rstd * weight[channel] + bias[channel])   =
//   x, y        (N, kPixels, kChannels) if kNhwc, else (N, kChannels, kPixels)
//   mean, rstd  for each image and group, =; null if not wanted
//
// x, y, the residual, weight with bias, and mean with rstd have element types of their own. A block has kGroups neighbouring groups of one image. What a thread reads stays in its registers
// where that is little, else it is read again. A thread's sums are of distances from its first
// element, so that no digits are lost; then the threads' means and squares are merged. All
// arithmetic is float, in a fixed order: deterministic.

#pragma once

#include "cuda/launch.h"
#include "cuda/moments.h"
#include "cuda/sample_norm.h"

namespace plantune {

constexpr int larger(int a, int b) { return a > b ? a : b; }

template <typename Norm>
struct GroupNorm {
  using X = typename Norm::X;
  using Statistic = typename Norm::Statistic;
  using Expression = typename Norm::Expression;
  static constexpr bool kNhwc = Norm::kNhwc;
  static constexpr int kVector = Norm::kVector, kGroups = Norm::kGroups;
  static constexpr int kThreads = Norm::kThreads, kWarps = kThreads / 32;
  static constexpr int kChannels = Norm::kChannels, kPixels = Norm::kPixels;
  static constexpr int kOfGroup = Norm::kOfGroup;  // channels of a group
  static constexpr int kSlices = kChannels / (kGroups * kOfGroup);
  // Side by side, threads have the vectors of a pixel's channels, and under each other pixels.
  static constexpr int kColumns = kNhwc ? kGroups * kOfGroup / kVector : 1;
  static constexpr int kColumnsOfGroup = kNhwc ? larger(kOfGroup / kVector, 1) : 1;
  // A vector may have several groups, each of them kPart elements.
  static constexpr int kSpan = kNhwc ? larger(kVector / kOfGroup, 1) : 1;
  static constexpr int kPart = kVector / kSpan;
  static constexpr int kLanes = kThreads / kColumns;
  static constexpr int kRows = kNhwc ? kPixels : kOfGroup * kPixels / kVector;
  static constexpr int kStride = kNhwc ? kChannels : kVector;  // from row to row
  static constexpr int kWords = ceil_div(kRows, kLanes);
  static constexpr bool kHolds = kWords <= 4096 / kThreads;
  // Words that are asked for before the first is used, as registers allow.
  static constexpr int kAtOnce = smaller(kWords, kHolds ? 2 : 2048 / kThreads);
  static constexpr int kBatch = kHolds ? ceil_div(kWords, kAtOnce) * kAtOnce : kAtOnce;
  static constexpr int kBatches = ceil_div(kWords, kBatch);
  using Word = Neighbours<X, kVector>;

  static_assert(kLanes > 0 && kChannels % (kGroups * kOfGroup) == 0, "blocks have whole groups");
  static_assert(kNhwc || kGroups == 1, "an image in nchw has its groups one after the other");
  static_assert(kNhwc ? kOfGroup % kPart == 0 && kGroups * kOfGroup % kVector == 0
                      : kPixels % kVector == 0,
                "a vector has one channel's pixels, a part of a group, or whole groups");

  using Arguments = NormArguments<Norm>;

  struct Shared {
    Moments parts[kThreads * kSpan];
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
    read<kAligned>(a.x + first, lane, x, shared.parts + threadIdx.x * kSpan);
    __syncthreads();
    merge(a, shared);
    __syncthreads();
    Affine affine;
    affine.take(shared, column / kColumnsOfGroup * kSpan);
    if constexpr (kNhwc) affine.load(a, channel);
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      if constexpr (!kHolds) load<kAligned>(a.x + first, lane, batch, x);
#pragma unroll
      for (int i = 0; i < kBatch; i += kAtOnce) {
        leave<kAligned>(a, first, channel, lane, batch * kBatch + i, x + i, affine);
      }
    }
  }

 private:
  /// What a thread's elements are normalised with.
  struct Affine {
    static constexpr int kCount = kNhwc ? kVector : 1;
    float mean[kSpan], rstd[kSpan], scale[kCount], bias[kCount];

    __device__ __forceinline__ void take(const Shared& shared, int group) {
#pragma unroll
      for (int s = 0; s < kSpan; ++s) {
        mean[s] = shared.mean[group + s], rstd[s] = shared.rstd[group + s];
      }
    }

    __device__ __forceinline__ void load(const Arguments& a, int channel) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        scale[k] = rstd[k / kPart];
        if constexpr (Norm::kWeight) scale[k] *= to_float(a.weight[channel + k]);
        if constexpr (Norm::kBias) bias[k] = to_float(a.bias[channel + k]);
      }
    }

    __device__ __forceinline__ float of(float x, int k) const {
      const float value = (x - mean[k / kPart]) * scale[kNhwc ? k : 0];
      return Norm::kBias ? value + bias[kNhwc ? k : 0] : value;
    }
  };

  /// The row of a thread's word number `i`; one beyond the end if it has none.
  static __device__ __forceinline__ int row_at(int lane, int i) {
    return lane < kLanes ? i * kLanes + lane : kRows;
  }

  template <bool kAligned>
  static __device__ __forceinline__ void load(const X* from, int lane, int batch,
                                              Word (&x)[kBatch]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = row_at(lane, batch * kBatch + i);
      if (row >= kRows) continue;
      x[i].template load<kAligned>(from + row * (long long)(kStride));
    }
  }

  /// What a thread has of its groups; what it holds is in `x` afterwards.
  template <bool kAligned>
  static __device__ __forceinline__ void read(const X* from, int lane, Word (&x)[kBatch],
                                              Moments* found) {
    float shift[kSpan] = {}, sum[kSpan] = {}, squares[kSpan] = {};
    int words = 0;
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      load<kAligned>(from, lane, batch, x);
#pragma unroll
      for (int s = 0; s < kSpan; ++s) {
        if (batch == 0) shift[s] = x[0][s * kPart];
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (row_at(lane, batch * kBatch + i) >= kRows) continue;
        ++words;
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float distance = x[i][k] - shift[k / kPart];
          sum[k / kPart] += distance;
          squares[k / kPart] += distance * distance;
        }
      }
    }
    const float count = float(words * kPart);
#pragma unroll
    for (int s = 0; s < kSpan; ++s) {
      const float distance = words == 0 ? 0.f : sum[s] / count;
      found[s] = {count, shift[s] + distance, squares[s] - distance * sum[s]};
    }
  }

  /// The statistics of each group; a warp merges those of one.
  static __device__ __forceinline__ void merge(const Arguments& a, Shared& shared) {
    for (int group = threadIdx.x / 32; group < kGroups; group += kWarps) {
      Moments all = {0.f, 0.f, 0.f};
      for (int i = threadIdx.x % 32; i < kLanes * kColumnsOfGroup; i += 32) {
        const int column = group / kSpan * kColumnsOfGroup + i % kColumnsOfGroup;
        const int thread = i / kColumnsOfGroup * kColumns + column;
        all.merge(shared.parts[thread * kSpan + group % kSpan]);
      }
#pragma unroll
      for (int i = 16; i > 0; i /= 2) all.merge(all.of_lane(i));
      if (threadIdx.x % 32 != 0) continue;
      const float rstd = rsqrtf(all.squares * (1.f / (kOfGroup * kPixels)) + Norm::kEps);
      shared.mean[group] = all.mean, shared.rstd[group] = rstd;
      const long long place = blockIdx.x * (long long)(kGroups) + group;
      if (a.mean != nullptr) a.mean[place] = from_float<Statistic>(all.mean);
      if (a.rstd != nullptr) a.rstd[place] = from_float<Statistic>(rstd);
    }
  }

  /// Writes a thread's words from number `at` on; what they are added to is read first.
  template <bool kAligned>
  static __device__ __forceinline__ void leave(const Arguments& a, long long first, int channel,
                                               int lane, int at, const Word* x, Affine& affine) {
    Neighbours<typename Norm::Residual, kVector> residual[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = row_at(lane, at + i);
      if (!Expression::kResidual || row >= kRows) continue;
      residual[i].template load<kAligned>(a.residual + first + row * (long long)(kStride));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = row_at(lane, at + i);
      if (row >= kRows) continue;
      if constexpr (!kNhwc) affine.load(a, channel + row * kVector / kPixels);
      float y[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) y[k] = affine.of(x[i][k], k);
      leave_vector<Expression>(a.y + first + row * (long long)(kStride), y, residual[i]);
    }
  }
};

}  // namespace plantune
