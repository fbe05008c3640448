// The gradients of a group norm of images:
//
//   g = dy * weight[channel],  h = (x - mean) * rstd, with the mean and rstd of image and group
//   dx = (g - mean of g over the group - h * mean of g * h over the group) * rstd          =
//   dweight[channel] = sum over images and pixels of dy * h,  dbias[channel] = sum of dy   =
//   x, dy, dx   (N, kPixels, kChannels) if kNhwc, else (N, kChannels, kPixels)
//   mean, rstd  for each image and group
//
// x, dy, dx, the weight, its gradient with that of the bias, and mean with rstd have element types of
// their own. A block has kGroups neighbouring groups of one image and reads them twice: first it sums dy and
// dy * h of each channel, of which both means follow, and leaves them in `parts`, images by sums by
// channels, which `collect` adds; then it writes dx. What is not wanted is null. All arithmetic is
// float, in a fixed order: deterministic.

#pragma once

#include "cuda/collect.h"
#include "cuda/launch.h"
#include "cuda/operands.h"

namespace plantune {

/// Norm says the sizes; kSums of weight and bias have a gradient, and none means no weight.
template <typename Norm>
struct GroupNormGrad {
  using Dx = typename Norm::Dx;
  using Statistic = typename Norm::Statistic;
  static constexpr bool kNhwc = Norm::kNhwc;
  static constexpr int kVector = Norm::kVector, kGroups = Norm::kGroups, kSums = Norm::kSums;
  static constexpr int kThreads = Norm::kThreads, kWarps = kThreads / 32;
  static constexpr int kChannels = Norm::kChannels, kPixels = Norm::kPixels;
  static constexpr int kOfGroup = Norm::kOfGroup;       // channels of a group
  static constexpr int kMine = kGroups * kOfGroup;      // of a block
  static constexpr int kSlices = kChannels / kMine;     // blocks of an image
  static constexpr int kOfWord = kNhwc ? kVector : 1;   // channels of a word
  static constexpr int kColumns = kMine / kOfWord;      // words beside each other
  // In nchw a warp has one channel after the other, in nhwc a thread has one column.
  static constexpr int kAtOnce = kNhwc ? kColumns : kWarps;
  static constexpr int kLanes = kNhwc ? kThreads / kColumns : 32;  // of a column
  static constexpr int kParts = kNhwc ? kLanes : 1;     // of a channel's sums
  static constexpr int kRows = kNhwc ? kPixels : kPixels / kVector;
  static constexpr int kStride = kNhwc ? kChannels : kVector;  // from row to row
  using X = Neighbours<typename Norm::X, kVector>;
  using Dy = Neighbours<typename Norm::Dy, kVector>;

  static_assert(kLanes > 0, "a pixel's columns fit into a block");
  static_assert(kChannels % kMine == 0, "blocks have whole groups");
  static_assert(kNhwc || kGroups == 1, "an image in nchw has its groups one after the other");
  static_assert((kNhwc ? kMine : kPixels) % kVector == 0, "words are whole");

  struct Arguments {
    const typename Norm::Dy* dy;
    const typename Norm::X* x;
    const Statistic *mean, *rstd;
    const typename Norm::Weight* weight;
    Dx* dx;
    typename Norm::Sum *dweight, *dbias;
    float* parts;
    long long images;
  };

  struct Shared {
    float sums[2][kParts][kMine];  // of dy * h and of dy; part 0 has the whole ones in the end
    float means[2][kGroups];       // of g * h and of g
  };

  /// What belongs to the channels of a thread's word.
  struct Channels {
    float mean[kOfWord], rstd[kOfWord], weight[kOfWord];

    __device__ __forceinline__ Channels(const Arguments& a, int channel) {
      const long long image = blockIdx.x / kSlices;
#pragma unroll
      for (int k = 0; k < kOfWord; ++k) {
        const long long group = image * (kChannels / kOfGroup) + (channel + k) / kOfGroup;
        mean[k] = to_float(a.mean[group]), rstd[k] = to_float(a.rstd[group]);
        weight[k] = kSums > 0 ? to_float(a.weight[channel + k]) : 1.f;
      }
    }

