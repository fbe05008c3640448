// Matrix products of one warp on tensor cores: 16-bit elements, float32 sums, from Volta on.
//
//   c (16 rows, 32 channels) += a (16 rows, 16 values) * b (32 channels, 16 values) transposed
//
// One interface over m16n8k16, m16n8k8 and m8n8k4. The order of a sum is free, and so is the order
// of channels inside of a tile; both are chosen here such that a lane brings runs of 4 values of
// `a` and gets runs of 8 channels of `c`, which move between memory and registers as vectors.
//
//   a  a lane brings run_of_a(j) of row_of_a(i), for all i and j
//   b  `load_b` says which runs a lane brings: run j of channel 8 * eight + channel
//   c  a lane holds channels channel_of_c() up to 7 more of row_of_c(i), for i = 0 and 1
//
// Deterministic: each sum is made by one lane's instructions in a fixed order.

#pragma once

#include "cuda/mma.h"
#include "cuda/vector.h"

namespace plantune {

/// One tile of `c`.
using Sums = float[2][8];

__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }

template <typename T>
struct WarpMma {
  static constexpr int kRows = 16;
  static constexpr int kChannels = 32;
  static constexpr int kValues = 16;
  static constexpr int kRun = 4;

  /// Both rows begin at these 8 sums, which 16 must align.
  __device__ __forceinline__ static void start(Sums& c, const float* from) {
    *reinterpret_cast<float4*>(&c[0][0]) = reinterpret_cast<const float4*>(from)[0];
    *reinterpret_cast<float4*>(&c[0][4]) = reinterpret_cast<const float4*>(from)[1];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[1][i] = c[0][i];
  }

#if __CUDA_ARCH__ >= 750
  static constexpr int kRowsOfA = 2;
  static constexpr int kRunsOfA = 1;

  struct A {
    uint2 runs[kRowsOfA][kRunsOfA];
  };

  struct B {
    uint4 vectors[2];
  };

  __device__ __forceinline__ static int row_of_a(int i) { return lane_index() / 4 + 8 * i; }
  __device__ __forceinline__ static int run_of_a(int) { return lane_index() % 4; }
  __device__ __forceinline__ static int row_of_c(int i) { return lane_index() / 4 + 8 * i; }
  __device__ __forceinline__ static int channel_of_c() { return lane_index() % 4 * 8; }

  /// A tile from its runs of 4 values: `run(eight, channel, j)`.
  template <typename Run>
  __device__ __forceinline__ static B load_b(Run run) {
    B b;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      reinterpret_cast<uint2*>(b.vectors)[i] =
          run(lane_index() / 8, lane_index() / 4 % 2 + 2 * i, lane_index() % 4);
    }
    return b;
  }

  /// Two tiles from the rows of a matrix, one for the first and one for the second half of each 8
  /// values: `run(channel, value)` gives 8 values of a channel.
  template <typename Run>
  __device__ __forceinline__ static void gather_b(B (&b)[2], Run run) {
    const int channel = lane_index() / 8 * 8 + lane_index() / 4 % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 values = run(channel + 2 * i, lane_index() % 4 * 8);
      reinterpret_cast<uint2*>(b[0].vectors)[i] = {values.x, values.y};
      reinterpret_cast<uint2*>(b[1].vectors)[i] = {values.z, values.w};
    }
  }

  __device__ __forceinline__ static void multiply(Sums& c, const A& a, const B& b) {
    const uint2 upper = a.runs[0][0], lower = a.runs[1][0];
    // Columns 2 * j and 2 * j + 1 of each lane's 8 channels come from the j-th instruction.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 v = b.vectors[h];
      multiply_8(&c[0][4 * h], &c[1][4 * h], upper, lower, {v.x, v.y});
      multiply_8(&c[0][4 * h + 2], &c[1][4 * h + 2], upper, lower, {v.z, v.w});
    }
  }

 private:
  __device__ __forceinline__ static void multiply_8(float* c, float* d, uint2 a, uint2 a8, uint2 b) {
#if __CUDA_ARCH__ >= 800
    mma_16x8x16(c, d, {a.x, a8.x, a.y, a8.y}, b, T());
#else
    multiply_4(c, d, a.x, a8.x, b.x, T());
    multiply_4(c, d, a.y, a8.y, b.y, T());
#endif
  }

  __device__ __forceinline__ static void multiply_4(float* c, float* d, unsigned a, unsigned a8,
                                                    unsigned b, __half) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(d[0]), "+f"(d[1])
        : "r"(a), "r"(a8), "r"(b));
  }
#else
  static constexpr int kRowsOfA = 1;
  static constexpr int kRunsOfA = 4;

  struct A {
    uint2 runs[kRowsOfA][kRunsOfA];
  };

  struct B {
    uint2 runs[2][4];
  };

  // Four groups of 8 lanes work on their own: on rows 0-7 or 8-15, on channels 0-15 or 16-31.
  __device__ __forceinline__ static int group() { return lane_index() / 4 % 4; }
  __device__ __forceinline__ static int place() { return lane_index() % 4 + lane_index() / 16 * 4; }

  __device__ __forceinline__ static int row_of_a(int) { return group() % 2 * 8 + place(); }
  __device__ __forceinline__ static int run_of_a(int j) { return j; }
  __device__ __forceinline__ static int row_of_c(int i) {
    return group() % 2 * 8 + (place() & 5) + 2 * i;
  }
  __device__ __forceinline__ static int channel_of_c() {
    return group() / 2 * 16 + (place() & 2) * 4;
  }

  template <typename Run>
  __device__ __forceinline__ static B load_b(Run run) {
    B b;
    const int row = (group() / 2 * 2 + place() / 2 % 2) * 2 + place() % 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        b.runs[h][j] = run(row / 2, place() / 4 * 2 + row % 2 + 4 * h, j);
      }
    }
    return b;
  }

  template <typename Run>
  __device__ __forceinline__ static void gather_b(B (&b)[2], Run run) {
    const int row = (group() / 2 * 2 + place() / 2 % 2) * 2 + place() % 2;
    const int channel = row / 2 * 8 + place() / 4 * 2 + row % 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 values = run(channel + 4 * h, j * 8);
        b[0].runs[h][j] = {values.x, values.y};
        b[1].runs[h][j] = {values.z, values.w};
      }
    }
  }

  __device__ __forceinline__ static void multiply(Sums& c, const A& a, const B& b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float* upper = &c[0][4 * h];
        float* lower = &c[1][4 * h];
        const uint2 x = a.runs[0][j], w = b.runs[h][j];
        asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
            "{%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
            : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1]), "+f"(upper[2]),
              "+f"(upper[3]), "+f"(lower[2]), "+f"(lower[3])
            : "r"(x.x), "r"(x.y), "r"(w.x), "r"(w.y));
      }
    }
  }
#endif
};

}  // namespace plantune
