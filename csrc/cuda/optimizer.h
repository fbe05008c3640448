// A step of an optimizer over gradients that stay where a backward pass left them.
//
//   measure   partial[b] = (the sum of squares, whether all are finite) of some chunks of gradients
//   advance   status, steps, scale, growth, and what all elements of a parameter share: one block
//   update    parameters and state, one chunk of one parameter a block; without `measure`, which
//             only clipping and a loss scale need, it leaves the sums of squares of its chunks
//
// Parameters and gradients are dense and in memory of their own, in one order; a parameter's state
// is in that order too, from element `start` of its buffers on. T is float, __half or
// __nv_bfloat16; everything is computed in float and rounded once, what follows from a step's
// number in double. Every number that a user may change is read from memory. Deterministic: sums
// are taken in a fixed order.

#pragma once

#include "cuda/optimizer_numbers.h"

namespace plantune {

template <typename T, Rule kRule>
struct Update {
  struct Arguments {
    const Chunk* chunks;
    const T* const* gradients;
    const Shared* shared;
    const double* numbers;
    const unsigned* groups;
    const Status* status;
    T* state[3];
    Partial* partial;  // of each chunk, null where the gradients were measured
    T* directions;     // of LAMB, from `start` on
    Partial* norms;    // of LAMB: squares of parameter and direction of each chunk, as two floats
  };
  using Values = float[kStepEach];

  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    const Chunk chunk = a.chunks[blockIdx.x];  // it stays as it is
    wait_for_predecessor();
    const Status status = *a.status;
    const T* gradient = a.gradients[chunk.item];
    if (status.found_inf != 0 || gradient == nullptr) {
      if (a.partial != nullptr && threadIdx.x == 0) a.partial[blockIdx.x] = {0.f, 1.f};
      return;
    }
    if (is_whole(chunk, gradient + chunk.first)) {
      run<true>(a, chunk, gradient + chunk.first, status.factor);
    } else {
      run<false>(a, chunk, gradient + chunk.first, status.factor);
    }
  }

 private:
  template <bool kWhole>
  static __device__ __forceinline__ void run(const Arguments& a, const Chunk& chunk,
                                             const T* gradient, float factor) {
    T* parameter = static_cast<T*>(chunk.parameter);
    Share<T> p, g, kept[2];
    p.template load<kWhole>(parameter, chunk.count);
    g.template load<kWhole>(gradient, chunk.count);
    const Shared s = a.shared[chunk.item];
    if constexpr (kRule != Rule::kSgd) {
      kept[0].template load<kWhole>(a.state[0] + chunk.start, chunk.count);
      kept[1].template load<kWhole>(a.state[1] + chunk.start, chunk.count);
    } else if (s.first != 0) {
      kept[0].template load<kWhole>(a.state[0] + chunk.start, chunk.count);
    }
    const float sign = s.flags & Group::kMaximize ? -factor : factor;
    float squares = 0;
    Values signed_g;
#pragma unroll
    for (int i = 0; i < kStepEach; ++i) {
      signed_g[i] = sign * g[i];
      squares += signed_g[i] * signed_g[i];
    }
    if constexpr (kRule == Rule::kSgd) {
      sgd<kWhole>(a, chunk, s, p, signed_g, kept[0]);
    } else {
      adaptive<kWhole>(a, chunk, s, p, signed_g, kept);
    }
    if (a.partial == nullptr) return;
    squares = sum_of_block(squares);
    if (threadIdx.x == 0) a.partial[blockIdx.x] = {squares, 1.f};
  }

  /// first is the momentum, rest_of_second what of a gradient is not dampened.
  template <bool kWhole>
  static __device__ __forceinline__ void sgd(const Arguments& a, const Chunk& chunk,
                                             const Shared& s, const Share<T>& p, Values& g,
                                             const Share<T>& before) {
    Values moved, result;
#pragma unroll
    for (int i = 0; i < kStepEach; ++i) {
      if (s.decay != 0) g[i] += s.decay * p[i];
      moved[i] = g[i];
      if (s.first != 0) {
        if (!s.is_first) moved[i] = s.first * before[i] + s.rest_of_second * g[i];
        g[i] = s.flags & Group::kNesterov ? g[i] + s.first * moved[i] : moved[i];
      }
      result[i] = p[i] - s.rate * g[i];
    }
    if (s.first != 0) {
      Share<T>::template store<kWhole>(a.state[0] + chunk.start, chunk.count, moved);
    }
    Share<T>::template store<kWhole>(static_cast<T*>(chunk.parameter), chunk.count, result);
  }

