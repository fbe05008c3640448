// Translation by a GRU encoder and decoder in one launch, from words to words.
//
//   hidden = 0;  hidden = GRU(source_embedding[word], hidden) for each word of the source
//   context = hidden;  word = begin
//   at each step: x = embedding[word];  hidden = GRU([x, context], hidden)
//                 word = argmax(W [x, hidden, context] + b + noise), the first of equal ones
//   words[n][step] = word                      =, after the end: the end's word
//   steps[n] = words until the end, or max     =
//
// The source may have been read by another launch (gru_scan.h), which suits many sentences: here a
// step of the encoder is the work of a few warps, and sums sentence after sentence.
//
// The blocks stay for the whole sentence, with all weights that meet a changing value in registers
// and shared memory: block b owns kUnits hidden units (one warp each, which holds the unit's gates)
// and kRows rows of the output layer (kRowsPerWarp for each of the other warps). What the weights
// make of the context is a constant of the sentence, computed once.
//
// Blocks exchange two things at each step: hidden units and each block's best row. Every value is
// stored together with a tag in one 8-byte word, and readers spin on the words themselves: there is
// no barrier and no fence. Each step of a launch has words of its own, and the tag names the
// launch: all blocks count themselves in when they start, and the count tells each the launch's
// number. Whoever waits for another block needs it to run: the launch is cooperative. kSamples
// sentences are translated at once; source, words and context may be a part of those of more.
//
// All sums are float, in a fixed order: deterministic.

#pragma once

#include "cuda/gru_translator/exchange.h"
#include "cuda/gru_translator/hidden_unit.h"
#include "cuda/gru_translator/output_rows.h"

namespace plantune {

struct TranslateArguments : SharedArguments {
  const float* states;  // read words x samples x hidden: what another launch made of the source
  Word* hidden_words;
  Word* best_words;
  unsigned long long* launches;
};

/// Sizes says kEmbedding, kHidden, kTargets (target words) and kSamples (sentences at once).
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
  // So many sentences are summed side by side, where one would wait for each of its sums: by a
  // warp of hidden units, and by one of output rows, which has fewer registers left.
  static constexpr int kUnitChunk = kSamples % 4 == 0 ? 4 : kSamples % 2 == 0 ? 2 : 1;
  static constexpr int kRowChunk = kSamples % 2 == 0 ? 2 : 1;
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
    float x[kSamples][kEmbedding];
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
      (&shared.hidden[buffer(-1)][0][0])[i] = a.states ? read_state(a, i) : 0.f;
    }
    __syncthreads();
    const Words exchange(a.hidden_words, a.best_words, shared.launch);
    if (warp < kUnits) {
      HiddenUnit<Translate> unit(shared, exchange, warp, lane);
      unit.encode(a);
      unit.decode(a);
    } else {
      OutputRows<Translate> outputs(shared, exchange, warp - kUnits, lane);
      outputs.encode(a);
      outputs.decode(a);
    }
  }

  /// What a sample's last word left behind; zeros, as before the first one, where there is none.
  static __device__ __forceinline__ float read_state(const TranslateArguments& a, int i) {
    const int n = i / kHidden;
    const long long last = (a.lengths ? a.lengths[n] : a.read) - 1;
    if (last < 0) return 0.f;  // of no word
    return a.states[(last * a.samples + n) * kHidden + i % kHidden];
  }

  /// The buffer of the hidden state that a step makes; the first one begins from buffer 1.
  static __device__ __forceinline__ int buffer(int step) { return step & 1; }

  static constexpr unsigned int kAll = kSamples == 32 ? ~0u : (1u << kSamples) - 1;

  /// The samples that have ended with the words in shared memory, a bit of each.
  static __device__ __forceinline__ unsigned int ended_by(
      const SharedArguments& a, const Shared& shared, int lane, unsigned int ended) {
    return ended | __ballot_sync(~0u, lane < kSamples && shared.word[lane % kSamples] == a.end);
  }

  /// Meets once a step, when the words of the step before are in shared memory: all warps, or for
  /// one sample those of outputs and the one that writes the word.
  static constexpr int kReaders = kSamples > 1 ? kThreads : (kOutputWarps + 1) * 32;
  static __device__ __forceinline__ void words_are_there() { meet<1, kReaders>(); }
  static __device__ __forceinline__ void words_are_written() { come<1, kReaders>(); }

  /// The words of the step before, into shared memory: each warp finds some.
  static __device__ __forceinline__ void find_words(
      const SharedArguments& a, Shared& shared, const Words& exchange, int step,
      unsigned int& ended) {
    constexpr int kWarps = kThreads / 32, kAtOnce = kSamples % (2 * kWarps) ? 1 : 2;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int n = threadIdx.x / 32; n < kSamples; n += kAtOnce * kWarps) {
      int found[kAtOnce];
      if (step > 0) exchange.template best<kAtOnce, kWarps>(step - 1, n, lane, kRows, found);
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        const int at = n + s * kWarps;
        int word = step > 0 ? found[s] : int(a.begin);
        if (ended >> at & 1) word = int(a.end);
        if (lane > 0) continue;
        shared.word[at] = word;
        if (step > 0 && blockIdx.x == 0) write_word(a, at, step - 1, word, ended);
      }
    }
    words_are_there();
    if (step > 0) ended = ended_by(a, shared, lane, ended);
  }

  static __device__ __forceinline__ void find_last_words(
      const SharedArguments& a, Shared& shared, const Words& exchange, unsigned int ended) {
    if (blockIdx.x == 0) find_words(a, shared, exchange, a.max_steps, ended);
  }

  static __device__ __forceinline__ void write_word(
      const SharedArguments& a, int n, int step, int word, unsigned int ended) {
    if (ended >> n & 1) return;
    long long* words = a.words + n * a.max_steps;
    words[step] = word;
    a.steps[n] = step + 1;
    if (word != a.end) return;
    for (int rest = step + 1; rest < a.max_steps; ++rest) words[rest] = word;
  }

  /// The words' embeddings into shared memory.
  static __device__ __forceinline__ void load_words(const SharedArguments& a, Shared& shared) {
    constexpr int kVectors = kEmbedding / 4;
    for (int i = threadIdx.x; i < kSamples * kVectors; i += kThreads) {
      const float* row = a.embedding + size_t(shared.word[i / kVectors]) * kEmbedding;
      reinterpret_cast<float4*>(shared.x[i / kVectors])[i % kVectors] =
          __ldg(reinterpret_cast<const float4*>(row) + i % kVectors);
    }
    meet<3, kThreads>();
  }

  static __device__ __forceinline__ void output_warps_are_here() { meet<2, kOutputWarps * 32>(); }
};

}  // namespace plantune
