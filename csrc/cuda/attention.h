// Attention of short sequences, such as the windows of an image:
//
//   s[i][j] = q[i] . k[j] * kScale + sum over addends of addend[..., i, j]
//   y[i] = sum over j of exp(s[i][j] - max of s[i]) * v[j] / sum over j of exp(s[i][j] - max)   =
//
// for each batch and head, all of them where their strides say; a row's columns are adjacent. A block
// has one head: its keys and values are in shared memory, a warp has 16 rows after the other, whose
// scores stay in its registers. 16-bit elements and float sums, in a fixed order: deterministic.

#pragma once

#include "cuda/launch.h"
#include "cuda/small_matrix_mma.h"

namespace plantune {

/// Call says all sizes and strides, and where addends are.
template <typename Call>
struct Attention {
  using T = typename Call::T;
  static constexpr int kRows = Call::kRows, kKeys = Call::kKeys, kHeads = Call::kHeads;
  static constexpr int kWidth = Call::kWidth, kValues = Call::kValues;  // columns
  static constexpr int kAddends = Call::kAddends, kWarps = Call::kThreads / 32;
  static constexpr int kTiles = ceil_div(kKeys, 16);  // of 16 keys
  static constexpr int kSteps = kWidth / 16;          // of 16 columns
  static constexpr int kScores = ceil_div(kKeys, 8);  // of 8 keys, of which none is beyond the end
  static constexpr int kParts = kValues / 8;          // of a result's columns
  // Rows in shared memory begin 16 bytes apart in the banks, so that eight of them meet in none.
  static constexpr int kKeyPitch = kWidth + 8, kValuePitch = kValues + 8;
  using Word = Vector<T, 8>;

  static_assert(sizeof(T) == 2, "tensor cores take 16-bit elements here");
  static_assert(kWidth % 16 == 0 && kValues % 8 == 0, "products have whole steps");

  struct Arguments {
    const T *q, *k, *v;
    T* y;
    const T* addends[kAddends > 0 ? kAddends : 1];
  };

  struct Shared {
    alignas(16) T keys[16 * kTiles][kKeyPitch];
    alignas(16) T values[16 * kTiles][kValuePitch];
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ Shared shared;
    release_successor();
    wait_for_predecessor();
    const long long batch = blockIdx.x / kHeads, head = blockIdx.x % kHeads;
    const T* k = a.k + batch * Call::kK[0] + head * Call::kK[1];
    const T* v = a.v + batch * Call::kV[0] + head * Call::kV[1];
    fill<kAligned, kWidth, kKeyPitch>(&shared.keys[0][0], k, Call::kK[2]);
    fill<kAligned, kValues, kValuePitch>(&shared.values[0][0], v, Call::kV[2]);
    __syncthreads();
    const T* q = a.q + batch * Call::kQ[0] + head * Call::kQ[1];
    T* y = a.y + batch * Call::kY[0] + head * Call::kY[1];
    const T* addends[kAddends > 0 ? kAddends : 1];
#pragma unroll
    for (int i = 0; i < kAddends; ++i) addends[i] = a.addends[i] + Call::matrix(i, blockIdx.x);
#pragma unroll 1
    for (int first = threadIdx.x / 32 * 16; first < kRows; first += 16 * kWarps) {
      rows<kAligned>(first, q, y, addends, shared);
    }
  }

 private:
  /// Brings all rows of keys or values; those beyond the end are zeros.
  template <bool kAligned, int kColumns, int kPitch>
  static __device__ __forceinline__ void fill(T* to, const T* from, long long stride) {
    constexpr int kWords = kColumns / 8;
    for (int i = threadIdx.x; i < 16 * kTiles * kWords; i += Call::kThreads) {
      const int row = i / kWords, column = i % kWords * 8;
      Word word;
      word.clear();
      if (row < kKeys) word.template load<kAligned>(from + row * stride + column);
      *reinterpret_cast<Word*>(to + row * kPitch + column) = word;
    }
  }

  static __device__ __forceinline__ unsigned pair(const T* from) {
    return *reinterpret_cast<const unsigned*>(from);
  }

  static __device__ __forceinline__ unsigned rounded(float a, float b) {
    alignas(4) T made[2];
    round_pair(made, a, b);
    return pair(made);
  }

