// What an optimizer's step must know before it: of the gradients, and of its own numbers.

#pragma once

#include "cuda/chunks.h"
#include "cuda/launch.h"

namespace plantune {

// Chunks whose gradients a block has under way at once.
constexpr int kMeasuredAtOnce = 4;
constexpr int kGroupNumbers = 12;
enum class Rule { kSgd, kAdam, kLamb };

/// What a step knows of its gradients.
struct Status {
  float norm;       // unscaled, not clipped yet
  float factor;     // unscales and clips
  float found_inf;  // 1 leaves the step out
  float spare;
};

/// What clips and scales: 0 for none.
struct Settings {
  double max_norm, growth_factor, backoff_factor, growth_interval;
};

/// The numbers of a group, by their places in its row.
struct Group {
  enum Place { kRate, kFirst, kSecond, kEps, kDecay, kFlags };
  enum Flag { kDecoupled = 1, kLargest = 2, kMaximize = 4, kNesterov = 8, kCorrects = 16 };
};

/// What all elements of a parameter share in one step.
struct alignas(16) Shared {
  float rate, decay, eps, first;
  float rest, second, rest_of_second, of_root;
  int flags, is_first, spare[2];
};

__device__ __forceinline__ float inverse_of(const float* scale) {
  return scale == nullptr ? 1.f : float(1.0 / double(*scale));
}

template <typename T>
struct Measure {
  struct Arguments {
    const Chunk* chunks;
    long long count;
    const T* const* gradients;  // of each item; null for none
    Partial* partial;
    const float* scale;  // null for none
  };

  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const float inverse = inverse_of(a.scale);
    float squares = 0, infinite = 0;
    for (long long first = blockIdx.x; first < a.count; first += gridDim.x * kMeasuredAtOnce) {
      Share<T> read[kMeasuredAtOnce];
#pragma unroll
      for (int k = 0; k < kMeasuredAtOnce; ++k) load(read[k], a, first + k * gridDim.x);
#pragma unroll
      for (int k = 0; k < kMeasuredAtOnce; ++k) {
#pragma unroll
        for (int i = 0; i < kStepEach; ++i) {
          const float g = read[k][i], unscaled = g * inverse;
          squares += unscaled * unscaled;
          infinite += isfinite(g) ? 0.f : 1.f;
        }
      }
    }
    squares = sum_of_block(squares);
    infinite = sum_of_block(infinite);
    if (threadIdx.x == 0) a.partial[blockIdx.x] = {squares, infinite == 0 ? 1.f : 0.f};
  }

 private:
  /// 0 where there is no such chunk, or no gradient.
  static __device__ __forceinline__ void load(Share<T>& read, const Arguments& a, long long which) {
    const T* from = nullptr;
    unsigned count = 0;
    bool whole = false;
    if (which < a.count) {
      const Chunk chunk = a.chunks[which];
      const T* gradient = a.gradients[chunk.item];
      if (gradient != nullptr) {
        from = gradient + chunk.first, count = chunk.count;
        whole = is_whole(chunk, from);
      }
    }
    if (whole) {
      read.template load<true>(from, count);
    } else {
      read.template load<false>(from, count);
    }
  }
};

template <Rule kRule>
struct Advance {
  struct Arguments {
    const Partial* partial;  // null where nothing was measured
    long long partials;
    const Settings* settings;
    float* scale;  // null for none
    int* growth;
    const void* const* gradients;
    const unsigned* groups;  // of each item
    const double* numbers;
    float* steps;
    Shared* shared;
    long long items;
    Status* status;
  };

  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    float squares = 0, infinite = 0;
    for (long long i = threadIdx.x; i < a.partials; i += kStepThreads) {
      squares += a.partial[i].squares;
      infinite += a.partial[i].finite != 0 ? 0.f : 1.f;
    }
    squares = sum_of_block(squares);
    infinite = sum_of_block(infinite);
    const float scale = a.scale == nullptr ? 1.f : *a.scale;
    const float inverse = inverse_of(a.scale);
    const bool skip = a.scale != nullptr && infinite != 0;
    if (!skip) {
      for (long long i = threadIdx.x; i < a.items; i += kStepThreads) advance(a, i);
    }
    __syncthreads();  // all threads have read the scale
    if (threadIdx.x != 0) return;
    const Settings s = *a.settings;
    const float norm = sqrtf(squares);
    float clip = 1;
    if (s.max_norm > 0) {
      clip = float(s.max_norm) / (norm + 1e-6f);
      clip = clip > 1.f ? 1.f : clip;  // NaN stays
    }
    *a.status = {norm, inverse * clip, skip ? 1.f : 0.f, 0.f};
    if (a.scale != nullptr) rescale(a, s, scale, skip);
  }

 private:
  static __device__ __forceinline__ void advance(const Arguments& a, long long i) {
    if (a.gradients[i] == nullptr) return;
    const float step = a.steps[i] + 1.f;
    a.steps[i] = step;
    a.shared[i] = shared_by(a.numbers + a.groups[i] * kGroupNumbers, step);
  }

  /// As torch's GradScaler.
  static __device__ __forceinline__ void rescale(const Arguments& a, const Settings& s, float scale,
                                                 bool skip) {
    if (skip) {
      *a.scale = float(double(scale) * s.backoff_factor);
      *a.growth = 0;
    } else if (*a.growth + 1 >= int(s.growth_interval)) {
      const float grown = float(double(scale) * s.growth_factor);
      if (isfinite(grown)) *a.scale = grown;
      *a.growth = 0;
    } else {
      *a.growth += 1;
    }
  }

  static __device__ __forceinline__ Shared shared_by(const double* n, float step) {
    Shared s = {};
    s.flags = int(n[Group::kFlags]);
    s.is_first = step <= 1.f;
    s.eps = float(n[Group::kEps]);
    s.first = float(n[Group::kFirst]);
    s.second = float(n[Group::kSecond]);
    s.rest = float(1.0 - n[Group::kFirst]);
    s.rest_of_second = float(1.0 - n[Group::kSecond]);
    const bool corrects = kRule == Rule::kAdam || s.flags & Group::kCorrects;
    const double of_first = corrects ? 1.0 - pow(n[Group::kFirst], double(step)) : 1.0;
    const double of_second = corrects ? 1.0 - pow(n[Group::kSecond], double(step)) : 1.0;
    s.of_root = float(1.0 / sqrt(of_second));
    s.decay = float(n[Group::kDecay]);
    if (kRule == Rule::kAdam && s.flags & Group::kDecoupled) {
      s.decay = float(1.0 - n[Group::kRate] * n[Group::kDecay]);
    }
    s.rate = float(kRule == Rule::kAdam ? n[Group::kRate] / of_first : n[Group::kRate]);
    if (kRule == Rule::kLamb) s.rate = float(1.0 / of_first);
    return s;
  }
};

}  // namespace plantune
