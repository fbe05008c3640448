// A warp's part of the output layer, and of reading the hidden state.
//
// T is Translate of some sizes, in translate.h.

#pragma once

#include "cuda/gru_translator/arguments.h"
#include "cuda/gru_translator/lanes.h"

namespace plantune {

/// A warp that computes some rows of the output layer of all samples, and reads the hidden state
/// for the block.
template <typename T>
struct OutputRows {
  using Shared = typename T::Shared;
  using Words = typename T::Words;
  static constexpr int kEmbedding = T::kEmbedding, kHidden = T::kHidden, kTargets = T::kTargets;
  static constexpr int kSamples = T::kSamples, kChunk = T::kRowChunk, kRows = T::kRows;
  static constexpr int kRowsPerWarp = T::kRowsPerWarp, kOutputWarps = T::kOutputWarps;
  static constexpr int kOutputWidth = T::kOutputWidth, kX = T::kX, kH = T::kH;
  static constexpr unsigned int kAll = T::kAll;

  Shared& shared;
  const Words& exchange;
  const int warp, lane;
  float4 wh[kRowsPerWarp][kH];
  float constant[kRowsPerWarp], logits[kRowsPerWarp];  // of the lane's sample

  __device__ __forceinline__ OutputRows(Shared& shared, const Words& exchange, int warp, int lane)
      : shared(shared), exchange(exchange), warp(warp), lane(lane) {}

  __device__ __forceinline__ int row_of_block(int i) const { return warp * kRowsPerWarp + i; }

  __device__ __forceinline__ bool has(int i) const {
    return row_of_block(i) < kRows && blockIdx.x * kRows + row_of_block(i) < kTargets;
  }

  /// The weights of a row; of one that there is not, those of the last.
  __device__ __forceinline__ const float* row(const SharedArguments& a, int i) const {
    const int at = min(int(blockIdx.x) * kRows + row_of_block(i), kTargets - 1);
    return a.output + size_t(at) * kOutputWidth;
  }

  /// What of the weights meets an embedding; the others are on their way.
  __device__ __forceinline__ void load(const SharedArguments& a) {
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const float* from = row(a, i);
      float4 x[kX];
      load_lanes(x, from, lane);
      store_lanes(shared.rows[row_of_block(i)], x, lane);
      prefetch_lanes<2 * kHidden>(from + kEmbedding, lane);
    }
  }

  __device__ __forceinline__ void encode(const SharedArguments& a) {
    load(a);
    for (int step = 0; step < a.source_length; ++step) {
      read_hidden(step);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void decode(const SharedArguments& a) {
    add_context(a);
    unsigned int ended = 0;
    for (int step = 0; step < a.max_steps; ++step) {
      if (kSamples > 1) {
        T::find_words(a, shared, exchange, step, ended);
      } else {
        T::words_are_there();
        if (step > 0) ended = T::ended_by(a, shared, lane, ended);
      }
      if (ended == kAll) return;
      if (kSamples > 1) T::load_words(a, shared);
#pragma unroll 1
      for (int n = 0; n < kSamples; n += kChunk) add_input(a, n);
      if (a.noise) add_noise(a, step);
      const int now = a.source_length + step;
      read_hidden(now);
      __syncthreads();
#pragma unroll 1
      for (int n = 0; n < kSamples; n += kChunk) add_hidden(n, now, logits);
      publish(step);
    }
    if (kSamples > 1) T::find_last_words(a, shared, exchange, ended);
  }

  /// What the context and the bias add to each row, for good; then the weights that stay.
  __device__ __forceinline__ void add_context(const SharedArguments& a) {
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      load_lanes(wh[i], row(a, i) + kEmbedding + kHidden, lane);
      constant[i] = 0.f;
    }
#pragma unroll 1
    for (int n = 0; n < kSamples; n += kChunk) add_hidden(n, a.source_length - 1, constant);
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int at = min(int(blockIdx.x) * kRows + row_of_block(i), kTargets - 1);
      constant[i] += __ldg(a.output_bias + at);
      load_lanes(wh[i], row(a, i) + kEmbedding, lane);
    }
  }

  /// What the words of kChunk samples from n on add to each row, beside the constants.
  __device__ __forceinline__ void add_input(const SharedArguments& a, int n) {
    float sums[kChunk][kRowsPerWarp];
#pragma unroll
    for (int s = 0; s < kChunk; ++s) {
      float4 x[kX];
      if (kSamples > 1) {
        read_lanes(x, shared.x[n + s], lane);
      } else {
        load_lanes(x, a.embedding + size_t(shared.word[0]) * kEmbedding, lane);
      }
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) {
        sums[s][i] = dot_lanes(x, shared.rows[row_of_block(i)], lane, 0.f);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      if (n <= lane && lane < n + kChunk) logits[i] = constant[i];
    }
    add(n, sums, logits);
  }

  __device__ __forceinline__ void add_hidden(int n, int now, float (&to)[kRowsPerWarp]) {
    float sums[kChunk][kRowsPerWarp] = {};
#pragma unroll
    for (int j = 0; j < kH; ++j) {
#pragma unroll
      for (int s = 0; s < kChunk; ++s) {
        const float4 of_lane = read_lane(shared.hidden[T::buffer(now)][n + s], j, lane);
#pragma unroll
        for (int i = 0; i < kRowsPerWarp; ++i) sums[s][i] = dot(wh[i][j], of_lane, sums[s][i]);
      }
    }
    add(n, sums, to);
  }

  /// Sums of kChunk samples from n on, to what the lane of each has.
  __device__ __forceinline__ void add(
      int n, float (&sums)[kChunk][kRowsPerWarp], float (&to)[kRowsPerWarp]) {
    float own[kRowsPerWarp];
    const unsigned int at = lane - n;
    if constexpr (kSamples == 1) {
      sum_lanes(sums[0]);
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) own[i] = sums[0][i];
    } else {
      sum_rows(sums, at % kChunk, own);
    }
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      if (at < kChunk) to[i] += own[i];
    }
  }

  __device__ __forceinline__ void add_noise(const SharedArguments& a, int step) {
    if (lane >= kSamples) return;
    const float* noise = a.noise + (size_t(step) * a.samples + lane) * kTargets;
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      if (has(i)) logits[i] += noise[blockIdx.x * kRows + row_of_block(i)];
    }
  }

  /// The block's best row, to all blocks.
  __device__ __forceinline__ void publish(int step) {
    unsigned int best = 0, at = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const unsigned int key = ordered(logits[i]);
      if (has(i) && key > best) best = key, at = row_of_block(i);
    }
    if (lane < kSamples) shared.best[lane][warp] = best, shared.row[lane][warp] = at;
    T::output_warps_are_here();
    for (int n = warp; n < kSamples; n += kOutputWarps) {
      best = lane < kOutputWarps ? shared.best[n][lane] : 0;
      at = lane < kOutputWarps ? shared.row[n][lane] : 0;
      first_of_largest(best, at);
      if (lane == 0) exchange.publish_best(step, n, best, at);
    }
  }

  __device__ __forceinline__ void read_hidden(int step) {
    exchange.template read_hidden<kOutputWarps * 32>(
        step, warp * 32 + lane, &shared.hidden[T::buffer(step)][0][0]);
  }
};

}  // namespace plantune