  /// Adam, and LAMB's direction.
  template <bool kWhole>
  static __device__ __forceinline__ void adaptive(const Arguments& a, const Chunk& chunk,
                                                  const Shared& s, const Share<T>& p, Values& g,
                                                  const Share<T> (&kept)[2]) {
    constexpr bool kAdam = kRule == Rule::kAdam;
    const bool decoupled = kAdam && s.flags & Group::kDecoupled;
    const bool largest = kAdam && s.flags & Group::kLargest;
    Share<T> before;
    if (largest) before.template load<kWhole>(a.state[2] + chunk.start, chunk.count);
    Values m, v, result, most;
    float of_parameter = 0, of_direction = 0;
#pragma unroll
    for (int i = 0; i < kStepEach; ++i) {
      float at = p[i];
      if (decoupled) at *= s.decay;
      if (kAdam && !decoupled && s.decay != 0) g[i] += s.decay * at;
      m[i] = kept[0][i] + s.rest * (g[i] - kept[0][i]);
      v[i] = s.second * kept[1][i] + s.rest_of_second * g[i] * g[i];
      most[i] = largest ? fmaxf(before[i], v[i]) : v[i];
      const float way = s.rate * m[i] / (sqrtf(most[i]) * s.of_root + s.eps);
      result[i] = kAdam ? at - way : way + s.decay * at;
      of_parameter += at * at;
      of_direction += result[i] * result[i];
    }
    Share<T>::template store<kWhole>(a.state[0] + chunk.start, chunk.count, m);
    Share<T>::template store<kWhole>(a.state[1] + chunk.start, chunk.count, v);
    if (largest) Share<T>::template store<kWhole>(a.state[2] + chunk.start, chunk.count, most);
    if constexpr (kAdam) {
      Share<T>::template store<kWhole>(static_cast<T*>(chunk.parameter), chunk.count, result);
    } else {
      Share<T>::template store<kWhole>(a.directions + chunk.start, chunk.count, result);
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
    const Chunk chunk = a.chunks[blockIdx.x];
    wait_for_predecessor();
    const Status status = *a.status;
    if (status.found_inf != 0 || a.gradients[chunk.item] == nullptr) return;
    const Partial* norms = a.norms + (blockIdx.x - chunk.first / kStepChunk);
    float of_parameter = 0, of_direction = 0;
    for (unsigned i = threadIdx.x; i < chunk.chunks; i += kStepThreads) {
      of_parameter += norms[i].squares;
      of_direction += norms[i].finite;
    }
    of_parameter = sqrtf(sum_of_block(of_parameter));
    of_direction = sqrtf(sum_of_block(of_direction));
    const bool both = of_parameter > 0 && of_direction > 0;
    const float rate = float(a.numbers[a.groups[chunk.item] * kGroupNumbers + Group::kRate]) *
                       (both ? of_parameter / of_direction : 1.f);
    const T* directions = a.directions + chunk.start;
    if (is_whole(chunk, directions)) {
      move<true>(chunk, directions, rate);
    } else {
      move<false>(chunk, directions, rate);
    }
  }

 private:
  template <bool kWhole>
  static __device__ __forceinline__ void move(const Chunk& chunk, const T* directions, float rate) {
    T* parameter = static_cast<T*>(chunk.parameter);
    Share<T> p, d;
    p.template load<kWhole>(parameter, chunk.count);
    d.template load<kWhole>(directions, chunk.count);
    float moved[kStepEach];
#pragma unroll
    for (int i = 0; i < kStepEach; ++i) moved[i] = p[i] - rate * d[i];
    Share<T>::template store<kWhole>(parameter, chunk.count, moved);
  }
};

}  // namespace plantune
