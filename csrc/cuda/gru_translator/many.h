// Translation of many sentences at once: as translate.h, with products on tensor cores.
//
// All products are those of 16 rows of weights with 8 sentences (recurrence.h), summed over a quarter
// of what they sum over: three tiles of rows of the output layer, one of the gates of a block's
// units, four warps each. Weights that meet the state stay in registers, those that meet an
// embedding in shared memory. The source has been read by another launch.

#pragma once

#include "cuda/gru_translator/translate.h"
#include "cuda/recurrence.h"

namespace plantune {

/// A warp's quarter of the products of 16 rows with all samples.
template <typename T>
struct QuarterTile {
  using Mma = RecurrentMma<float>;
  static constexpr int kColumns = T::kSamples / 8, kChunk = 2;
  static constexpr int kState = T::kHidden / 4 / 8, kInput = T::kEmbedding / 4 / 8;
  static constexpr int kPart = 8;  // products summed before they are added: the unit cuts sums off

  using Sums = float[16][T::kSumStride];  // rows of samples

  float4 weights[kState];

  /// `weight(row, k)` of the quarter.
  template <typename Weight>
  __device__ __forceinline__ void load(Weight weight) {
#pragma unroll
    for (int p = 0; p < kState; ++p) {
      weights[p] = Mma::load([&](int row, int k) { return weight(row, p * 8 + k); });
    }
  }

  /// The products of the weights in registers with a state, from the quarter's first value on; added
  /// to what is there, if it says so.
  template <bool kAdds>
  __device__ __forceinline__ void take_state(const float* state, Sums& to) const {
    take<kState, kAdds>(state, T::kHiddenStride, to, [&](int p) { return weights[p]; });
  }

  /// Those of rows in shared memory with an input.
  __device__ __forceinline__ void take_input(const float* rows, const float* x, Sums& to) const {
    const int at = threadIdx.x % 32 / 4 * T::kInputStride + threadIdx.x % 4 * 2;
    take<kInput, false>(x, T::kInputStride, to, [&](int p) {
      const float2 first = *reinterpret_cast<const float2*>(rows + at + p * 8);
      const float2 second =
          *reinterpret_cast<const float2*>(rows + at + 8 * T::kInputStride + p * 8);
      return float4{first.x, second.x, first.y, second.y};
    });
  }

  template <int kProducts, bool kAdds, typename Weights>
  static __device__ __forceinline__ void take(
      const float* from, int stride, Sums& to, Weights of) {
    const int row = threadIdx.x % 32 / 4, sample = threadIdx.x % 4 * 2;
    from += row * stride + sample;
#pragma unroll 1  // two at once would not fit into the registers
    for (int first = 0; first < kColumns; first += kChunk) {
      float sums[kChunk][4] = {};
#pragma unroll
      for (int start = 0; start < kProducts; start += kPart) {
        float part[kChunk][4] = {};
#pragma unroll
        for (int p = start; p < start + kPart && p < kProducts; ++p) {
          const float4 a = of(p);
#pragma unroll
          for (int c = 0; c < kChunk; ++c) {
            const uint2 b =
                *reinterpret_cast<const uint2*>(from + (first + c) * 8 * stride + p * 8);
            Mma::multiply(part[c], a, b);
          }
        }
#pragma unroll
        for (int c = 0; c < kChunk; ++c) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[c][i] += part[c][i];
        }
      }
#pragma unroll
      for (int c = 0; c < kChunk; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& place = to[row + i / 2 * 8][(first + c) * 8 + sample + i % 2];
          place = kAdds ? place + sums[c][i] : sums[c][i];
        }
      }
    }
  }
};

/// The four warps of a block's hidden units: each has a quarter of the sums, then a unit.
template <typename T>
struct ManyUnits {
  using Shared = typename T::Shared;
  Shared& shared;
  const typename T::Words& exchange;
  const int warp, lane, sample, unit;
  QuarterTile<T> tile;
  float constant[3], hidden_bias, state;

  __device__ __forceinline__ ManyUnits(
      Shared& shared, const typename T::Words& exchange, int warp, int lane)
      : shared(shared), exchange(exchange), warp(warp), lane(lane), sample(lane % T::kSamples),
        unit(blockIdx.x * T::kUnits + warp) {}

