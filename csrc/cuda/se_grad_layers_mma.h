// The gradients of the two layers of squeeze-and-excite, as se_grad_layers.h has them, of 16-bit
// values: a block adds its split of the images for a tile of 64 channels and up to 32 hidden ones on
// tensor cores, before Ampere in float. The images come through shared memory, those of the next
// turn on their way to registers; biases are products with ones.

#pragma once

#include "cuda/se_grad_layers.h"
#include "cuda/small_matrix_mma.h"
#include "cuda/vector.h"

namespace plantune {

template <bool kMma, typename Plain, typename Mma>
struct ChosenLayers {
  using Type = Plain;
};
template <typename Plain, typename Mma>
struct ChosenLayers<true, Plain, Mma> {
  using Type = Mma;
};

template <typename T, typename Gradient, int kChannels, int kHidden, int kThreads, bool kByRows1,
          bool kByRows2>
struct SeGradLayersMma {
  static constexpr int kTileChannels = 64, kTileHidden = 32, kBatch = 64;
  static constexpr int kColumnTiles = ceil_div(kHidden, kTileHidden);
  static constexpr int kTiles = ceil_div(kChannels, kTileChannels) * kColumnTiles;
  static constexpr int kColumns = smaller(ceil_div(kHidden, 8) * 8, kTileHidden);
  static constexpr int kEights = kColumns / 8;
  // Of a tile: both weights, then bias2 and bias1.
  static constexpr int kWeight = kTileChannels * kColumns;
  static constexpr int kSums = 2 * kWeight + kTileChannels + kColumns, kTileSums = kSums;

  // Rows of shared memory, in bytes: of 64 channels, whose 16-byte pieces are swizzled, and of hidden
  // ones, which begin in different banks.
  static constexpr int kWide = 128, kNarrow = 80;
  static constexpr int kWidth = smaller(power_in(kHidden), 8);
  using Wide = Vector<T, 8>;
  using Narrow = Vector<T, kWidth>;
  static constexpr int kWideOfThread = kBatch * 8 / kThreads;
  static constexpr int kNarrowOfRow = kColumns / kWidth;
  static constexpr int kNarrowOfThread = ceil_div(kBatch * kNarrowOfRow, kThreads);

  static_assert(sizeof(T) == 2 && kThreads == 256, "eight warps: four of each weight");
  static_assert(kBatch * 8 % kThreads == 0, "each thread has whole vectors of channels");

  struct Shared {
    alignas(16) char wide[2][kBatch * kWide];      // dexcite, mean
    alignas(16) char narrow[2][kBatch * kNarrow];  // hidden, dsqueeze
  };

  /// What a thread brings of the images of one turn.
  struct Turn {
    Wide wide[2][kWideOfThread];
    Narrow narrow[2][kNarrowOfThread];
  };

  template <typename Arguments>
  static __device__ __forceinline__ void add(const Arguments& a, int tile, int split) {
    __shared__ Shared shared;
    const int channel = tile / kColumnTiles * kTileChannels;
    const int column = tile % kColumnTiles * kTileHidden;
    const bool aligned = is_aligned(a.dexcite, 16) && is_aligned(a.mean, 16) &&
                         is_aligned(a.hidden, Narrow::kBytes) &&
                         is_aligned(a.dsqueeze, Narrow::kBytes);
    float sums[kEights + 1][4] = {}, ones[kEights][4] = {};
    const long long first = a.images * split / a.splits, last = a.images * (split + 1) / a.splits;
    Turn turn;
    fetch(a, aligned, first, last, channel, column, turn);
#pragma unroll 1
    for (long long base = first; base < last; base += kBatch) {
      __syncthreads();
      put(shared, turn);
      __syncthreads();
      if (base + kBatch < last) fetch(a, aligned, base + kBatch, last, channel, column, turn);
      multiply(shared, sums, ones);
    }
    leave(a.layers + (tile * a.splits + split) * kSums, sums, ones);
    if (LastOf::is_last(a, tile)) finish(a, tile, channel, column);
  }

