// The gradients of an LSTM over a sequence (lstm_scan.h), in one launch (scan_grad.h).
//
//   dstate = dy + carried
//   dcell = dcells + carried cell + dstate leaves (1 - tanh(cell)^2)
//   rows = dcell fresh enters (1 - enters), dcell before stays (1 - stays),
//          dcell enters (1 - fresh^2), dstate tanh(cell) leaves (1 - leaves)  =
//   carried cell = done ? 0 : dcell stays;  through = 0
//   dstate, dcell of the sequence's first state and cell: what is carried at last  =
//
//   cell_before T x N x H: the cells that steps begin with, zeros where done holds

#pragma once

#include "cuda/scan_grad.h"

namespace plantune {

template <typename T>
struct LstmScanGradArguments {
  ScanGradArguments<T> scan;
  const T* dy;
  const T* dcells;
  const T* cells;
  const T* cell_before;
  T* dstate;
  T* dcell;
};

template <typename Sizes>
struct LstmScanGrad : ScanGrad<Sizes, 4> {
  using Base = ScanGrad<Sizes, 4>;
  using typename Base::T;
  using Base::carried, Base::kEach, Base::stops;
  using Arguments = LstmScanGradArguments<T>;

  float dy[kEach], dcells[kEach], through[kEach], of_leaves[kEach], of_cell[kEach][3], stays[kEach];
  float carried_cell[kEach] = {};
  bool begins[kEach];

  static __device__ void run(const Arguments& a) { run_scan_grad<LstmScanGrad>(a); }

  /// What a step's gradients follow from, but for those of its state and cell.
  __device__ __forceinline__ void read(const Arguments& a, int step) {
    const ScanFrame& frame = a.scan.frame;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      float sums[4], of_state[4];
      Base::read_gates(a.scan, step, j, sums, of_state);
#pragma unroll
      for (int gate = 0; gate < 4; ++gate) sums[gate] += of_state[gate];
      dy[j] = Base::read(frame, a.dy, step, j);
      dcells[j] = Base::read(frame, a.dcells, step, j);
      const float shown = tanhf(Base::read(frame, a.cells, step, j));
      const float before = Base::read(frame, a.cell_before, step, j);
      begins[j] = Base::begins(frame, step, j);
      const float enters = sigmoid_of(sums[0]), fresh = tanhf(sums[2]);
      const float leaves = sigmoid_of(sums[3]);
      stays[j] = sigmoid_of(sums[1]);
      of_cell[j][0] = fresh * enters * (1.f - enters);
      of_cell[j][1] = before * stays[j] * (1.f - stays[j]);
      of_cell[j][2] = enters * (1.f - fresh * fresh);
      of_leaves[j] = shown * leaves * (1.f - leaves);
      through[j] = leaves * (1.f - shown * shown);
    }
  }

  __device__ __forceinline__ void advance(const Arguments& a, int step, int round, int j) {
    const float dstate = dy[j] + carried[j];
    const float dcell = dcells[j] + carried_cell[j] + dstate * through[j];
    carried[j] = 0.f;
    carried_cell[j] = begins[j] ? 0.f : dcell * stays[j];
    stops[j] = begins[j];
    Base::publish(a.scan, step, round, j, {of_cell[j][0] * dcell, of_cell[j][1] * dcell,
                                           of_cell[j][2] * dcell, of_leaves[j] * dstate});
  }

  __device__ __forceinline__ void finish(const Arguments& a) const {
    Base::store(a.scan.frame, carried, a.dstate);
    Base::store(a.scan.frame, carried_cell, a.dcell);
  }
};

}  // namespace plantune