  /// Two neighbours in global memory.
  template <bool kAligned>
  static __device__ __forceinline__ unsigned brought(const T* from) {
    Vector<T, 2> two;
    two.template load<kAligned>(from);
    return pair(two.values);
  }

  /// Of 8x8 scores or sums a lane has two of row lane / 4, and two of the row 8 further down.
  template <bool kAligned>
  static __device__ __forceinline__ void rows(int first, const T* q, T* y,
                                              const T* const (&addends)[kAddends > 0 ? kAddends : 1],
                                              const Shared& shared) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2;
    // Rows beyond the end are computed as the last one, and not written.
    const int upper = smaller_of(first + lane / 4, kRows - 1);
    const int lower = smaller_of(first + lane / 4 + 8, kRows - 1);
    uint4 queries[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const T* top = q + upper * Call::kQ[2] + 16 * k + column;
      const T* bottom = q + lower * Call::kQ[2] + 16 * k + column;
      queries[k] = {brought<kAligned>(top), brought<kAligned>(bottom), brought<kAligned>(top + 8),
                    brought<kAligned>(bottom + 8)};
    }
    float scores[2 * kTiles][4] = {};
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const T* key = &shared.keys[8 * n + lane / 4][16 * k + column];
        mma_16x8x16(scores[n], queries[k], pair(key), pair(key + 8), T());
      }
    }
    float parts[2];
    normalise(scores, upper, lower, column, addends, parts);
    float sums[kParts][4] = {};
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      const uint4 weights = {rounded(scores[2 * k][0], scores[2 * k][1]),
                             rounded(scores[2 * k][2], scores[2 * k][3]),
                             rounded(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                             rounded(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        unsigned values[2];
        transposed(&shared.values[16 * k + lane % 16][8 * n], values);
        mma_16x8x16(sums[n], weights, values[0], values[1], T());
      }
    }
    leave(first, y, column, sums, parts);
  }

  /// Scores become exponentials, `parts` one by the sum of each row.
  static __device__ __forceinline__ void normalise(
      float (&scores)[2 * kTiles][4], int upper, int lower, int column,
      const T* const (&addends)[kAddends > 0 ? kAddends : 1], float (&parts)[2]) {
    float most[2] = {-__int_as_float(0x7f800000), -__int_as_float(0x7f800000)};
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = 8 * n + column + e % 2;
        float score = scores[n][e] * Call::kScale;
        if (key < kKeys) {
#pragma unroll
          for (int i = 0; i < kAddends; ++i) {
            score += to_float(addends[i][(e < 2 ? upper : lower) * Call::kRowStrides[i] +
                                         key * Call::kKeyStrides[i]]);
          }
          most[e / 2] = fmaxf(most[e / 2], score);  // a NaN shows in the sum
        }
        scores[n][e] = score;
      }
    }
    float sums[2] = {0.f, 0.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) most[half] = of_four<true>(most[half]);
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool there = 8 * n + column + e % 2 < kKeys;
        scores[n][e] = there ? __expf(scores[n][e] - most[e / 2]) : 0.f;
        sums[e / 2] += scores[n][e];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) parts[half] = 1.f / of_four<false>(sums[half]);
  }

  /// What the four lanes of a row have together.
  template <bool kMost>
  static __device__ __forceinline__ float of_four(float value) {
#pragma unroll
    for (int i = 2; i > 0; i /= 2) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, value, i);
      value = kMost ? fmaxf(value, other) : value + other;
    }
    return value;
  }

  /// Two 8x8 matrices of adjacent rows, from which each lane has what a product's second operand is.
  static __device__ __forceinline__ void transposed(const T* row, unsigned (&values)[2]) {
#if __CUDA_ARCH__ >= 750
    const unsigned address = unsigned(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(values[0]), "=r"(values[1])
                 : "r"(address)
                 : "memory");
#endif
  }

  static __device__ __forceinline__ void leave(int first, T* y, int column,
                                               const float (&sums)[kParts][4],
                                               const float (&parts)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + threadIdx.x % 32 / 4 + 8 * half;
      if (row >= kRows) continue;
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        unsigned* to = reinterpret_cast<unsigned*>(y + row * Call::kY[2] + 8 * n + column);
        *to = rounded(sums[n][2 * half] * parts[half], sums[n][2 * half + 1] * parts[half]);
      }
    }
  }

  static __device__ __forceinline__ int smaller_of(int a, int b) { return a < b ? a : b; }
};

}  // namespace plantune
