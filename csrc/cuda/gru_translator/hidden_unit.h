// A warp's part of encoder and decoder: one hidden unit.
//
// T is Translate of some sizes, in translate.h.

#pragma once

#include "cuda/gru_translator/arguments.h"
#include "cuda/gru_translator/lanes.h"

namespace plantune {

/// A warp that computes one hidden unit of all samples; sums are kept by each sample's lanes.
template <typename T>
struct HiddenUnit {
  using Shared = typename T::Shared;
  using Words = typename T::Words;
  static constexpr int kEmbedding = T::kEmbedding, kHidden = T::kHidden, kSamples = T::kSamples;
  static constexpr int kChunk = T::kUnitChunk, kUnits = T::kUnits, kRows = T::kRows, kX = T::kX;
  static constexpr int kH = T::kH;
  static constexpr unsigned int kAll = T::kAll;

  Shared& shared;
  const Words& exchange;
  const int warp, lane, sample, unit;
  float4 wx[3][kX], wh[3][kH];
  float constant[3], hidden_bias, from_x[3], from_hidden[3];

  __device__ __forceinline__ HiddenUnit(Shared& shared, const Words& exchange, int warp, int lane)
      : shared(shared), exchange(exchange), warp(warp), lane(lane), sample(lane % kSamples),
        unit(blockIdx.x * kUnits + warp) {}

  __device__ __forceinline__ void load(const GruWeights& w, int width) {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      const size_t row = gate * kHidden + unit;
      load_lanes(wx[gate], w.input + row * width, lane);
      load_lanes(wh[gate], w.hidden + row * kHidden, lane);
      constant[gate] = __ldg(w.input_bias + row);
      if (gate < 2) constant[gate] += __ldg(w.hidden_bias + row);
    }
    hidden_bias = __ldg(w.hidden_bias + 2 * kHidden + unit);
  }

  __device__ __forceinline__ void encode(const SharedArguments& a) {
    if (a.source_length == 0) return;
    load(a.encoder, kEmbedding);
    const int last = a.lengths ? int(a.lengths[sample]) : a.source_length;
    add_source(a, 0);
    for (int step = 0; step < a.source_length; ++step) {
      add_state(step - 1, from_hidden);
      publish(step, step < last);
      add_source(a, step + 1);  // while other blocks publish
      __syncthreads();
    }
  }

  __device__ __forceinline__ void decode(const SharedArguments& a) {
    add_context(a);
    unsigned int ended = 0;  // a bit of each sample
    for (int step = 0; step < a.max_steps; ++step) {
      const int now = a.source_length + step;
      add_state(now - 1, from_hidden);
      if (kSamples == 1) {
        const int word = next_word(a, step, ended);
        if (ended == kAll) return;
        add_rows(0, a.embedding, &word);
      } else {
        T::find_words(a, shared, exchange, step, ended);
        if (ended == kAll) return;
        T::load_words(a, shared);
#pragma unroll 1
        for (int n = 0; n < kSamples; n += kChunk) add_words(n);
      }
      publish(now, true);
      __syncthreads();
    }
    if (kSamples > 1) {
      T::find_last_words(a, shared, exchange, ended);
    } else if (blockIdx.x == 0 && warp == 0) {
      next_word(a, a.max_steps, ended);
    }
  }

