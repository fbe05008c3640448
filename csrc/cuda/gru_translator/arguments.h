// What a translation reads and writes; pointers are to float32 in rows, aligned to 16 bytes.

#pragma once

#include "cuda/gru_translator/exchange.h"

namespace plantune {

struct GruWeights {
  const float* input;        // 3 * hidden rows: reset, update, new; embedding (and context) wide
  const float* hidden;       // 3 * hidden rows, hidden wide
  const float* input_bias;   // 3 * hidden
  const float* hidden_bias;  // 3 * hidden
};

struct TranslateArguments {
  const long long* source;   // source_length x samples; none if its states are given
  const long long* lengths;  // of each sample; null: all words of the source
  const float* source_embedding;
  GruWeights encoder;
  const float* embedding;
  GruWeights decoder;
  const float* output;  // target words rows of [x, hidden, context]
  const float* output_bias;
  const float* noise;  // max_steps x samples x target words, or null: added to the logits
  const float* states;  // read words x samples x hidden: what another launch made of the source
  Word* hidden_words;
  Word* best_words;
  unsigned long long* launches;
  long long* words;  // samples x max_steps
  long long* steps;  // samples
  int source_length, read, max_steps, samples;  // samples of the whole source
  long long begin, end;
};

}  // namespace plantune