  /// Rows are the gates of the block's units; the last four are of no use.
  static __device__ __forceinline__ size_t row_of(int row) {
    return size_t(min(row / T::kUnits, 2)) * T::kHidden + blockIdx.x * T::kUnits + row % T::kUnits;
  }

  __device__ __forceinline__ void load(const float* from, int width) {
    const int first = warp * (T::kHidden / 4);
    tile.load([&](int row, int k) { return from[row_of(row) * width + first + k]; });
  }

  __device__ __forceinline__ void multiply_state(int which) {
    const float* state = &shared.hidden[0][warp * (T::kHidden / 4)];
    tile.template take_state<false>(state, shared.gate_sums[which][warp]);
  }

  __device__ __forceinline__ float sum_of(int which, int gate) const {
    float sum = 0.f;
#pragma unroll
    for (int q = 0; q < 4; ++q) sum += shared.gate_sums[which][q][gate * T::kUnits + warp][sample];
    return sum;
  }

  static __device__ __forceinline__ void meet_units() { meet<4, T::kUnits * 32>(); }

  __device__ __forceinline__ void begin(const TranslateArguments& a) {
    const GruWeights& w = a.decoder;
    constexpr int kWidth = T::kEmbedding + T::kHidden;
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      float4 x[T::kX];
      load_lanes(x, w.input + (size_t(gate) * T::kHidden + unit) * kWidth, lane);
      store_lanes(shared.gates[gate * T::kUnits + warp], x, lane);
    }
    load(w.input + T::kEmbedding, kWidth);
    multiply_state(0);
    meet_units();
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      constant[gate] = sum_of(0, gate) + __ldg(w.input_bias + gate * T::kHidden + unit);
      if (gate < 2) constant[gate] += __ldg(w.hidden_bias + gate * T::kHidden + unit);
    }
    hidden_bias = __ldg(w.hidden_bias + 2 * T::kHidden + unit);
    state = shared.hidden[sample][unit];
    load(w.hidden, T::kHidden);
    meet_units();
  }

  __device__ __forceinline__ void decode(const TranslateArguments& a) {
    begin(a);
    unsigned int ended = 0;
    for (int step = 0; step < a.max_steps; ++step) {
      multiply_state(0);
      T::find_words(a, shared, exchange, step, ended);
      if (ended == T::kAll) return;
      T::load_words(a, shared);
      const int first = warp * (T::kEmbedding / 4);
      tile.take_input(&shared.gates[0][first], &shared.x[0][first], shared.gate_sums[1][warp]);
      meet_units();
      publish(step);
      __syncthreads();
    }
    T::find_last_words(a, shared, exchange, ended);
  }

  __device__ __forceinline__ void publish(int step) {
    const float reset = sigmoid(sum_of(1, 0) + sum_of(0, 0) + constant[0]);
    const float update = sigmoid(sum_of(1, 1) + sum_of(0, 1) + constant[1]);
    const float fresh = tanh_of(sum_of(1, 2) + constant[2] + reset * (sum_of(0, 2) + hidden_bias));
    state = fresh + update * (state - fresh);
    if (lane < T::kSamples) exchange.publish_hidden(step, lane, unit, state);
  }
};

/// The warps of the output layer: each has a quarter of a tile's sums, then some rows.
template <typename T>
struct ManyRows : OutputRows<T> {
  using Base = OutputRows<T>;
  using typename Base::Shared;
  using typename Base::Words;
  using Base::constant, Base::exchange, Base::kRowsPerWarp, Base::lane, Base::logits, Base::shared;
  using Base::warp;

  QuarterTile<T> tile;

  __device__ __forceinline__ ManyRows(Shared& shared, const Words& exchange, int warp, int lane)
      : Base(shared, exchange, warp, lane) {}

  /// What of the rows meets the state or the context.
  __device__ __forceinline__ void load_tile(const float* from) {
    const int first_row = blockIdx.x * T::kRows + warp / 4 * 16, first = warp % 4 * (T::kHidden / 4);
    tile.load([&](int row, int k) {
      return from[size_t(min(first_row + row, T::kTargets - 1)) * T::kOutputWidth + first + k];
    });
  }

