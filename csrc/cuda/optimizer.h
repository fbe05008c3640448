// A step of an optimizer over gradients that are side by side in memory.
//
//   measure   partial[b] = (the sum of squares, whether all are finite) of a part of the gradients
//   advance   status, steps, scale, growth from the partial results of all gradients, in one block
//   update    parameters and state, one chunk of one parameter a block
//
// Parameters are dense and in memory of their own; a parameter's gradient and state are in the
// order of its memory, from element `start` of their buffers on. T is float, __half or
// __nv_bfloat16; everything is computed in float and rounded once, what follows from a step's
// number in double. Every number that a user may change is read from memory. Deterministic: sums
// are taken in a fixed order.

#pragma once

#include "cuda/launch.h"
#include "cuda/sums.h"
#include "cuda/vector.h"

namespace plantune {

constexpr int kStepThreads = 256, kStepEach = 8;
constexpr int kStepChunk = kStepThreads * kStepEach;
constexpr int kGroupNumbers = 12;
enum class Rule { kSgd, kAdam, kLamb };

struct Partial {
  float squares;
  float finite;  // 0 or 1
};

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

struct Item {
  void* parameter;
  unsigned long long start;
  unsigned count, group;
};

/// Chunk `first` of an item.
struct Chunk {
  unsigned item, first;
};

__device__ __forceinline__ float sum_of_block(float value) {
  __shared__ float sums[kStepThreads / 32];
  value = sum_of_warp(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kStepThreads / 32; ++warp) sum += sums[warp];
  return sum;
}

__device__ __forceinline__ float inverse_of(const float* scale) {
  return scale == nullptr ? 1.f : float(1.0 / double(*scale));
}

template <typename T>
struct Measure {
  struct Arguments {
    const T* gradients;
    Partial* partial;
    long long count;
    const float* scale;  // null for none
  };

  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const long long stride = (long long)(gridDim.x) * kStepThreads;
    const float inverse = inverse_of(a.scale);
    float squares = 0, infinite = 0;
    for (long long i = blockIdx.x * (long long)(kStepThreads) + threadIdx.x; i < a.count;
         i += stride) {
      const float g = to_float(a.gradients[i]), unscaled = g * inverse;
      squares += unscaled * unscaled;
      infinite += isfinite(g) ? 0.f : 1.f;
    }
    squares = sum_of_block(squares);
    infinite = sum_of_block(infinite);
    if (threadIdx.x == 0) a.partial[blockIdx.x] = {squares, infinite == 0 ? 1.f : 0.f};
  }
};

struct Advance {
  struct Arguments {
    const Partial* partial;
    long long partials;
    const Settings* settings;
    float* scale;  // null for none
    int* growth;
    float* steps;
    const unsigned char* present;  // of each item, whether it has a gradient
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
    const float norm = sqrtf(squares);
    const bool skip = a.scale != nullptr && infinite != 0;
    if (!skip) {
      for (long long i = threadIdx.x; i < a.items; i += kStepThreads) {
        if (a.present[i]) a.steps[i] += 1.f;
      }
    }
    __syncthreads();  // all threads have read the scale
    if (threadIdx.x != 0) return;
    const Settings s = *a.settings;
    float clip = 1;
    if (s.max_norm > 0) {
      clip = float(s.max_norm) / (norm + 1e-6f);
      clip = clip > 1.f ? 1.f : clip;  // NaN stays
    }
    *a.status = {norm, inverse * clip, skip ? 1.f : 0.f, 0.f};
    if (a.scale == nullptr) return;
    // As torch's GradScaler.
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
};

/// The numbers of a group, by their places in its row.
struct Group {
  enum Place { kRate, kFirst, kSecond, kEps, kDecay, kFlags };
  enum Flag { kDecoupled = 1, kLargest = 2, kMaximize = 4, kNesterov = 8, kCorrects = 16 };
};

/// What all elements of a parameter share in one step.
struct Shared {
  float rate, decay, eps, first, rest, second, rest_of_second, root;
  int flags;
  bool is_first;
};

template <typename T, Rule kRule>
struct Update {
  struct Arguments {
    const Item* items;
    const Chunk* chunks;
    const double* numbers;
    const float* steps;
    const unsigned char* present;
    const Status* status;
    T* gradients;
    T* state[3];
    Partial* norms;  // of LAMB: squares of parameter and direction of each chunk, as two floats
  };

  static __device__ __forceinline__ Shared shared_by(const double* n, float step) {
    Shared s;
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
    s.root = float(sqrt(of_second));
    s.decay = float(n[Group::kDecay]);
    if (kRule == Rule::kAdam && s.flags & Group::kDecoupled) {
      s.decay = float(1.0 - n[Group::kRate] * n[Group::kDecay]);
    }
    s.rate = float(kRule == Rule::kAdam ? n[Group::kRate] / of_first : n[Group::kRate]);
    if (kRule == Rule::kLamb) s.rest_of_second = float(1.0 - n[Group::kSecond]);
    if (kRule == Rule::kLamb) s.rate = float(1.0 / of_first);
    return s;
  }

