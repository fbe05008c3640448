// The states of a GRU over a sequence, in one launch (scan.h).
//
//   reset = sigmoid(gates + of_state);  update likewise         gates in this order, the fresh last
//   fresh = tanh(gates + reset * of_state)
//   state = fresh + update * ((done ? 0 : state) - fresh)
//   y T x N x H  =  the states; the first begins with `state` N x H

#pragma once

#include "cuda/scan.h"

namespace plantune {

template <typename T>
struct GruScanArguments {
  ScanArguments<T> scan;
  T* y;
};

template <typename Sizes>
struct GruScan : Scan<Sizes, 3> {
  using Base = Scan<Sizes, 3>;
  using typename Base::T;
  using Base::kEach, Base::of_x;
  using Arguments = GruScanArguments<T>;

  float before[kEach];

  static __device__ void run(const Arguments& a) { run_scan<GruScan>(a); }

  __device__ __forceinline__ void begin(const Arguments& a, int j) {
    start(a, 0, j, Base::read(a.scan.frame, a.scan.state, 0, j));
  }

  /// The state that a step begins with.
  __device__ __forceinline__ void start(const Arguments& a, int step, int j, float state) {
    before[j] = Base::begins(a.scan.frame, step, j) ? 0.f : state;
    if (step > 0) Base::publish(step, j, before[j]);
  }

  __device__ __forceinline__ void advance(
      const Arguments& a, int step, int j, const float* made) {
    const ScanFrame& frame = a.scan.frame;
    float of_state[3];
    Base::sum(made, j, of_state);
    const float reset = sigmoid_of(of_x[j][0] + of_state[0]);
    const float update = sigmoid_of(of_x[j][1] + of_state[1]);
    const float fresh = tanhf(of_x[j][2] + reset * of_state[2]);
    const float state = fresh + update * (before[j] - fresh);
    if (step + 1 < frame.steps) start(a, step + 1, j, state);
    if (Base::has(frame, j)) a.y[Base::place(frame, step, j)] = from_float<T>(state);
  }
};

}  // namespace plantune