 private:
  using LastOf = SeGradLayers<T, Gradient, kChannels, kHidden, kThreads, kByRows1, kByRows2>;

  static __device__ __forceinline__ bool is_aligned(const void* address, int bytes) {
    return (unsigned long long)(address) % bytes == 0;
  }

  /// Zeros beyond the last image, channel and column.
  template <typename Arguments>
  static __device__ __forceinline__ void fetch(const Arguments& a, bool aligned, long long base,
                                               long long last, int channel, int column,
                                               Turn& turn) {
#pragma unroll
    for (int k = 0; k < kWideOfThread; ++k) {
      const int i = threadIdx.x + k * kThreads, at = channel + i % 8 * 8;
      const long long n = base + i / 8;
      const bool there = n < last && at < kChannels;
      load(a.dexcite + n * kChannels + at, there, aligned, turn.wide[0][k]);
      load(a.mean + n * kChannels + at, there, aligned, turn.wide[1][k]);
    }
#pragma unroll
    for (int k = 0; k < kNarrowOfThread; ++k) {
      const int i = threadIdx.x + k * kThreads, at = column + i % kNarrowOfRow * kWidth;
      const long long n = base + i / kNarrowOfRow;
      const bool there = i < kBatch * kNarrowOfRow && n < last && at < kHidden;
      load(a.hidden + n * kHidden + at, there, aligned, turn.narrow[0][k]);
      load(a.dsqueeze + n * kHidden + at, there, aligned, turn.narrow[1][k]);
    }
  }

  template <typename Word>
  static __device__ __forceinline__ void load(const T* from, bool there, bool aligned, Word& to) {
    to.clear();
    if (there && aligned) to.template load<true>(from);
    if (there && !aligned) to.template load<false>(from);
  }

  static __device__ __forceinline__ void put(Shared& shared, const Turn& turn) {
#pragma unroll
    for (int k = 0; k < kWideOfThread; ++k) {
      const int i = threadIdx.x + k * kThreads, row = i / 8, piece = i % 8 ^ row % 8;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        *reinterpret_cast<Wide*>(shared.wide[which] + row * kWide + piece * 16) =
            turn.wide[which][k];
      }
    }
#pragma unroll
    for (int k = 0; k < kNarrowOfThread; ++k) {
      const int i = threadIdx.x + k * kThreads, row = i / kNarrowOfRow;
      if (i >= kBatch * kNarrowOfRow) continue;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        *reinterpret_cast<Narrow*>(shared.narrow[which] + row * kNarrow +
                                   i % kNarrowOfRow * Narrow::kBytes) = turn.narrow[which][k];
      }
    }
  }

  static __device__ __forceinline__ int which() { return threadIdx.x / 128; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32 % 4; }

  /// A warp has 16 channels of one weight: sums[e] are those of 8 columns, the last its bias. The
  /// first warp of weight1 adds bias1 in `ones`.
  static __device__ __forceinline__ void multiply(const Shared& shared,
                                                  float (&sums)[kEights + 1][4],
                                                  float (&ones)[kEights][4]) {
    const char* const wide = shared.wide[which()];
    const char* const narrow = shared.narrow[which()];
#if __CUDA_ARCH__ >= 800
    const T one = from_float<T>(1.f);
    const unsigned bits = *reinterpret_cast<const unsigned short*>(&one) * 0x10001u;
    const uint4 all = {bits, bits, bits, bits};
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kBatch / 16; ++step) {
      const int row = step * 16 + lane / 16 * 8 + lane % 8;
      const int piece = (2 * warp() + lane / 8 % 2) ^ row % 8;
      uint4 rows;
      load_matrices(wide + row * kWide + piece * 16, rows);
      mma_16x8x16(sums[kEights], rows, bits, bits, T());
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
        const int at = step * 16 + lane % 16;
        unsigned b0, b1;
        load_matrices(narrow + at * kNarrow + e * 16, b0, b1);
        mma_16x8x16(sums[e], rows, b0, b1, T());
        if (threadIdx.x / 32 == 4) mma_16x8x16(ones[e], all, b0, b1, T());
      }
    }
