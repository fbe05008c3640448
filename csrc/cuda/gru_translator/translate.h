// Greedy translation by a GRU encoder and decoder in one launch, from words to words.
//
//   hidden = 0;  hidden = GRU(source_embedding[word], hidden) for each word of the source
//   context = hidden;  word = begin
//   at each step: x = embedding[word];  hidden = GRU([x, context], hidden)
//                 word = argmax(W [x, hidden, context] + b), the first of equal ones
//   words[n][step] = word                      =, after the end: the end's word
//   steps[n] = words until the end, or max     =
//
// The blocks stay for the whole sentence, with all weights that meet a changing value in registers
// and shared memory: block b owns kUnits hidden units (one warp each, which holds the unit's gates)
// and kRows rows of the output layer (kRowsPerWarp for each of the other warps). What the weights
// make of the context is a constant of the sentence, computed once.
//
// Blocks exchange two things at each step: hidden units and each block's best row. Every value is
// stored together with a tag in one 8-byte word, and readers spin on the words themselves: there is
// no barrier and no fence. Each step of a launch has words of its own, and the tag names the launch:
// all blocks count themselves in when they start, and the count tells each the launch's number.
// Whoever waits for another block needs it to run: the launch is cooperative.
//
// All sums are float, in a fixed order: deterministic.

#pragma once

#include "cuda/gru_translator/exchange.h"
#include "cuda/gru_translator/lanes.h"

namespace plantune {

struct GruWeights {
  const float* input;        // 3 * hidden rows: reset, update, new; embedding (and context) wide
  const float* hidden;       // 3 * hidden rows, hidden wide
  const float* input_bias;   // 3 * hidden
  const float* hidden_bias;  // 3 * hidden
};

struct TranslateArguments {
  const long long* source;   // length x samples
  const long long* lengths;  // of each sample; null: all words of the source
  const float* source_embedding;
  GruWeights encoder;
  const float* embedding;
  GruWeights decoder;
  const float* output;  // target words rows of [x, hidden, context]
  const float* output_bias;
  float* context;  // samples x hidden: written by the encoder, read if there is no source
  Word* hidden_words;
  Word* best_words;
  unsigned long long* launches;
  long long* words;  // samples x max_steps
  long long* steps;  // samples
  int source_length, max_steps;
  long long begin, end;
};

/// Sizes says kEmbedding, kHidden, kTargets (target words) and kSamples.
template <typename Sizes>
struct Translate {
  static constexpr int kEmbedding = Sizes::kEmbedding, kHidden = Sizes::kHidden;
  static constexpr int kTargets = Sizes::kTargets, kSamples = Sizes::kSamples;
  static constexpr int kThreads = 512, kUnits = 4, kBlocks = kHidden / kUnits;
  static constexpr int kOutputWarps = kThreads / 32 - kUnits;
  static constexpr int kRows = ceil_div(kTargets, kBlocks);
  static constexpr int kRowsPerWarp = ceil_div(kRows, kOutputWarps);
  static constexpr int kOutputWidth = kEmbedding + 2 * kHidden;
  static constexpr int kX = kEmbedding / kLaneSpan, kH = kHidden / kLaneSpan;
  using Words = Exchange<kHidden, kBlocks, kSamples>;

  static_assert(kEmbedding % kLaneSpan == 0, "a warp reads an embedding in whole vectors");
  static_assert(kHidden % kLaneSpan == 0, "a warp reads the hidden state in whole vectors");
  static_assert(kRowsPerWarp <= 4, "the rows of the output layer stay in registers");
  static_assert(kRows <= 1 << kRowBits, "a word names the row of its block in a few bits");
  static_assert(kSamples <= 32, "each sample has a lane");
  static_assert(kBlocks % 64 == 0, "a warp reads the blocks' words in pairs");

  struct Shared {
    float hidden[2][kSamples][kHidden];
    float rows[kOutputWarps * kRowsPerWarp][kEmbedding];  // what of the output layer meets x
    unsigned int best[kSamples][kOutputWarps], row[kSamples][kOutputWarps];
    int word[kSamples];
    int over;
    unsigned long long launch;
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  static __device__ void run(const TranslateArguments& a) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) shared.launch = atomicAdd(a.launches, 1ull) / gridDim.x;
    for (int i = threadIdx.x; i < kSamples * kHidden; i += kThreads) {
      (&shared.hidden[buffer(-1)][0][0])[i] = a.source_length == 0 ? a.context[i] : 0.f;
    }
    __syncthreads();
    const Words exchange(a.hidden_words, a.best_words, shared.launch);
    if (warp < kUnits) {
      Unit unit(shared, exchange, warp, lane);
      unit.encode(a);
      unit.decode(a);
    } else {
      Outputs outputs(shared, exchange, warp - kUnits, lane);
      outputs.encode(a);
      outputs.decode(a);
    }
  }

  /// The buffer of the hidden state that a step makes; the first one begins from buffer 1.
  static __device__ __forceinline__ int buffer(int step) { return step & 1; }