    __device__ __forceinline__ float normal(float x, int k) const {
      return (x - mean[kNhwc ? k : 0]) * rstd[kNhwc ? k : 0];
    }
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ Shared shared;
    release_successor();
    wait_for_predecessor();
    const int own = kNhwc ? threadIdx.x % kColumns : threadIdx.x / 32;
    const int lane = kNhwc ? threadIdx.x / kColumns : threadIdx.x % 32;
    if (lane < kLanes) {
#pragma unroll 1
      for (int column = own; column < kColumns; column += kAtOnce) {
        sum<kAligned>(a, column, lane, shared);
      }
    }
    __syncthreads();
    finish(a, shared);
    if (a.dx == nullptr) return;
    __syncthreads();
    average(a, shared);
    __syncthreads();
    if (lane < kLanes) {
#pragma unroll 1
      for (int column = own; column < kColumns; column += kAtOnce) {
        leave<kAligned>(a, column, lane, shared);
      }
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void collect(const Arguments& a) {
    collect_affine<kChannels, kSums, kThreads>(a.parts, a.images, a.dweight, a.dbias);
  }

 private:
  /// The first of the block's channels.
  static __device__ __forceinline__ int first_channel() { return blockIdx.x % kSlices * kMine; }

  /// Where a column's first word is.
  static __device__ __forceinline__ long long place(int column) {
    const long long image = blockIdx.x / kSlices * (long long)(kChannels)*kPixels;
    const int channel = first_channel() + column * kOfWord;
    return image + (kNhwc ? channel : channel * (long long)(kPixels));
  }

  /// A lane's part of the sums of a column, in nchw those of all lanes.
  template <bool kAligned>
  static __device__ __forceinline__ void sum(const Arguments& a, int column, int lane,
                                             Shared& shared) {
    const Channels channels(a, first_channel() + column * kOfWord);
    const long long from = place(column);
    float products[kOfWord] = {}, plain[kOfWord] = {};
#pragma unroll 2
    for (int row = lane; row < kRows; row += kLanes) {
      Dy dy;
      X x;
      dy.template load<kAligned>(a.dy + from + row * (long long)(kStride));
      x.template load<kAligned>(a.x + from + row * (long long)(kStride));
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        products[kNhwc ? k : 0] += dy[k] * channels.normal(x[k], k);
        plain[kNhwc ? k : 0] += dy[k];
      }
    }
    if constexpr (!kNhwc) {
#pragma unroll
      for (int i = 16; i > 0; i /= 2) {
        products[0] += __shfl_xor_sync(0xFFFFFFFFu, products[0], i);
        plain[0] += __shfl_xor_sync(0xFFFFFFFFu, plain[0], i);
      }
      if (lane != 0) return;
    }
#pragma unroll
    for (int k = 0; k < kOfWord; ++k) {
      shared.sums[0][kNhwc ? lane : 0][column * kOfWord + k] = products[k];
      shared.sums[1][kNhwc ? lane : 0][column * kOfWord + k] = plain[k];
    }
  }

  /// The sums of each channel of the block, which it leaves.
  static __device__ __forceinline__ void finish(const Arguments& a, Shared& shared) {
    const long long image = blockIdx.x / kSlices;
    for (int i = threadIdx.x; i < 2 * kMine; i += kThreads) {
      const int which = i / kMine, channel = i % kMine;
      float whole = shared.sums[which][0][channel];
#pragma unroll 4
      for (int part = 1; part < kParts; ++part) whole += shared.sums[which][part][channel];
      shared.sums[which][0][channel] = whole;
      if (which < kSums) {
        a.parts[(image * kSums + which) * kChannels + first_channel() + channel] = whole;
      }
    }
  }

  /// Both means of each group, by a warp of its own.
  static __device__ __forceinline__ void average(const Arguments& a, Shared& shared) {
    for (int group = threadIdx.x / 32; group < kGroups; group += kWarps) {
      float found[2] = {0.f, 0.f};
      for (int i = threadIdx.x % 32; i < kOfGroup; i += 32) {
        const int channel = group * kOfGroup + i;
        const float weight = kSums > 0 ? to_float(a.weight[first_channel() + channel]) : 1.f;
        found[0] += weight * shared.sums[0][0][channel];
        found[1] += weight * shared.sums[1][0][channel];
      }
#pragma unroll
      for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int i = 16; i > 0; i /= 2) {
          found[which] += __shfl_xor_sync(0xFFFFFFFFu, found[which], i);
        }
        if (threadIdx.x % 32 == 0) {
          shared.means[which][group] = found[which] / (float(kOfGroup) * kPixels);
        }
      }
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void leave(const Arguments& a, int column, int lane,
                                               const Shared& shared) {
    const Channels channels(a, first_channel() + column * kOfWord);
    float product[kOfWord], plain[kOfWord];
#pragma unroll
    for (int k = 0; k < kOfWord; ++k) {
      const int group = (column * kOfWord + k) / kOfGroup;
      product[k] = shared.means[0][group], plain[k] = shared.means[1][group];
    }
    const long long from = place(column);
#pragma unroll 2
    for (int row = lane; row < kRows; row += kLanes) {
      Dy dy;
      X x;
      Neighbours<Dx, kVector> dx;
      dy.template load<kAligned>(a.dy + from + row * (long long)(kStride));
      x.template load<kAligned>(a.x + from + row * (long long)(kStride));
      float made[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const int at = kNhwc ? k : 0;
        const float h = channels.normal(x[k], k);
        made[k] = (dy[k] * channels.weight[at] - plain[at] - h * product[at]) * channels.rstd[at];
      }
      dx.round(made);
      dx.store(a.dx + from + row * (long long)(kStride));
    }
  }
};

}  // namespace plantune