#else
    // The same elements, one by one.
#pragma unroll 1
    for (int n = 0; n < kBatch; ++n) {
      float own[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = row_of(2 * half), piece = c / 8 ^ n % 8;
        own[half] = to_float(
            *reinterpret_cast<const T*>(wide + n * kWide + piece * 16 + c % 8 * 2));
      }
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float other = to_float(
              *reinterpret_cast<const T*>(narrow + n * kNarrow + (e * 8 + column_of(k)) * 2));
          sums[e][k] += own[k / 2] * other;
          ones[e][k] += other;
        }
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[kEights][k] += own[k / 2];
    }
#endif
  }

#if __CUDA_ARCH__ >= 800
  static __device__ __forceinline__ void load_matrices(const char* from, uint4& to) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "r"(unsigned(__cvta_generic_to_shared(from)))
                 : "memory");
  }
  static __device__ __forceinline__ void load_matrices(const char* from, unsigned& b0,
                                                       unsigned& b1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b0), "=r"(b1)
                 : "r"(unsigned(__cvta_generic_to_shared(from)))
                 : "memory");
  }
#endif

  /// The channel and the column of a thread's k-th sum of eight columns.
  static __device__ __forceinline__ int row_of(int k) {
    return 16 * warp() + threadIdx.x % 32 / 4 + k / 2 * 8;
  }
  static __device__ __forceinline__ int column_of(int k) { return threadIdx.x % 4 * 2 + k % 2; }

  static __device__ __forceinline__ void leave(float* own, const float (&sums)[kEights + 1][4],
                                               const float (&ones)[kEights][4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
        const int j = e * 8 + column_of(k);
        own[which() * kWeight + row_of(k) * kColumns + j] = sums[e][k];
        // All rows of these are equal.
        if (threadIdx.x / 4 == 128 / 4 && k < 2) {
          own[2 * kWeight + kTileChannels + j] = ones[e][k];
        }
      }
      // All columns of these are.
      if (which() == 0 && threadIdx.x % 4 == 0 && k % 2 == 0) {
        own[2 * kWeight + row_of(k)] = sums[kEights][k];
      }
    }
  }

  template <typename Arguments>
  static __device__ __forceinline__ void finish(const Arguments& a, int tile, int channel,
                                                int column) {
    const float* const parts = a.layers + tile * a.splits * kSums;
#pragma unroll 2
    for (int i = threadIdx.x; i < kSums; i += kThreads) {
      float sum = 0.f;
#pragma unroll 8
      for (int split = 0; split < a.splits; ++split) sum += __ldcg(parts + split * kSums + i);
      store(a, channel, column, i, from_float<Gradient>(sum));
    }
  }

  template <typename Arguments>
  static __device__ __forceinline__ void store(const Arguments& a, int channel, int column, int i,
                                               Gradient sum) {
    if (i < 2 * kWeight) {
      const int c = channel + i % kWeight / kColumns, j = column + i % kColumns;
      if (c >= kChannels || j >= kHidden) return;
      Gradient* const to = i < kWeight ? a.weight2 : a.weight1;
      const bool by_channels = i < kWeight ? kByRows2 : !kByRows1;
      if (to != nullptr) to[by_channels ? c * kHidden + j : j * kChannels + c] = sum;
    } else if (i < 2 * kWeight + kTileChannels) {
      const int c = channel + i - 2 * kWeight;
      if (column == 0 && c < kChannels && a.bias2 != nullptr) a.bias2[c] = sum;
    } else {
      const int j = column + i - 2 * kWeight - kTileChannels;
      if (channel == 0 && j < kHidden && a.bias1 != nullptr) a.bias1[j] = sum;
    }
  }
};

}  // namespace plantune
