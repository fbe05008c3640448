// A few images of an nhwc tensor, divided among the threads of one block, and their channel means.
//
// Each image has a team of threads; a team takes kGroups pixels at once, a thread one vector of
// channels of each. So a thread meets the same channels in every pixel and sums them in registers;
// the sums of the groups meet in shared memory. Sums are float, in a fixed order: deterministic.

#pragma once

#include "cuda/vector.h"

namespace plantune {

/// Rows of floats in shared memory that are stored by vectors of columns without bank conflicts:
/// each vector is cut into runs of four columns, and equal runs of all vectors are side by side.
template <int kColumns, int kVector>
struct Columns {
  static constexpr int kRun = 4;
  static constexpr int kRuns = kVector / kRun;
  static constexpr int kApart = kColumns / kRuns;
  static_assert(kVector % kRun == 0 && kColumns % kVector == 0, "columns come in whole vectors");

  static __device__ __forceinline__ int place_of(int column) {
    return column % kVector / kRun * kApart + column / kVector * kRun + column % kRun;
  }

  static __device__ __forceinline__ int column_at(int place) {
    return place % kApart / kRun * kVector + place / kApart * kRun + place % kRun;
  }

  static __device__ __forceinline__ void load(const float* row, int vector, float (&to)[kVector]) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const float4 four = *reinterpret_cast<const float4*>(row + run * kApart + vector * kRun);
      to[run * kRun] = four.x, to[run * kRun + 1] = four.y;
      to[run * kRun + 2] = four.z, to[run * kRun + 3] = four.w;
    }
  }

  static __device__ __forceinline__ void store(float* row, int vector,
                                               const float (&from)[kVector]) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      *reinterpret_cast<float4*>(row + run * kApart + vector * kRun) = make_float4(
          from[run * kRun], from[run * kRun + 1], from[run * kRun + 2], from[run * kRun + 3]);
    }
  }
};

/// kChannels of each of kPixels pixels, kStride channels apart, of kImages images; a thread takes a
/// Word_ of them.
template <typename T, int kChannels, int kStride, int kPixels, int kImages, int kThreads,
          typename Word_ = Vector<T>>
struct ImageTile {
  using Word = Word_;
  using Floats = float[Word::kSize];
  using Channels = Columns<kChannels, Word::kSize>;

  static constexpr int kChunks = kChannels / Word::kSize;
  static constexpr int kTeam = kThreads / kImages;
  static constexpr int kGroups = smaller(kTeam / kChunks, kPixels);
  static constexpr int kRounds = ceil_div(kPixels, kGroups);
  // A batch of vectors is in flight at once; 64 KiB of them leave a thread half of its registers.
  static constexpr int kBatch = smaller(kRounds, 4096 / kThreads);
  static constexpr int kBatches = ceil_div(kRounds, kBatch);
  static constexpr bool kWhole = kBatches * kBatch * kGroups == kPixels;
  // Threads that share the last sum of one channel, neighbours in a warp.
  static constexpr int kParts =
      power_below(smaller(smaller(8, kGroups), kThreads / (kImages * kChannels)));
  static constexpr int kAtOnce = smaller(8, ceil_div(kGroups, kParts));
  // Apart by so much, they read from different banks.
  static constexpr int kPad = kParts == 1 ? 0 : kChannels % 32 == 0 ? 32 / kParts : 4;
  static constexpr int kRow = kChannels + kPad;

  static_assert(kChannels % 8 == 0 && kStride % 8 == 0, "channels are read as 16-byte vectors");
  static_assert(kThreads % 32 == 0 && kThreads % kImages == 0, "a team is a part of a block");
  static_assert(kGroups > 0, "a team has a thread for each vector of channels");

  struct Shared {
    alignas(16) float sums[kImages][kGroups][kRow];
  };

  int team, group, chunk;
  long long first;  // the place of the thread's first vector
  bool active;      // whether its image is there, and has work for it

  /// `image` is the block's first one, `channel` its first channel.
  __device__ __forceinline__ ImageTile(long long image, long long images, int channel) {
    const int member = threadIdx.x % kTeam;
    team = threadIdx.x / kTeam;
    group = member / kChunks;
    chunk = member % kChunks;
    active = group < kGroups && image + team < images;
    // Others read what is there, too, and drop it: that costs less than a condition at each load.
    const long long pixel = active ? (image + team) * kPixels + group : 0;
    first = pixel * kStride + channel + chunk * Word::kSize;
  }

  /// Whether an active thread has a pixel left.
  __device__ __forceinline__ bool has(int round) const {
    return kWhole || group + round * kGroups < kPixels;
  }

  __device__ __forceinline__ long long at(int round) const {
    return first + (long long)(round) * (kGroups * kStride);
  }

  /// Vectors of an image that may have another type.
  template <bool kAligned, typename Of, typename OfWord>
  __device__ __forceinline__ void load(const Of* from, int batch, OfWord (&to)[kBatch]) const {
    if (!kWhole && !active) return;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int round = batch * kBatch + i;
      if (has(round)) to[i].template load<kAligned>(from + at(round));
    }
  }

  __device__ __forceinline__ void add(const Word (&x)[kBatch], int batch, Floats& sum) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (!has(batch * kBatch + i)) continue;
#pragma unroll
      for (int k = 0; k < Word::kSize; ++k) sum[k] += x[i][k];
    }
  }

  /// Calls `take(team, place, mean)` once for each channel of each image, by some thread; `place`
  /// is the channel's place in a row of Channels.
  template <typename Take>
  __device__ __forceinline__ void reduce(Shared& shared, const Floats& sum, Take take) const {
    add_up(shared, sum,
           [&](int of, int place, float total) { take(of, place, total * (1.f / kPixels)); });
  }

  /// The same with sums in the place of means.
  template <typename Take>
  __device__ __forceinline__ void add_up(Shared& shared, const Floats& sum, Take take) const {
    if (group < kGroups) Channels::store(shared.sums[team][group], chunk, sum);
    __syncthreads();
    const int part = threadIdx.x % kParts;
#pragma unroll 1
    for (int base = 0; base < kImages * kChannels; base += kThreads / kParts) {
      const int index = base + threadIdx.x / kParts;
      const bool there = index < kImages * kChannels;
      const int of = index / kChannels, place = index % kChannels;
      float total = 0.f;
#pragma unroll
      for (int i = 0; i < ceil_div(kGroups, kParts); i += kAtOnce) {
        // Read together, then added.
        float some[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int row = part + (i + j) * kParts;
          some[j] = there && row < kGroups ? shared.sums[of][row][place] : 0.f;
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) total += some[j];
      }
#pragma unroll
      for (int lane = 1; lane < kParts; lane *= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, lane);
      }
      if (there && part == 0) take(of, place, total);
    }
  }
};

}  // namespace plantune
