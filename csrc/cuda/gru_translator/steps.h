// Translation by a GRU encoder and decoder (translate.h), a few launches for each word.
//
//   begin, then advance for each word of the source, then add_context
//   advance, choose for each word of the translation, until choose says that all have ended
//   finish: words samples x max_steps, and the steps of each  =
//
// For chips where the blocks of translate.h do not fit. In a CUDA graph the words are a WHILE node,
// whose condition `choose` sets; after the end, advance and choose do nothing.
// Each warp owns a hidden unit, or rows of the output layer, of all samples. Sums are float, in a
// fixed order: deterministic.

#pragma once

#include "cuda/gru_translator/arguments.h"
#include "cuda/gru_translator/lanes.h"

// Of a graph; the driver has it.
extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(
    unsigned long long handle, unsigned int value);

namespace plantune {

struct StepState {
  int step, left, blocks;  // left: sentences that go on; blocks that have found their best words
};

struct StepArguments : SharedArguments {
  float* hidden;    // two steps of samples x hidden, which take turns
  float* constant;  // samples x (gates and target words): what the context and biases add
  unsigned long long* best;  // samples: a key, and which word has it
  long long* word;           // samples: of the step before
  long long* made;           // samples x max_steps
  long long* counts;         // samples
  StepState* state;
};

/// Sizes says kEmbedding, kHidden, kTargets and kRows (of the output layer, of a warp).
template <typename Sizes>
struct TranslateSteps {
  static constexpr int kEmbedding = Sizes::kEmbedding, kHidden = Sizes::kHidden;
  static constexpr int kTargets = Sizes::kTargets, kRows = Sizes::kRows;
  static constexpr int kX = kEmbedding / kLaneSpan, kH = kHidden / kLaneSpan;
  static constexpr int kGates = 3 * kHidden, kConstants = kGates + kTargets;
  static constexpr int kOutputWidth = kEmbedding + 2 * kHidden;

  static_assert(kEmbedding % kLaneSpan == 0, "a warp reads an embedding in whole vectors");
  static_assert(kHidden % kLaneSpan == 0, "a warp reads the hidden state in whole vectors");

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() {
    return int((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  }

  /// The state before a step; the one after it for the next.
  static __device__ __forceinline__ float* hidden(const StepArguments& a, int step, int n) {
    return a.hidden + (size_t(step & 1) * a.samples + n) * kHidden;
  }

  static __device__ void begin(const StepArguments& a) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, apart = gridDim.x * blockDim.x;
    for (int i = at; i < a.samples * kHidden; i += apart) a.hidden[i] = 0.f;
    for (int i = at; i < a.samples * a.max_steps; i += apart) a.made[i] = a.end;
    for (int n = at; n < a.samples; n += apart) {
      a.best[n] = 0, a.word[n] = a.begin, a.counts[n] = 0;
    }
    if (at == 0) *a.state = {0, a.samples, 0};
  }

  /// One word of the source, of its place `at`.
  static __device__ void read(const StepArguments& a, int at) {
    advance(a, a.encoder, kEmbedding, a.source_embedding, a.source + size_t(at) * a.samples, at);
  }

  static __device__ void advance(const StepArguments& a) {
    if (a.state->left == 0) return;
    const int step = a.source_length + a.state->step;
    advance(a, a.decoder, kEmbedding + kHidden, a.embedding, a.word, step);
  }

  static __device__ __forceinline__ void advance(
      const StepArguments& a, const GruWeights& w, int width, const float* table,
      const long long* words, int step) {
    const int unit = warp();
    if (unit >= kHidden) return;
    float4 wx[3][kX], wh[3][kH];
    float bias[3];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      const size_t row = gate * kHidden + unit;
      load_lanes(wx[gate], w.input + row * width, lane());
      load_lanes(wh[gate], w.hidden + row * kHidden, lane());
      bias[gate] = __ldg(w.input_bias + row);
      if (gate < 2) bias[gate] += __ldg(w.hidden_bias + row);
    }
    const bool decodes = step >= a.source_length;
    const float hidden_bias = __ldg(w.hidden_bias + 2 * kHidden + unit);
#pragma unroll 2
    for (int n = 0; n < a.samples; ++n) {
      float4 x[kX], h[kH];
      load_lanes(x, table + size_t(words[n]) * kEmbedding, lane());
      read_lanes(h, hidden(a, step, n), lane());
      // Reset, update, and of the new value what x and what h adds.
      float sums[4] = {dot(wh[0], h, dot(wx[0], x, 0.f)), dot(wh[1], h, dot(wx[1], x, 0.f)),
                       dot(wx[2], x, 0.f), dot(wh[2], h, 0.f)};
      sum_lanes(sums);
      if (lane() > 0) continue;
      const float* added = a.constant + size_t(n) * kConstants + unit;
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        sums[gate] += decodes ? added[gate * kHidden] : bias[gate];
      }
      const float before = hidden(a, step, n)[unit];
      const float reset = sigmoid(sums[0]), update = sigmoid(sums[1]);
      const float fresh = tanh_of(sums[2] + reset * (sums[3] + hidden_bias));
      const bool moves = decodes || !a.lengths || step < a.lengths[n];
      hidden(a, step + 1, n)[unit] = moves ? fresh + update * (before - fresh) : before;
    }
  }

