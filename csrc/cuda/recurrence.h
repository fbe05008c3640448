// What the blocks of a recurrent layer share: products of their part of the weights, which stays in
// registers, with a state that all blocks make together; and the exchange of that state.
//
// Of the instruction's k values, lane l brings those of run l % 4: neighbours in the state. A lane's
// values of the state are what it reads from the exchange, so they never pass shared memory.
//
// A word of the exchange has 12 bytes of values and a tag, stored and read at once: whoever sees the
// tag sees the values. There is no barrier of the grid. Words of two steps take turns: a block
// writes a step's words after it has read all words of the step before, whose writers had read all
// those of the step before that.

#pragma once

#include "cuda/mma.h"
#include "cuda/vector.h"

namespace plantune {

__device__ __forceinline__ void store_state(uint4* to, uint4 word) {
  asm volatile(
      "{\n .reg .b128 w;\n .reg .b64 low, high;\n mov.b64 low, {%1, %2};\n mov.b64 high, {%3, %4};\n"
      " mov.b128 w, {low, high};\n st.relaxed.gpu.global.b128 [%0], w;\n}" ::"l"(to),
      "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
      : "memory");
}

__device__ __forceinline__ uint4 load_state(const uint4* from) {
  uint4 word;
  asm volatile(
      "{\n .reg .b128 w;\n .reg .b64 low, high;\n ld.relaxed.gpu.global.b128 w, [%4];\n"
      " mov.b128 {low, high}, w;\n mov.b64 {%0, %1}, low;\n mov.b64 {%2, %3}, high;\n}"
      : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
      : "l"(from)
      : "memory");
  return word;
}

/// Words 32 lanes apart, from the lane's first one on; returns when all have the tag.
template <int kWords>
__device__ __forceinline__ void wait_for(
    uint4 (&words)[kWords], const uint4* from, unsigned int tag) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = load_state(from + 32 * i);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    while (words[i].w != tag) words[i] = load_state(from + 32 * i);
  }
}

/// The largest divisor of `count` that is not above `most`.
constexpr int part_of(int count, int most) {
  int part = smaller(count, most > 0 ? most : 1);
  while (count % part) --part;
  return part;
}

/// Products of 16 rows with 8 columns; kPer values of a row are one register.
template <typename T>
struct RecurrentMma;

/// Those of 16-bit values.
template <typename T>
struct PairMma {
  static constexpr int kPer = 2;
  using A = uint4;

  __device__ __forceinline__ static unsigned int pack(T first, T second) {
    T pair[2] = {first, second};
    return *reinterpret_cast<unsigned int*>(pair);
  }

  /// `weight(row, k)` of the 16 rows and the values of one product.
  template <typename Weight>
  __device__ __forceinline__ static A load(Weight weight) {
    const int row = threadIdx.x % 32 / 4, k = threadIdx.x % 4 * 4;
    return {pack(weight(row, k), weight(row, k + 1)), pack(weight(row + 8, k), weight(row + 8, k + 1)),
            pack(weight(row, k + 2), weight(row, k + 3)),
            pack(weight(row + 8, k + 2), weight(row + 8, k + 3))};
  }

  __device__ __forceinline__ static unsigned int read(const T* from) { return pack(from[0], from[1]); }

  /// The values of two neighbours, of which the lower lane's are first.
  __device__ __forceinline__ static unsigned int neighbours(float value) {
    const float other = __shfl_down_sync(~0u, value, 1);
    return pack(from_float<T>(value), from_float<T>(other));
  }

  __device__ __forceinline__ static void multiply(float (&c)[4], const A& a, uint2 b) {
    mma_16x8x16(c, a, b.x, b.y, T());
  }
};

template <>
struct RecurrentMma<__half> : PairMma<__half> {};
template <>
struct RecurrentMma<__nv_bfloat16> : PairMma<__nv_bfloat16> {};

/// Three products of tf32 make one of float32, but for the last two bits: each factor is a sum of
/// two numbers of 11 bits, and the product of both small ones is left out.
template <>
struct RecurrentMma<float> {
  static constexpr int kPer = 1;
  using A = float4;

  template <typename Weight>
  __device__ __forceinline__ static A load(Weight weight) {
    const int row = threadIdx.x % 32 / 4, k = threadIdx.x % 4 * 2;
    return {weight(row, k), weight(row + 8, k), weight(row, k + 1), weight(row + 8, k + 1)};
  }

  __device__ __forceinline__ static unsigned int read(const float* from) {
    return __float_as_uint(*from);
  }

  __device__ __forceinline__ static unsigned int neighbours(float value) {
    return __float_as_uint(value);
  }

  /// Volatile: both numbers of each weight, kept for all steps, would not fit into registers.
  __device__ __forceinline__ static unsigned int rounded(float value) {
    unsigned int made;
    asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(made) : "f"(value));
    return made;
  }

  /// What a rounded number lacks; nothing of an infinity.
  __device__ __forceinline__ static unsigned int rest(float value, unsigned int of) {
    return rounded(isinf(value) ? 0.f : value - __uint_as_float(of));
  }

  /// Zero instead of an infinity, whose products with what weights lack may have the other sign.
  __device__ __forceinline__ static unsigned int finite(unsigned int value) {
    return isinf(__uint_as_float(value)) ? 0u : value;
  }

  __device__ __forceinline__ static void multiply_once(
      float (&c)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  __device__ __forceinline__ static void multiply(float (&c)[4], const A& a, uint2 b) {
    const float rows[4] = {a.x, a.y, a.z, a.w};
    unsigned int large_a[4], small_a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      large_a[i] = rounded(rows[i]);
      small_a[i] = rest(rows[i], large_a[i]);
    }
    const float columns[2] = {__uint_as_float(b.x), __uint_as_float(b.y)};
    const unsigned int large_b[2] = {rounded(columns[0]), rounded(columns[1])};
    const unsigned int small_b[2] = {rest(columns[0], large_b[0]), rest(columns[1], large_b[1])};
    const unsigned int finite_b[2] = {finite(large_b[0]), finite(large_b[1])};
    multiply_once(c, small_a, finite_b);
    multiply_once(c, large_a, small_b);
    multiply_once(c, large_a, large_b);
  }
};