  /// The decoder's weights, and what the context adds to the gates, for good.
  __device__ __forceinline__ void add_context(const SharedArguments& a) {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      const size_t row = gate * kHidden + unit;
      load_lanes(wh[gate], a.decoder.input + row * (kEmbedding + kHidden) + kEmbedding, lane);
    }
    float sums[3] = {};
    add_state(a.source_length - 1, sums);
    load(a.decoder, kEmbedding + kHidden);
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) constant[gate] += sums[gate];
  }

  /// The one sample's word of the step before; every warp of units finds it by itself.
  __device__ __forceinline__ int next_word(
      const SharedArguments& a, int step, unsigned int& ended) {
    int word = int(a.begin);
    if (step > 0) {
      int found[1];
      exchange.template best<1, 1>(step - 1, 0, lane, kRows, found);
      word = found[0];
    }
    if (warp == 0) {
      if (lane == 0) shared.word[0] = word;
      if (step > 0 && lane == 0 && blockIdx.x == 0) T::write_word(a, 0, step - 1, word, ended);
      __syncwarp();
      if (step < a.max_steps) T::words_are_written();
    }
    if (step > 0) ended = word == a.end;
    return word;
  }

  /// What the words of a step of the source add to the gates.
  __device__ __forceinline__ void add_source(const SharedArguments& a, int step) {
    if (step >= a.source_length) return;
    const long long* words = a.source + size_t(step) * a.samples;
#pragma unroll 1
    for (int n = 0; n < kSamples; n += kChunk) add_rows(n, a.source_embedding, words + n);
  }

  /// What the embeddings of kChunk samples from n on add.
  template <typename Number>
  __device__ __forceinline__ void add_rows(int n, const float* table, const Number* words) {
    constexpr int kAtOnce = smaller(2, kChunk);  // on their way
    float sums[kChunk][3];
#pragma unroll
    for (int first = 0; first < kChunk; first += kAtOnce) {
      float4 x[kAtOnce][kX];
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        load_lanes(x[s], table + size_t(words[first + s]) * kEmbedding, lane);
      }
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) sums[first + s][gate] = dot(wx[gate], x[s], 0.f);
      }
    }
    keep(n, sums, from_x);
  }

  /// What the embeddings in shared memory of kChunk samples from n on add.
  __device__ __forceinline__ void add_words(int n) {
    float sums[kChunk][3];
#pragma unroll
    for (int s = 0; s < kChunk; ++s) {
      float4 x[kX];
      read_lanes(x, shared.x[n + s], lane);
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) sums[s][gate] = dot(wx[gate], x, 0.f);
    }
    keep(n, sums, from_x);
  }

  /// What the hidden state of a step adds.
  __device__ __forceinline__ void add_state(int step, float (&to)[3]) {
#pragma unroll 1
    for (int n = 0; n < kSamples; n += kChunk) add_hidden(n, step, to);
  }

  __device__ __forceinline__ void add_hidden(int n, int step, float (&to)[3]) {
    float sums[kChunk][3] = {};
#pragma unroll
    for (int j = 0; j < kH; ++j) {
#pragma unroll
      for (int s = 0; s < kChunk; ++s) {
        const float4 of_lane = read_lane(shared.hidden[T::buffer(step)][n + s], j, lane);
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
          sums[s][gate] = dot(wh[gate][j], of_lane, sums[s][gate]);
        }
      }
    }
    keep(n, sums, to);
  }

  template <int kCount>
  __device__ __forceinline__ void keep(int n, float (&sums)[kCount][3], float (&to)[3]) {
    if constexpr (kSamples == 1) {
      sum_lanes(sums[0]);
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) to[gate] = sums[0][gate];
    } else {
      float own[3];
      const unsigned int at = sample - n;
      sum_rows(sums, at % kCount, own);
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        if (at < kCount) to[gate] = own[gate];
      }
    }
  }

  /// The unit's next value, to all blocks; the one before where a sample is not `moving`.
  __device__ __forceinline__ void publish(int step, bool moving) {
    const float before = shared.hidden[T::buffer(step - 1)][sample][unit];
    const float reset = sigmoid(from_x[0] + from_hidden[0] + constant[0]);
    const float update = sigmoid(from_x[1] + from_hidden[1] + constant[1]);
    const float fresh = tanh_of(from_x[2] + constant[2] + reset * (from_hidden[2] + hidden_bias));
    const float next = fresh + update * (before - fresh);
    if (lane < kSamples) exchange.publish_hidden(step, lane, unit, moving ? next : before);
  }
};

}  // namespace plantune