  /// A warp that computes one hidden unit of all samples; sums are kept by the sample's lane.
  struct Unit {
    Shared& shared;
    const Words& exchange;
    const int warp, lane, unit;
    float4 wx[3][kX], wh[3][kH];
    float constant[3], hidden_bias, from_x[3], from_hidden[3];

    __device__ __forceinline__ Unit(Shared& shared, const Words& exchange, int warp, int lane)
        : shared(shared), exchange(exchange), warp(warp), lane(lane),
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

    __device__ __forceinline__ void encode(const TranslateArguments& a) {
      if (a.source_length == 0) return;
      load(a.encoder, kEmbedding);
      const int last = lane < kSamples && a.lengths ? int(a.lengths[lane]) : a.source_length;
      for (int step = 0; step < a.source_length; ++step) {
#pragma unroll 1
        for (int n = 0; n < kSamples; ++n) {
          add_input(n, a.source_embedding, a.source[step * kSamples + n]);
          add_hidden(n, step - 1);
        }
        publish(step, step < last);
        __syncthreads();
      }
      write_context(a);
    }

    __device__ __forceinline__ void write_context(const TranslateArguments& a) {
      const int last = buffer(a.source_length - 1);
      if (lane < kSamples) a.context[lane * kHidden + unit] = shared.hidden[last][lane][unit];
    }

    __device__ __forceinline__ void decode(const TranslateArguments& a) {
      add_context(a);
      unsigned int ended = 0;
      for (int step = 0; step < a.max_steps; ++step) {
        const int now = a.source_length + step;
#pragma unroll 1
        for (int n = 0; n < kSamples; ++n) add_hidden(n, now - 1);
        if (next_words(a, step, ended)) return;
#pragma unroll 1
        for (int n = 0; n < kSamples; ++n) add_input(n, a.embedding, shared.word[n]);
        publish(now, true);
        __syncthreads();
      }
      if (blockIdx.x == 0 && warp == 0) next_words(a, a.max_steps, ended);
    }

    /// The decoder's weights, and what the context adds to the gates, for good.
    __device__ __forceinline__ void add_context(const TranslateArguments& a) {
      float sums[3] = {};
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        const size_t row = gate * kHidden + unit;
        load_lanes(wh[gate], a.decoder.input + row * (kEmbedding + kHidden) + kEmbedding, lane);
      }
#pragma unroll 1
      for (int n = 0; n < kSamples; ++n) {
        const float* context = shared.hidden[buffer(a.source_length - 1)][n];
        float of_lane[3];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
          of_lane[gate] = dot_lanes(wh[gate], context, lane, 0.f);
        }
        sum_lanes(of_lane);
        keep(n, of_lane, sums);
      }
      load(a.decoder, kEmbedding + kHidden);
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) constant[gate] += sums[gate];
    }

    __device__ __forceinline__ void keep(int n, const float (&sums)[3], float (&to)[3]) {
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        if (lane == n) to[gate] = sums[gate];
      }
    }

    /// The words of the step before, for this block; true if all samples have ended.
    __device__ __forceinline__ bool next_words(
        const TranslateArguments& a, int step, unsigned int& ended) {
      if (warp == 0) {
        for (int n = 0; n < kSamples; ++n) {
          int word = int(a.begin);
          if (step > 0) {
            word = exchange.best(step - 1, n, lane, kRows);
            if (ended >> n & 1) word = int(a.end);
          }
          if (lane == 0) shared.word[n] = word;
          if (blockIdx.x == 0 && lane == 0 && step > 0) write_word(a, n, step - 1, word, ended);
          if (step > 0 && word == a.end) ended |= 1u << n;
        }
        if (lane == 0) shared.over = ended == kAll;
      }
      if (step == a.max_steps) return true;
      words_are_there();
      return shared.over;
    }

    __device__ __forceinline__ void write_word(
        const TranslateArguments& a, int n, int step, int word, unsigned int ended) {
      if (ended >> n & 1) return;
      a.words[n * a.max_steps + step] = word;
      a.steps[n] = step + 1;
      if (word != a.end) return;
      for (int rest = step + 1; rest < a.max_steps; ++rest) {
        a.words[n * a.max_steps + rest] = word;
      }
    }

    __device__ __forceinline__ void add_input(int n, const float* table, long long word) {
      float4 x[kX];
      load_lanes(x, table + word * kEmbedding, lane);
      float sums[3];
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) sums[gate] = dot(wx[gate], x, 0.f);
      sum_lanes(sums);
      keep(n, sums, from_x);
    }

    __device__ __forceinline__ void add_hidden(int n, int step) {
      float sums[3];
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        sums[gate] = dot_lanes(wh[gate], shared.hidden[buffer(step)][n], lane, 0.f);
      }
      sum_lanes(sums);
      keep(n, sums, from_hidden);
    }

    /// The unit's next value, to all blocks; the one before where a sample is not `moving`.
    __device__ __forceinline__ void publish(int step, bool moving) {
      if (lane >= kSamples) return;
      const float before = shared.hidden[buffer(step - 1)][lane][unit];
      const float reset = sigmoid(from_x[0] + from_hidden[0] + constant[0]);
      const float update = sigmoid(from_x[1] + from_hidden[1] + constant[1]);
      const float fresh =
          tanh_of(from_x[2] + constant[2] + reset * (from_hidden[2] + hidden_bias));
      const float next = fresh + update * (before - fresh);
      exchange.publish_hidden(step, lane, unit, moving ? next : before);
    }
  };

  /// A warp that computes some rows of the output layer of all samples, and reads the hidden state
  /// for the block.
  struct Outputs {
    Shared& shared;
    const Words& exchange;
    const int warp, lane;
    float4 wh[kRowsPerWarp][kH];
    float constant[kRowsPerWarp], logits[kRowsPerWarp];  // of the lane's sample

    __device__ __forceinline__ Outputs(
        Shared& shared, const Words& exchange, int warp, int lane)
        : shared(shared), exchange(exchange), warp(warp), lane(lane) {}

    __device__ __forceinline__ int row_of_block(int i) const { return warp * kRowsPerWarp + i; }

    __device__ __forceinline__ bool has(int i) const {
      return row_of_block(i) < kRows && blockIdx.x * kRows + row_of_block(i) < kTargets;
    }

    /// The weights of a row; of one that there is not, those of the last.
    __device__ __forceinline__ const float* row(const TranslateArguments& a, int i) const {
      const int at = min(int(blockIdx.x) * kRows + row_of_block(i), kTargets - 1);
      return a.output + size_t(at) * kOutputWidth;
    }

    __device__ __forceinline__ void encode(const TranslateArguments& a) {
      load(a);
      for (int step = 0; step < a.source_length; ++step) {
        read_hidden(step);
        __syncthreads();
      }
    }

    __device__ __forceinline__ void load(const TranslateArguments& a) {
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) {
        const float* from = row(a, i);
        float4 x[kX];
        load_lanes(x, from, lane);
        store_lanes(shared.rows[row_of_block(i)], x, lane);
        prefetch_lanes<2 * kHidden>(from + kEmbedding, lane);
      }
    }

    __device__ __forceinline__ void decode(const TranslateArguments& a) {
      add_context(a);
      for (int step = 0; step < a.max_steps; ++step) {
        words_are_there();
        if (shared.over) return;
#pragma unroll 1
        for (int n = 0; n < kSamples; ++n) add_input(a, n);
        const int now = a.source_length + step;
        read_hidden(now);
        __syncthreads();
#pragma unroll 1
        for (int n = 0; n < kSamples; ++n) add_hidden(n, now, logits);
        publish(step);
      }
    }

    /// What the context and the bias add to each row, for good; then the weights that stay.
    __device__ __forceinline__ void add_context(const TranslateArguments& a) {
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) {
        load_lanes(wh[i], row(a, i) + kEmbedding + kHidden, lane);
        constant[i] = 0.f;
      }