  template <bool kAdds>
  __device__ __forceinline__ void take_state() {
    const float* state = &shared.hidden[0][warp % 4 * (T::kHidden / 4)];
    tile.template take_state<kAdds>(state, shared.sums[warp]);
    T::output_warps_are_here();
  }

  __device__ __forceinline__ float sum_of(int i) const {
    const int row = Base::row_of_block(i), sample = lane % T::kSamples;
    float sum = 0.f;
#pragma unroll
    for (int q = 0; q < 4; ++q) sum += shared.sums[row / 16 * 4 + q][row % 16][sample];
    return sum;
  }

  __device__ __forceinline__ void begin(const TranslateArguments& a) {
    Base::load(a);
    load_tile(a.output + T::kEmbedding + T::kHidden);
    take_state<false>();
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int at = min(int(blockIdx.x) * T::kRows + Base::row_of_block(i), T::kTargets - 1);
      constant[i] = sum_of(i) + __ldg(a.output_bias + at);
    }
    load_tile(a.output + T::kEmbedding);
  }

  __device__ __forceinline__ void decode(const TranslateArguments& a) {
    begin(a);
    unsigned int ended = 0;
    for (int step = 0; step < a.max_steps; ++step) {
      T::find_words(a, shared, exchange, step, ended);
      if (ended == T::kAll) return;
      T::load_words(a, shared);
      const int first = warp % 4 * (T::kEmbedding / 4);
      const float* rows = &shared.rows[warp / 4 * 16][first];
      tile.take_input(rows, &shared.x[0][first], shared.sums[warp]);
      exchange.template read_hidden<T::kOutputWarps * 32, T::kHiddenStride>(
          step, warp * 32 + lane, &shared.hidden[0][0]);
      __syncthreads();
      take_state<true>();
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) logits[i] = constant[i] + sum_of(i);
      if (a.noise) Base::add_noise(a, step);
      Base::publish(step);
    }
    T::find_last_words(a, shared, exchange, ended);
  }
};

template <typename Sizes>
struct TranslateMany : Translate<Sizes> {
  using Base = Translate<Sizes>;
  using typename Base::Words;
  using Base::kEmbedding, Base::kHidden, Base::kOutputWarps, Base::kRowsPerWarp, Base::kSamples;
  using Base::kThreads, Base::kUnits;
  // Neighbouring pairs of eight samples or rows meet in no bank.
  static constexpr int kHiddenStride = kHidden + 8, kInputStride = kEmbedding + 8;
  static constexpr int kSumStride = kSamples + 1;

  static_assert(kSamples % 16 == 0, "sentences come in tiles of eight, two at a time");
  static_assert(kOutputWarps * kRowsPerWarp <= kOutputWarps / 4 * 16, "a tile has 16 rows");
  static_assert(kHidden % 32 == 0 && kEmbedding % 32 == 0, "warps divide what they sum over");

  struct Shared {
    float hidden[kSamples][kHiddenStride];
    float x[kSamples][kInputStride];
    float rows[kOutputWarps / 4 * 16][kInputStride];
    float gates[16][kInputStride];
    float sums[kOutputWarps][16][kSumStride];
    float gate_sums[2][4][16][kSumStride];
    unsigned int best[kSamples][kOutputWarps], row[kSamples][kOutputWarps];
    int word[kSamples];
    unsigned long long launch;
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  static __device__ void run(const TranslateArguments& a) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) shared.launch = atomicAdd(a.launches, 1ull) / gridDim.x;
    for (int i = threadIdx.x; i < kSamples * kHidden; i += kThreads) {
      shared.hidden[i / kHidden][i % kHidden] = Base::read_state(a, i);
    }
    for (int i = threadIdx.x; i < 4 * kInputStride; i += kThreads) shared.gates[12][i] = 0.f;
    __syncthreads();
    const Words exchange(a.hidden_words, a.best_words, shared.launch);
    if (warp < kUnits) {
      ManyUnits<TranslateMany>(shared, exchange, warp, lane).decode(a);
    } else {
      ManyRows<TranslateMany>(shared, exchange, warp - kUnits, lane).decode(a);
    }
  }
};

}  // namespace plantune