__device__ __forceinline__ float sigmoid_of(float x) { return 1.f / (1.f + expf(-x)); }

/// Which launch this is: blocks count themselves in. All threads of a block call it.
__device__ __forceinline__ unsigned int launch_number(unsigned long long* launches) {
  __shared__ unsigned long long counted;
  if (threadIdx.x == 0) counted = atomicAdd(launches, 1ull);
  __syncthreads();
  return (unsigned int)(counted / gridDim.x);
}

/// What every launch over a sequence is given, beside its values.
struct ScanFrame {
  const bool* done;  // T x N, or null
  uint4* words;      // two steps of what all samples' blocks tell each other
  unsigned long long* launches;
  int steps, samples;
  int first;  // of the samples, where the launch takes only some of them
};

/// A block's part of a layer: kUnits of the hidden units, for kSamples of the samples. Sizes says
/// T, kHidden, kUnits, kSamples. Warps divide what is summed over; a thread then owns kEach results.
template <typename Sizes>
struct Recurrence {
  using T = typename Sizes::T;
  using Mma = RecurrentMma<T>;
  static constexpr int kHidden = Sizes::kHidden, kUnits = Sizes::kUnits;
  static constexpr int kSamples = Sizes::kSamples;
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kUnitBlocks = kHidden / kUnits;
  static constexpr int kPer = Mma::kPer, kColumns = kSamples / 8;
  static constexpr int kProduct = 8 * kPer;                 // values that one product sums
  static constexpr int kProducts = kHidden / kProduct / kWarps;  // of a warp, for each row of tiles
  static constexpr int kEach = kUnits * kSamples / kThreads;
  // Neither lanes of units nor those of products meet in a bank, or only two of them.
  static constexpr int kStride = kSamples + 32 / kUnits;

  static_assert(kUnits == 8 || kUnits == 16 || kUnits == 32, "a warp has whole samples");
  static_assert(kSamples % 8 == 0, "tiles have 8 columns");
  static_assert(kEach * kThreads == kUnits * kSamples, "each thread owns results of one unit");
  static_assert(kProducts * kProduct * kWarps == kHidden, "each warp sums as many values");

  static __device__ __forceinline__ int first_unit() { return blockIdx.x % kUnitBlocks * kUnits; }
  static __device__ __forceinline__ int unit() { return threadIdx.x % kUnits; }
  /// The sample of the thread's result `j`, within the block.
  static __device__ __forceinline__ int sample(int j) {
    return (threadIdx.x + j * kThreads) / kUnits;
  }
  int first_sample;
  unsigned int tag;  // of the words of the first step
  uint4* words;      // of the block's samples, in the first of two steps
  size_t turn;       // from one step's words to the other's

  /// `count` words tell what the blocks of the same samples exchange in a step.
  __device__ __forceinline__ void join(const ScanFrame& a, int count) {
    const int groups = (a.samples + kSamples - 1) / kSamples;
    first_sample = a.first + int(blockIdx.x / kUnitBlocks) * kSamples;
    words = a.words + first_sample / kSamples * count;
    turn = size_t(groups) * count;
    tag = launch_number(a.launches) * a.steps + 1;
  }

  __device__ __forceinline__ bool has(const ScanFrame& a, int j) const {
    return first_sample + sample(j) < a.samples;
  }

  /// Where of a step's N x width the thread's result `j` is.
  __device__ __forceinline__ size_t place(
      const ScanFrame& a, int step, int j, int width = kHidden) const {
    const size_t row = size_t(step) * a.samples + first_sample + sample(j);
    return row * width + first_unit() + unit();
  }

  /// A value of the thread's result `j` in a step of T x N x kHidden; zero where no sample is.
  __device__ __forceinline__ float read(const ScanFrame& a, const T* from, int step, int j) const {
    return has(a, j) ? to_float(from[place(a, step, j)]) : 0.f;
  }

  /// Whether an episode begins with a step: the state before it counts for nothing.
  __device__ __forceinline__ bool begins(const ScanFrame& a, int step, int j) const {
    return a.done && has(a, j) && a.done[size_t(step) * a.samples + first_sample + sample(j)];
  }

  /// The lane that multiplies a unit of a sample, and the product in which it does.
  static __device__ __forceinline__ int reader(int unit, int sample) {
    return sample % 8 * 4 + unit % kProduct / (2 * kPer);
  }
  static __device__ __forceinline__ int product(int unit, int sample) {
    return unit / kProduct * kColumns + sample / 8;
  }

  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  /// Adds a warp's tile of 16 rows to what it made, for `sum_of`.
  static __device__ __forceinline__ void keep(float* sums, int row, int column, const float (&c)[4]) {
    float* to = sums + (row + lane() / 4) * kStride + column * 8 + lane() % 4 * 2;
    to[0] = c[0], to[1] = c[1];
    to[8 * kStride] = c[2], to[8 * kStride + 1] = c[3];
  }

  /// What all warps made of one row, kRows of which each has.
  template <int kRows>
  static __device__ __forceinline__ float sum_of(const float* sums, int row, int sample) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[(w * kRows + row) * kStride + sample];
    return sum;
  }
};

}  // namespace plantune
