// Reductions over all pixels of each channel: what the kernels of batch norms share.
//
// A tensor is kRows pixels of kChannels. A block reads kColumns vectors of channels side by side, of
// one of kSlices slices of the rows; a thread keeps its words in registers where they are few. What
// the slices have of a channel is merged in shared memory where they are the blocks of a cluster
// (kTogether), else by way of memory, in two launches. All of it in a fixed order: deterministic.

#pragma once

#include "cuda/cluster.h"
#include "cuda/moments.h"
#include "cuda/vector.h"

namespace plantune {

template <typename Shape>
struct ChannelSlices {
  using T = typename Shape::T;
  static constexpr int kVector = Shape::kVector, kColumns = Shape::kColumns;
  static constexpr int kThreads = Shape::kThreads, kSlices = Shape::kSlices;
  static constexpr int kChannels = Shape::kChannels;
  static constexpr long long kRows = Shape::kRows;
  static constexpr bool kTogether = Shape::kTogether, kAbreast = Shape::kAbreast;
  static constexpr int kWarps = kThreads / 32, kLanes = kThreads / kColumns;
  static constexpr int kWide = kColumns * kVector;  // channels of a block
  static constexpr long long kRowsOfSlice = (kRows + kSlices - 1) / kSlices;
  static constexpr long long kWords = (kRowsOfSlice + kLanes - 1) / kLanes;
  static constexpr bool kHolds = kTogether && kWords <= Shape::kHeld;
  // Words that are asked for before the first is used.
  static constexpr int kBatch = kHolds ? int(kWords) : smaller(Shape::kHeld, Shape::kAsked);
  static constexpr int kBatches = int((kWords + kBatch - 1) / kBatch);
  using Word = Vector<T, kVector>;

  static_assert(kColumns <= 32 && 32 % kColumns == 0, "lanes of a column are in step");
  static_assert(!kTogether || !kAbreast, "the blocks of a cluster are neighbours");
  static_assert(kChannels % kWide == 0, "blocks have whole columns");

  static constexpr int kGroups = kChannels / kWide;

  /// Where a thread is: its slice, first channel, and row of the slice. The slices of a cluster are
  /// neighbours; if kAbreast those blocks are that read the same rows, at about the same time.
  struct Place {
    int slice, group, column, lane, channel;
    long long first, rows;  // of the slice

    __device__ __forceinline__ Place()
        : slice(kAbreast ? blockIdx.x / kGroups : blockIdx.x % kSlices),
          group(kAbreast ? blockIdx.x % kGroups : blockIdx.x / kSlices),
          column(threadIdx.x % kColumns),
          lane(threadIdx.x / kColumns),
          channel(group * kWide + column * kVector),
          first(slice * kRowsOfSlice),
          rows(kRows - first < kRowsOfSlice ? kRows - first : kRowsOfSlice) {}

    /// Of a thread's word number `i`.
    __device__ __forceinline__ long long row(int i) const { return i * (long long)(kLanes) + lane; }
    __device__ __forceinline__ bool has(int i) const { return row(i) < rows; }
    __device__ __forceinline__ long long at(int i) const {
      return (first + row(i)) * kChannels + channel;
    }
  };

  template <bool kAligned, int kCount>
  static __device__ __forceinline__ void load(const T* from, const Place& place, int start,
                                              Word (&to)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (place.has(start + i)) to[i].template load<kAligned>(from + place.at(start + i));
    }
  }

  /// Room in which a block's warps leave sums of each channel, and a cluster's blocks what they have
  /// of a slice.
  template <typename Entry>
  struct Room {
    Sums warps[kWarps * kWide];
    Entry slices[kTogether ? kSlices * kWide : 1];
  };

  /// Leaves a thread's sums of its channels, added up over the lanes of its warp.
  template <typename Entry>
  static __device__ __forceinline__ void leave_sums(Room<Entry>& room, const Place& place,
                                                    Sums (&sums)[kVector]) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
#pragma unroll
      for (int i = 16; i >= kColumns; i /= 2) sums[k].merge(sums[k].of_lane(i));
      if (threadIdx.x % 32 < kColumns) {
        room.warps[threadIdx.x / 32 * kWide + place.column * kVector + k] = sums[k];
      }
    }
  }

  /// Merges kCount entries of each channel, `stride` apart; `use` gets the channel's number in the
  /// block, the whole, and which of so many lanes that have it this thread is.
  template <int kCount, typename Entry, typename Use>
  static __device__ __forceinline__ void merge(const Entry* entries, long long stride, Use use) {
    constexpr int kOf = power_below(smaller(kCount, 32));
    const int lane = threadIdx.x % kOf;
    for (int start = 0; start < kWide; start += kThreads / kOf) {
      const int channel = start + threadIdx.x / kOf;
      Entry all = {};
      if (channel < kWide) {
        for (int i = lane; i < kCount; i += kOf) all.merge(entries[i * stride + channel]);
      }
#pragma unroll
      for (int i = kOf / 2; i > 0; i /= 2) all.merge(all.of_lane(i));
      if (channel < kWide) use(channel, all, lane, kOf);
    }
  }

  /// What the block's warps have left, added up; every thread comes here.
  template <typename Entry, typename Use>
  static __device__ __forceinline__ void merge_block(Room<Entry>& room, Use use) {
    __syncthreads();
    merge<kWarps>(room.warps, kWide, use);
  }

  /// The same of all blocks of the cluster, of which each has `of_slice` of a channel's sums.
  template <typename Entry, typename OfSlice, typename Use>
  static __device__ __forceinline__ void merge_cluster(Room<Entry>& room, const Place& place,
                                                       OfSlice of_slice, Use use) {
    if constexpr (kSlices == 1) {
      merge_block(room, [&](int channel, const Sums& sums, int lane, int of) {
        use(channel, of_slice(channel, sums), lane, of);
      });
    } else {
      wait_for_cluster();  // they all run
      merge_block(room, [&](int channel, const Sums& sums, int lane, int of) {
        const Entry all = of_slice(channel, sums);
        const unsigned own =
            unsigned(__cvta_generic_to_shared(&room.slices[place.slice * kWide + channel]));
        for (int rank = lane; rank < kSlices; rank += of) {
          const unsigned there = peer_address(own, rank);
#pragma unroll
          for (int i = 0; i < int(sizeof(Entry) / 4); ++i) {
            store_to_peer(there + i * 4, reinterpret_cast<const float*>(&all)[i]);
          }
        }
      });
      publish_in_cluster();
      wait_for_cluster();
      merge<kSlices>(room.slices, kWide, use);
    }
  }

  /// Says to the cluster that this block runs.
  static __device__ __forceinline__ void begin() {
    if constexpr (kTogether && kSlices > 1) arrive_in_cluster();
  }
};

}  // namespace plantune
