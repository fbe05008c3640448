// The states and cells of an LSTM over a sequence, in one launch (scan.h).
//
//   enters, stays, leaves = sigmoid(gates + of_state);  fresh = tanh(gates + of_state)
//   cell = stays * (done ? 0 : cell) + enters * fresh           gates: enters, stays, fresh, leaves
//   state = leaves * tanh(cell)
//   y, cells T x N x H  =  the states and cells; the first begins with `state` and `cell` N x H

#pragma once

#include "cuda/scan.h"

namespace plantune {

template <typename T>
struct LstmScanArguments {
  ScanArguments<T> scan;
  const T* cell;
  T* y;
  T* cells;
};

template <typename Sizes>
struct LstmScan : Scan<Sizes, 4> {
  using Base = Scan<Sizes, 4>;
  using typename Base::T;
  using Base::kEach, Base::of_x;
  using Arguments = LstmScanArguments<T>;

  float cell_before[kEach];

  static __device__ void run(const Arguments& a) { run_scan<LstmScan>(a); }

  __device__ __forceinline__ void begin(const Arguments& a, int j) {
    const ScanFrame& frame = a.scan.frame;
    start(a, 0, j, Base::read(frame, a.scan.state, 0, j), Base::read(frame, a.cell, 0, j));
  }

  /// The state and cell that a step begins with.
  __device__ __forceinline__ void start(
      const Arguments& a, int step, int j, float state, float cell) {
    const bool begins = Base::begins(a.scan.frame, step, j);
    cell_before[j] = begins ? 0.f : cell;
    if (step > 0) Base::publish(step, j, begins ? 0.f : state);
  }

  __device__ __forceinline__ void advance(
      const Arguments& a, int step, int j, const float* made) {
    const ScanFrame& frame = a.scan.frame;
    float sums[4];
    Base::sum(made, j, sums);
#pragma unroll
    for (int gate = 0; gate < 4; ++gate) sums[gate] += of_x[j][gate];
    const float kept = sigmoid_of(sums[1]) * cell_before[j];
    const float cell = kept + sigmoid_of(sums[0]) * tanhf(sums[2]);
    const float state = sigmoid_of(sums[3]) * tanhf(cell);
    if (step + 1 < frame.steps) start(a, step + 1, j, state, cell);
    if (!Base::has(frame, j)) return;
    const size_t at = Base::place(frame, step, j);
    a.y[at] = from_float<T>(state);
    a.cells[at] = from_float<T>(cell);
  }
};

}  // namespace plantune
