// The gradients of a GRU over a sequence (gru_scan.h), in one launch (scan_grad.h).
//
//   dstate = dy + carried
//   dfresh = dstate (1 - update) (1 - fresh^2)
//   dupdate = dstate (before - fresh) update (1 - update)
//   dreset = dfresh new reset (1 - reset)           new: of_state's last third
//   dgates = dreset, dupdate, dfresh             =
//   rows = dreset, dupdate, dfresh reset         =
//   through = dstate update
//   dstate of the sequence's first state: what is carried at last  =
//
//   before T x N x H: the states that steps begin with, zeros where done holds

#pragma once

#include "cuda/scan_grad.h"

namespace plantune {

template <typename T>
struct GruScanGradArguments {
  ScanGradArguments<T> scan;
  const T* dy;
  const T* before;
  T* dgates;
  T* dstate;
};

template <typename Sizes>
struct GruScanGrad : ScanGrad<Sizes, 3> {
  using Base = ScanGrad<Sizes, 3>;
  using typename Base::T;
  using Base::carried, Base::kEach, Base::kHidden, Base::stops;
  using Arguments = GruScanGradArguments<T>;

  float dy[kEach], of_reset[kEach], of_update[kEach], of_fresh[kEach], reset[kEach], update[kEach];
  bool begins[kEach];

  static __device__ void run(const Arguments& a) { run_scan_grad<GruScanGrad>(a); }

  /// What a step's gradients follow from, but for those of its state.
  __device__ __forceinline__ void read(const Arguments& a, int step) {
    const ScanFrame& frame = a.scan.frame;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      float of_x[3], of_state[3];
      Base::read_gates(a.scan, step, j, of_x, of_state);
      const float before = Base::read(frame, a.before, step, j);
      dy[j] = Base::read(frame, a.dy, step, j);
      begins[j] = Base::begins(frame, step, j);
      reset[j] = sigmoid_of(of_x[0] + of_state[0]);
      update[j] = sigmoid_of(of_x[1] + of_state[1]);
      const float fresh = tanhf(of_x[2] + reset[j] * of_state[2]);
      of_fresh[j] = (1.f - update[j]) * (1.f - fresh * fresh);
      of_update[j] = (before - fresh) * update[j] * (1.f - update[j]);
      of_reset[j] = of_fresh[j] * of_state[2] * reset[j] * (1.f - reset[j]);
    }
  }

  __device__ __forceinline__ void advance(const Arguments& a, int step, int round, int j) {
    const float dstate = dy[j] + carried[j];
    const float dgates[3] = {of_reset[j] * dstate, of_update[j] * dstate, of_fresh[j] * dstate};
    carried[j] = dstate * update[j];
    stops[j] = begins[j];
    Base::publish(a.scan, step, round, j, {dgates[0], dgates[1], dgates[2] * reset[j]});
    if (!Base::has(a.scan.frame, j)) return;
    const size_t at = Base::place(a.scan.frame, step, j, 3 * kHidden);
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      a.dgates[at + gate * kHidden] = from_float<T>(dgates[gate]);
    }
  }

  __device__ __forceinline__ void finish(const Arguments& a) const {
    Base::store(a.scan.frame, carried, a.dstate);
  }
};

}  // namespace plantune