#pragma unroll 1
      for (int n = 0; n < kSamples; ++n) add_hidden(n, a.source_length - 1, constant);
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) {
        const int at = min(int(blockIdx.x) * kRows + row_of_block(i), kTargets - 1);
        constant[i] += __ldg(a.output_bias + at);
        load_lanes(wh[i], row(a, i) + kEmbedding, lane);
      }
    }

    __device__ __forceinline__ void add_input(const TranslateArguments& a, int n) {
      float4 x[kX];
      load_lanes(x, a.embedding + size_t(shared.word[n]) * kEmbedding, lane);
      float sums[kRowsPerWarp];
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) {
        sums[i] = dot_lanes(x, shared.rows[row_of_block(i)], lane, 0.f);
      }
      sum_lanes(sums);
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) {
        if (lane == n) logits[i] = sums[i] + constant[i];
      }
    }

    __device__ __forceinline__ void add_hidden(int n, int now, float (&to)[kRowsPerWarp]) {
      float4 hidden[kH];
      read_lanes(hidden, shared.hidden[buffer(now)][n], lane);
      float sums[kRowsPerWarp];
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) sums[i] = dot(wh[i], hidden, 0.f);
      sum_lanes(sums);
#pragma unroll
      for (int i = 0; i < kRowsPerWarp; ++i) {
        if (lane == n) to[i] += sums[i];
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
      output_warps_are_here();
      for (int n = warp; n < kSamples; n += kOutputWarps) {
        best = lane < kOutputWarps ? shared.best[n][lane] : 0;
        at = lane < kOutputWarps ? shared.row[n][lane] : 0;
        first_of_largest(best, at);
        if (lane == 0) exchange.publish_best(step, n, best, at);
      }
    }

    __device__ __forceinline__ void read_hidden(int step) {
      exchange.template read_hidden<kOutputWarps * 32>(
          step, warp * 32 + lane, &shared.hidden[buffer(step)][0][0]);
    }
  };

  static constexpr unsigned int kAll = kSamples == 32 ? ~0u : (1u << kSamples) - 1;

  /// Meets once a step, when the words of the step before are in shared memory.
  static __device__ __forceinline__ void words_are_there() { meet<1, kThreads>(); }

  static __device__ __forceinline__ void output_warps_are_here() { meet<2, kOutputWarps * 32>(); }
};

}  // namespace plantune
