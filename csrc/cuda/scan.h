// A recurrent layer over a sequence, in one launch: what does not depend on the kind of its cell.
//
//   of_state = W (done ? 0 : state) + b        kGates of each unit
//
// A block owns units and samples (recurrence.h); it keeps the rows of W that make its units' gates
// in registers for the whole sequence. Only blocks of the same samples wait for each other: the
// launch is cooperative, unless there is one step alone, whose state is in memory. Sums are float,
// in a fixed order: deterministic.

#pragma once

#include "cuda/recurrence.h"

namespace plantune {

template <typename T>
struct ScanArguments {
  const T* gates;   // T x N x kGates H, what the inputs add
  const T* state;   // N x H, before the first step
  const T* weight;  // kGates H x H
  const T* bias;
  ScanFrame frame;
};

template <typename Sizes, int kGates>
struct Scan : Recurrence<Sizes> {
  using Base = Recurrence<Sizes>;
  using typename Base::Mma;
  using typename Base::T;
  using Base::kColumns, Base::kEach, Base::kHidden, Base::kPer, Base::kProduct, Base::kProducts;
  using Base::kSamples, Base::kStride, Base::kUnits, Base::kWarps, Base::tag, Base::turn;
  using Base::words;
  static constexpr int kRows = kGates * kUnits, kTiles = kRows / 16;
  static constexpr int kSums = kWarps * kRows * kStride;  // of one step; two take turns
  static constexpr int kSharedBytes = 2 * kSums * 4;
  // Words of a block's samples in one step: products, columns, lanes.
  static constexpr int kWords = kHidden / kProduct * kColumns * 32;
  static constexpr int kAtOnce = part_of(kProducts, 16 / kColumns);  // products whose words are read

  static_assert(kRows % 16 == 0, "tiles have 16 rows");

  typename Mma::A weights[kTiles][kProducts];
  float bias[kGates], of_x[kEach][kGates];
  __device__ __forceinline__ void load(const ScanArguments<T>& a) {
    Base::join(a.frame, kWords);
    const int k0 = Base::warp() * kProducts * kProduct;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        weights[tile][p] = Mma::load([&](int row, int k) {
          const int at = tile * 16 + row;
          const size_t gate = at / kUnits * kHidden + Base::first_unit() + at % kUnits;
          return a.weight[gate * kHidden + k0 + p * kProduct + k];
        });
      }
    }
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      bias[gate] = to_float(a.bias[gate * kHidden + Base::first_unit() + Base::unit()]);
    }
  }

  __device__ __forceinline__ void read_gates(const ScanArguments<T>& a, int step) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const T* from = a.gates + Base::place(a.frame, step, j, kGates * kHidden);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        of_x[j][gate] = Base::has(a.frame, j) ? to_float(from[gate * kHidden]) : 0.f;
      }
    }
  }

  /// The state that a step begins with, to all blocks of these samples.
  __device__ __forceinline__ void publish(int step, int j, float state) {
    const int sample = Base::sample(j), unit = Base::first_unit() + Base::unit();
    const unsigned int own = Mma::neighbours(state);
    const unsigned int next = __shfl_down_sync(~0u, own, kPer);
    if (unit % (2 * kPer)) return;
    const int at = Base::product(unit, sample) * 32 + Base::reader(unit, sample);
    store_state(words + (step & 1) * turn + at, {own, next, 0, tag + step});
  }

  /// What the state adds to the gates, by each warp's share of its units.
  __device__ __forceinline__ void multiply(const ScanArguments<T>& a, int step, float* made) {
    const uint4* from = words + (step & 1) * turn + Base::lane() +
                        Base::warp() * kProducts * kColumns * 32;
    float c[kTiles][kColumns][4] = {};
#pragma unroll
    for (int first = 0; first < kProducts; first += kAtOnce) {
      uint4 state[kAtOnce * kColumns];
      if (step == 0) {
        read_first(a, first, state);
      } else {
        wait_for(state, from + first * kColumns * 32, tag + step);
      }
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          const uint4 word = state[p * kColumns + column];
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            Mma::multiply(c[tile][column], weights[tile][first + p], {word.x, word.y});
          }
        }
      }
    }
    float* own = made + Base::warp() * kRows * kStride;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        Base::keep(own, tile * 16, column, c[tile][column]);
      }
    }
  }

  /// The words of products from `first` on, of the state before the first step.
  __device__ __forceinline__ void read_first(
      const ScanArguments<T>& a, int first, uint4 (&state)[kAtOnce * kColumns]) const {
    const int unit = (Base::warp() * kProducts + first) * kProduct + Base::lane() % 4 * 2 * kPer;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const int sample = Base::first_sample + column * 8 + Base::lane() / 4;
      const bool there = sample < a.frame.samples && !(a.frame.done && a.frame.done[sample]);
      const T* from = a.state + size_t(there ? sample : 0) * kHidden + unit;
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
        const unsigned int low = Mma::read(from + p * kProduct);
        const unsigned int high = Mma::read(from + p * kProduct + kPer);
        state[p * kColumns + column] = there ? uint4{low, high, 0, 0} : uint4{};
      }
    }
  }

  /// What the state adds to the gates of the thread's result `j`.
  __device__ __forceinline__ void sum(const float* made, int j, float (&of_state)[kGates]) const {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const int row = gate * kUnits + Base::unit();
      of_state[gate] = Base::template sum_of<kRows>(made, row, Base::sample(j)) + bias[gate];
    }
  }
};

/// All steps of a layer. Kernel is a kind of Scan that begins and advances.
template <typename Kernel>
__device__ __forceinline__ void run_scan(const typename Kernel::Arguments& a) {
  extern __shared__ __align__(16) float sums[];
  Kernel scan;
  scan.load(a.scan);
#pragma unroll
  for (int j = 0; j < Kernel::kEach; ++j) scan.begin(a, j);
  for (int step = 0; step < a.scan.frame.steps; ++step) {
    scan.read_gates(a.scan, step);
    float* made = sums + (step & 1) * Kernel::kSums;
    scan.multiply(a.scan, step, made);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < Kernel::kEach; ++j) scan.advance(a, step, j, made);
  }
}

}  // namespace plantune
