// What a translation reads and writes; pointers are to float32 in rows, aligned to 16 bytes.

#pragma once

namespace plantune {

struct GruWeights {
  const float* input;        // 3 * hidden rows: reset, update, new; embedding (and context) wide
  const float* hidden;       // 3 * hidden rows, hidden wide
  const float* input_bias;   // 3 * hidden
  const float* hidden_bias;  // 3 * hidden
};

/// What every kernel of a translation is told.
struct SharedArguments {
  const long long* source;   // source_length x samples; none if its states are given
  const long long* lengths;  // of each sample; null: all words of the source
  const float* source_embedding;
  GruWeights encoder;
  const float* embedding;
  GruWeights decoder;
  const float* output;  // target words rows of [x, hidden, context]
  const float* output_bias;
  const float* noise;  // max_steps x samples x target words, or null: added to the logits
  long long* words;    // samples x max_steps
  long long* steps;    // samples
  long long begin, end;
  // Words that are read here, and that were read at all; samples of the whole source.
  int source_length, read, max_steps, samples;
};

}  // namespace plantune
