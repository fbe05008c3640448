// The weights of a stem's block in shared memory, in the order of the parameter.
//
//   weight  (kOutputs, 16 * kChannels), aligned to 16 bytes     value (dy * 4 + dx) * kChannels + c
//
// A row dy of an output's patch has 4 * kChannels values side by side, and products take them four
// at a time. So nothing is put into another order; copies of 16 bytes need no registers and run
// while the image comes. Rows and groups of 8 outputs are so far apart that the 16 lanes that read
// at once meet no bank twice for odd channels, and no bank more than twice for even ones.

#pragma once

#include "cuda/vector.h"

namespace plantune {

template <typename T, int kChannels, int kOutputs, int kTileN, int kThreads>
struct StemWeights {
  static constexpr int kRow = 4 * kChannels, kChunk = 8;
  static constexpr int kRowPitch = kChannels % 4 == 0 ? kRow + kChunk : kRow;
  static constexpr int kPitch = 4 * kRowPitch;
  static constexpr int kEightPitch = 8 * kPitch + 32;
  static constexpr int kSharedBytes = kTileN / 8 * kEightPitch * int(sizeof(T));
  static constexpr int kChunksOfOutput = 4 * kRow / kChunk;
  static constexpr int kChunks = kTileN * kChunksOfOutput;

  /// Starts to copy those of the outputs from `first` on, zeros for outputs that are not there.
  __device__ __forceinline__ static void fetch(T* shared, const T* weight, int first) {
#pragma unroll 8
    for (int begin = 0; begin < kChunks; begin += kThreads) {
      const int i = begin + threadIdx.x;
      const int output = i / kChunksOfOutput, value = i % kChunksOfOutput * kChunk;
      if (i >= kChunks) break;
      const bool there = first + output < kOutputs;
      const long long from = there ? (long long)(first + output) * (4 * kRow) + value : 0;
      const int row = value / kRow * (kRowPitch - kRow);
      copy(shared + output / 8 * kEightPitch + output % 8 * kPitch + row + value, weight + from,
           there);
    }
  }

  /// The thread's own copies have arrived; a barrier must follow.
  __device__ __forceinline__ static void finish() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  }

  /// Four neighbours of a row of an output's patch.
  __device__ __forceinline__ static uint2 neighbours(const T* shared, int eight, int output, int dy,
                                                     int index) {
    const T* row = shared + eight * kEightPitch + output * kPitch + dy * kRowPitch;
    return *reinterpret_cast<const uint2*>(row + 4 * index);
  }

  /// A row of a channel's patch, from one value of each pixel.
  __device__ __forceinline__ static uint2 of_channel(const T* shared, int eight, int output, int dy,
                                                     int channel) {
    const T* row = shared + eight * kEightPitch + output * kPitch + dy * kRowPitch + channel;
    Vector<T, 4> values;
#pragma unroll
    for (int dx = 0; dx < 4; ++dx) values.values[dx] = row[dx * kChannels];
    return *reinterpret_cast<const uint2*>(values.values);
  }

 private:
  __device__ __forceinline__ static void copy(T* shared, const T* from, bool there) {
#if __CUDA_ARCH__ >= 800
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
#else
    const uint4 values = *reinterpret_cast<const uint4*>(from);
    *reinterpret_cast<uint4*>(shared) = there ? values : uint4{0, 0, 0, 0};
#endif
  }
};

}  // namespace plantune