  /// What the context adds to gates and logits, with their biases: a warp for each.
  static __device__ void add_context(const StepArguments& a) {
    const int row = warp();
    if (row >= kConstants) return;
    const int word = row - kGates;
    const float* from =
        word < 0 ? a.decoder.input + size_t(row) * (kEmbedding + kHidden) + kEmbedding
                 : a.output + size_t(word) * kOutputWidth + kEmbedding + kHidden;
    float4 w[kH];
    load_lanes(w, from, lane());
    float bias = __ldg(word < 0 ? a.decoder.input_bias + row : a.output_bias + word);
    if (row < 2 * kHidden) bias += __ldg(a.decoder.hidden_bias + row);
    for (int n = 0; n < a.samples; ++n) {
      float4 h[kH];
      read_lanes(h, hidden(a, a.source_length, n), lane());
      float sums[1] = {dot(w, h, 0.f)};
      sum_lanes(sums);
      if (lane() == 0) a.constant[size_t(n) * kConstants + row] = sums[0] + bias;
    }
  }

  /// The word of a step: blocks find the best of their rows, and the last of them goes on.
  static __device__ void choose(const StepArguments& a, unsigned long long loop) {
    extern __shared__ unsigned long long bests[];  // samples
    __shared__ int left;
    __shared__ bool last;
    if (a.state->left == 0) return;
    for (int n = threadIdx.x; n < a.samples; n += blockDim.x) bests[n] = 0;
    if (threadIdx.x == 0) left = 0;
    __syncthreads();
    find_best(a, bests);
    __syncthreads();
    for (int n = threadIdx.x; n < a.samples; n += blockDim.x) atomicMax(a.best + n, bests[n]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&a.state->blocks, 1) + 1 == int(gridDim.x);
    __syncthreads();
    if (!last) return;
    __threadfence();
    const int step = a.state->step;
    for (int n = threadIdx.x; n < a.samples; n += blockDim.x) {
      if (takes(a, n, step)) atomicAdd(&left, 1);
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    if (step + 1 == a.max_steps) left = 0;
    *a.state = {step + 1, left, 0};
    if (loop) cudaGraphSetConditional(loop, left > 0);
  }

  static __device__ __forceinline__ void find_best(
      const StepArguments& a, unsigned long long* bests) {
    const int first = warp() * kRows, step = a.state->step;
    if (first >= kTargets) return;
    float4 w[kRows][kX + kH];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      load_lanes(w[i], a.output + size_t(min(first + i, kTargets - 1)) * kOutputWidth, lane());
    }
#pragma unroll 2
    for (int n = 0; n < a.samples; ++n) {
      float4 x[kX], h[kH];
      load_from(x, a.embedding + size_t(a.word[n]) * kEmbedding);
      load_from(h, hidden(a, a.source_length + step + 1, n));
      float sums[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < kX; ++j) sum = dot(w[i][j], x[j], sum);
#pragma unroll
        for (int j = 0; j < kH; ++j) sum = dot(w[i][kX + j], h[j], sum);
        sums[i] = sum;
      }
      sum_lanes(sums);
      if (lane() > 0) continue;
      unsigned long long best = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = first + i;
        if (row >= kTargets) continue;
        float logit = sums[i] + a.constant[size_t(n) * kConstants + kGates + row];
        if (a.noise) logit += a.noise[(size_t(step) * a.samples + n) * kTargets + row];
        // Of equal ones the first row is the largest.
        const unsigned long long key = ordered(logit);
        const unsigned long long found = key << 32 | ~(unsigned int)(row);
        best = found > best ? found : best;
      }
      atomicMax(bests + n, best);
    }
  }

  template <int kVectors>
  static __device__ __forceinline__ void load_from(float4 (&to)[kVectors], const float* from) {
    read_lanes(to, from, lane());
  }

  /// Writes a sample's word; whether it goes on.
  static __device__ __forceinline__ bool takes(const StepArguments& a, int n, int step) {
    const long long word = ~(unsigned int)(atomicExch(a.best + n, 0ull));
    const bool ended = step > 0 && a.word[n] == a.end;
    if (ended) return false;
    a.word[n] = a.made[size_t(n) * a.max_steps + step] = word;
    a.counts[n] = step + 1;
    return word != a.end;
  }

  static __device__ void finish(const StepArguments& a) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, apart = gridDim.x * blockDim.x;
    for (int i = at; i < a.samples * a.max_steps; i += apart) a.words[i] = a.made[i];
    for (int n = at; n < a.samples; n += apart) a.steps[n] = a.counts[n];
  }
};

}  // namespace plantune
