// Values that blocks of one launch tell each other, each with a tag in the same 8-byte word.
//
// A word is stored and read at once, so whoever sees the tag sees the value. The tag names the
// launch; each step has words of its own. All blocks wait for the same words: copies of them, each
// for some blocks, cost more than they spare (14 words 73 instead of 63 us with eight copies; H100,
// 2026-11-23).

#pragma once

#include "cuda/gru_translator/lanes.h"

namespace plantune {

using Word = unsigned long long;
constexpr int kRowBits = 6;

__device__ __forceinline__ void store_word(Word* to, Word word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

/// Two neighbouring words, each of which is read at once.
__device__ __forceinline__ void load_words(const Word* from, Word& first, Word& second) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(from)
               : "memory");
}

/// `kSamples` values of each are exchanged in a step.
template <int kHidden, int kBlocks, int kSamples>
struct Exchange {
  // A best word: 32 bits of the key, the row, and what is left for the tag.
  static constexpr unsigned int kTags = 1u << (32 - kRowBits);
  Word* hidden;
  Word* bests;
  unsigned int tag, best_tag;

  /// Tags are not zero, which words begin with.
  __device__ __forceinline__ Exchange(Word* hidden, Word* bests, Word launch)
      : hidden(hidden), bests(bests), tag(launch % 0xffffffffu + 1),
        best_tag(launch % (kTags - 1) + 1) {}

  __device__ __forceinline__ Word* hidden_of(int step) const {
    return hidden + size_t(step) * kSamples * kHidden;
  }

  __device__ __forceinline__ Word* bests_of(int step, int n) const {
    return bests + (size_t(step) * kSamples + n) * kBlocks;
  }

  __device__ __forceinline__ void publish_hidden(int step, int n, int unit, float value) const {
    const Word word = Word(tag) << 32 | __float_as_uint(value);
    store_word(hidden_of(step) + n * kHidden + unit, word);
  }

  /// `kReaders` threads read all units of all samples.
  template <int kReaders>
  __device__ __forceinline__ void read_hidden(int step, int reader, float* to) const {
    constexpr int kPairs = kSamples * kHidden / 2;
    constexpr int kAtOnce = smaller(4, ceil_div(kPairs, kReaders));  // a thread waits for them
    const Word* from = hidden_of(step);
#pragma unroll 1
    for (int at = reader; at < kPairs; at += kAtOnce * kReaders) {
      Word first[kAtOnce], second[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int pair = at + i * kReaders;
        if (pair < kPairs) load_words(from + 2 * pair, first[i], second[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int pair = at + i * kReaders;
        if (pair >= kPairs) continue;
        while (first[i] >> 32 != tag || second[i] >> 32 != tag) {
          load_words(from + 2 * pair, first[i], second[i]);
        }
        reinterpret_cast<float2*>(to)[pair] =
            make_float2(__uint_as_float(unsigned(first[i])), __uint_as_float(unsigned(second[i])));
      }
    }
  }

  __device__ __forceinline__ void publish_best(
      int step, int n, unsigned int key, unsigned int row) const {
    const Word word = Word(key) << 32 | Word(row) << (32 - kRowBits) | best_tag;
    store_word(bests_of(step, n) + blockIdx.x, word);
  }

  /// The best words of the vocabulary for samples n, n + kApart, ...: all lanes of a warp get them.
  /// Block b has `rows` of the vocabulary.
  template <int kCount, int kApart>
  __device__ __forceinline__ void best(
      int step, int n, int lane, int rows, int (&found)[kCount]) const {
    constexpr int kEach = kBlocks / 64;
    Word first[kCount][kEach], second[kCount][kEach];
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      const Word* from = bests_of(step, n + s * kApart) + 2 * lane;
#pragma unroll
      for (int i = 0; i < kEach; ++i) load_words(from + 64 * i, first[s][i], second[s][i]);
    }
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      const Word* from = bests_of(step, n + s * kApart) + 2 * lane;
      unsigned int key = 0, at = ~0u;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        while (!is_there(first[s][i]) || !is_there(second[s][i])) {
          load_words(from + 64 * i, first[s][i], second[s][i]);
        }
        const int block = 2 * (i * 32 + lane);
        take(first[s][i], block * rows, key, at);
        take(second[s][i], (block + 1) * rows, key, at);
      }
      first_of_largest(key, at);
      found[s] = int(at);
    }
  }

  __device__ __forceinline__ bool is_there(Word word) const {
    return (unsigned(word) & (kTags - 1)) == best_tag;
  }

  static __device__ __forceinline__ void take(
      Word word, unsigned int first_row, unsigned int& key, unsigned int& at) {
    const unsigned int other = unsigned(word >> 32);
    if (other <= key) return;  // of equal ones the first stays: blocks come in order
    key = other;
    at = first_row + (unsigned(word) >> (32 - kRowBits));
  }
};

}  // namespace plantune