  /// SGD: first is the momentum, second what of a gradient is dampened.
  static __device__ __forceinline__ float sgd(const Arguments& a, const Shared& s,
                                              unsigned long long at, float p, float g) {
    if (s.decay != 0) g += s.decay * p;
    if (s.first != 0) {
      const float before = to_float(a.state[0][at]);
      const float moved = s.is_first ? g : s.first * before + s.rest_of_second * g;
      a.state[0][at] = from_float<T>(moved);
      g = s.flags & Group::kNesterov ? g + s.first * moved : moved;
    }
    return p - s.rate * g;
  }

  static __device__ __forceinline__ void moments(const Arguments& a, const Shared& s,
                                                 unsigned long long at, float g, float& m,
                                                 float& v) {
    m = to_float(a.state[0][at]);
    v = to_float(a.state[1][at]);
    m += s.rest * (g - m);
    v = s.second * v + s.rest_of_second * g * g;
    a.state[0][at] = from_float<T>(m);
    a.state[1][at] = from_float<T>(v);
  }

  static __device__ __forceinline__ float adam(const Arguments& a, const Shared& s,
                                               unsigned long long at, float p, float g) {
    if (s.flags & Group::kDecoupled) {
      p *= s.decay;
    } else if (s.decay != 0) {
      g += s.decay * p;
    }
    float m, v;
    moments(a, s, at, g, m, v);
    if (s.flags & Group::kLargest) {
      const float largest = fmaxf(to_float(a.state[2][at]), v);
      a.state[2][at] = from_float<T>(largest);
      v = largest;
    }
    return p - s.rate * m / (sqrtf(v) / s.root + s.eps);
  }

  /// The direction of LAMB, left where the gradient was.
  static __device__ __forceinline__ float lamb(const Arguments& a, const Shared& s,
                                               unsigned long long at, float p, float g) {
    float m, v;
    moments(a, s, at, g, m, v);
    return s.rate * m / (sqrtf(v) / s.root + s.eps) + s.decay * p;
  }

  static __device__ __forceinline__ void run(const Arguments& a) {
    __shared__ Shared shared;
    release_successor();
    wait_for_predecessor();
    const Chunk chunk = a.chunks[blockIdx.x];
    const Status status = *a.status;
    if (status.found_inf != 0 || !a.present[chunk.item]) return;
    const Item item = a.items[chunk.item];
    if (threadIdx.x == 0) {
      shared = shared_by(a.numbers + item.group * kGroupNumbers, a.steps[chunk.item]);
    }
    __syncthreads();
    const Shared s = shared;
    const float sign = s.flags & Group::kMaximize ? -status.factor : status.factor;
    T* parameter = static_cast<T*>(item.parameter);
    float of_parameter = 0, of_direction = 0;
#pragma unroll
    for (int k = 0; k < kStepEach; ++k) {
      const unsigned i = chunk.first * kStepChunk + k * kStepThreads + threadIdx.x;
      if (i >= item.count) continue;
      const unsigned long long at = item.start + i;
      const float p = to_float(parameter[i]), g = sign * to_float(a.gradients[at]);
      if constexpr (kRule == Rule::kLamb) {
        const float direction = lamb(a, s, at, p, g);
        a.gradients[at] = from_float<T>(direction);
        of_parameter += p * p;
        of_direction += direction * direction;
      } else {
        parameter[i] = from_float<T>(kRule == Rule::kSgd ? sgd(a, s, at, p, g)
                                                         : adam(a, s, at, p, g));
      }
    }
    if constexpr (kRule == Rule::kLamb) {
      of_parameter = sum_of_block(of_parameter);
      of_direction = sum_of_block(of_direction);
      if (threadIdx.x == 0) a.norms[blockIdx.x] = {of_parameter, of_direction};
    }
  }
};

/// The end of a step of LAMB: along the direction, as far as both norms say.
template <typename T>
struct Trust {
  using Arguments = typename Update<T, Rule::kLamb>::Arguments;

  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const Chunk chunk = a.chunks[blockIdx.x];
    const Status status = *a.status;
    if (status.found_inf != 0 || !a.present[chunk.item]) return;
    const Item item = a.items[chunk.item];
    const unsigned chunks = (item.count + kStepChunk - 1) / kStepChunk;
    const Partial* norms = a.norms + (blockIdx.x - chunk.first);
    float of_parameter = 0, of_direction = 0;
    for (unsigned i = threadIdx.x; i < chunks; i += kStepThreads) {
      of_parameter += norms[i].squares;
      of_direction += norms[i].finite;
    }
    of_parameter = sqrtf(sum_of_block(of_parameter));
    of_direction = sqrtf(sum_of_block(of_direction));
    const bool both = of_parameter > 0 && of_direction > 0;
    const float rate = float(a.numbers[item.group * kGroupNumbers + Group::kRate]) *
                       (both ? of_parameter / of_direction : 1.f);
    T* parameter = static_cast<T*>(item.parameter);
#pragma unroll
    for (int k = 0; k < kStepEach; ++k) {
      const unsigned i = chunk.first * kStepChunk + k * kStepThreads + threadIdx.x;
      if (i >= item.count) continue;
      const float p = to_float(parameter[i]), d = to_float(a.gradients[item.start + i]);
      parameter[i] = from_float<T>(p - rate * d);
    }
  }
};

}  // namespace plantune
