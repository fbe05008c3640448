// The gradients of a recurrent layer over a sequence, in one launch from the last step to the first:
// what does not depend on the kind of its cell.
//
//   carried = done ? 0 : through + rows W      rows: kGates of each unit, what meets W in a step
//
// As in scan.h a block owns units and samples; it keeps the columns of W that meet its units.
// Deterministic.

#pragma once

#include "cuda/recurrence.h"

namespace plantune {

template <typename T>
struct ScanGradArguments {
  const T* gates;     // T x N x kGates H, what the inputs add
  const T* of_state;  // T x N x kGates H: W before + b
  const T* weight;
  T* rows;  // T x N x kGates H  =  what meets W; with `before`, the gradient of W
  ScanFrame frame;
};

template <typename Sizes, int kGates>
struct ScanGrad : Recurrence<Sizes> {
  using Base = Recurrence<Sizes>;
  using typename Base::Mma;
  using typename Base::T;
  using Base::kColumns, Base::kEach, Base::kHidden, Base::kPer, Base::kProduct, Base::kProducts;
  using Base::kSamples, Base::kStride, Base::kUnits, Base::kWarps, Base::tag, Base::turn;
  using Base::words;
  static constexpr int kTiles = kUnits / 16;
  static constexpr int kSums = kWarps * kUnits * kStride;  // of one step; two take turns
  static constexpr int kSharedBytes = 2 * kSums * 4;
  // Gates in a word, and words of a product and column: for both halves of a lane's values.
  static constexpr int kOfWord = kGates == 3 ? 3 : 2, kEachHalf = kGates / kOfWord;
  static constexpr int kOfColumn = 2 * kEachHalf;
  static constexpr int kWords = kHidden / kProduct * kColumns * kOfColumn * 32;
  static constexpr int kAtOnce = part_of(kProducts, 16 / (kColumns * kOfColumn));

  static_assert(kUnits % 16 == 0, "tiles have 16 rows");

  typename Mma::A weights[kTiles][kProducts][kGates];
  float carried[kEach];
  bool stops[kEach];  // an episode begins with the step: nothing is carried on
  __device__ __forceinline__ void load(const ScanGradArguments<T>& a) {
    Base::join(a.frame, kWords);
    const int k0 = Base::warp() * kProducts * kProduct;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          weights[tile][p][gate] = Mma::load([&](int row, int k) {
            const size_t from = gate * kHidden + k0 + p * kProduct + k;
            return a.weight[from * kHidden + Base::first_unit() + tile * 16 + row];
          });
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) carried[j] = 0.f;
  }

  /// The thread's gates of a step, of the inputs and of the state.
  __device__ __forceinline__ void read_gates(
      const ScanGradArguments<T>& a, int step, int j, float (&of_x)[kGates],
      float (&of_state)[kGates]) const {
    const size_t row = Base::place(a.frame, step, j, kGates * kHidden);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const bool there = Base::has(a.frame, j);
      of_x[gate] = there ? to_float(a.gates[row + gate * kHidden]) : 0.f;
      of_state[gate] = there ? to_float(a.of_state[row + gate * kHidden]) : 0.f;
    }
  }

  /// What meets W, to memory and to all blocks of these samples.
  __device__ __forceinline__ void publish(
      const ScanGradArguments<T>& a, int step, int round, int j, const float (&rows)[kGates]) {
    const int sample = Base::sample(j), unit = Base::first_unit() + Base::unit();
    if (Base::has(a.frame, j)) {
      const size_t at = Base::place(a.frame, step, j, kGates * kHidden);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        a.rows[at + gate * kHidden] = from_float<T>(rows[gate]);
      }
    }
    unsigned int values[4] = {};
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) values[gate] = Mma::neighbours(rows[gate]);
    if (unit % kPer) return;
    const int half = unit / kPer % 2, product = Base::product(unit, sample);
    uint4* to = words + (round & 1) * turn + Base::reader(unit, sample) +
                (product * kOfColumn + half * kEachHalf) * 32;
    if constexpr (kGates == 3) {
      store_state(to, {values[0], values[1], values[2], tag + round});
    } else {
      store_state(to, {values[0], values[1], 0, tag + round});
      store_state(to + 32, {values[2], values[3], 0, tag + round});
    }
  }

  /// rows W, by each warp's share of the units that rows are of.
  __device__ __forceinline__ void multiply(int round, float* made) {
    const uint4* from = words + (round & 1) * turn + Base::lane() +
                        Base::warp() * kProducts * kColumns * kOfColumn * 32;
    float c[kTiles][kColumns][4] = {};
#pragma unroll
    for (int first = 0; first < kProducts; first += kAtOnce) {
      uint4 rows[kAtOnce * kColumns * kOfColumn];
      wait_for(rows, from + first * kColumns * kOfColumn * 32, tag + round);
      float part[kTiles][kColumns][4] = {};
      float(&to)[kTiles][kColumns][4] = kPer == 1 ? part : c;
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          const uint4* low = rows + (p * kColumns + column) * kOfColumn;
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            multiply(to[tile][column], weights[tile][first + p], low);
          }
        }
      }
      if (kPer == 1) add(c, part);
    }
    float* own = made + Base::warp() * kUnits * kStride;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        Base::keep(own, tile * 16, column, c[tile][column]);
      }
    }
  }

  /// The instruction cuts its sums off, which float32 would show: those of few products lose less.
  static __device__ __forceinline__ void add(
      float (&c)[kTiles][kColumns][4], const float (&part)[kTiles][kColumns][4]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) c[tile][column][i] += part[tile][column][i];
      }
    }
  }

  static __device__ __forceinline__ void multiply(
      float (&c)[4], const typename Mma::A (&weights)[kGates], const uint4* low) {
    const uint4* high = low + kEachHalf;
    Mma::multiply(c, weights[0], {low[0].x, high[0].x});
    Mma::multiply(c, weights[1], {low[0].y, high[0].y});
    if constexpr (kGates == 3) {
      Mma::multiply(c, weights[2], {low[0].z, high[0].z});
    } else {
      Mma::multiply(c, weights[2], {low[1].x, high[1].x});
      Mma::multiply(c, weights[3], {low[1].y, high[1].y});
    }
  }

  __device__ __forceinline__ void carry(const float* made) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const float sum = Base::template sum_of<kUnits>(made, Base::unit(), Base::sample(j));
      carried[j] = stops[j] ? 0.f : carried[j] + sum;
    }
  }

  /// What is carried at last, N x H.
  __device__ __forceinline__ void store(
      const ScanFrame& a, const float (&values)[kEach], T* to) const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (Base::has(a, j)) to[Base::place(a, 0, j)] = from_float<T>(values[j]);
    }
  }
};

/// All steps of a layer, the last one first. Kernel is a kind of ScanGrad that reads, advances and
/// stores.
template <typename Kernel>
__device__ __forceinline__ void run_scan_grad(const typename Kernel::Arguments& a) {
  extern __shared__ __align__(16) float sums[];
  const int steps = a.scan.frame.steps;
  Kernel scan;
  scan.load(a.scan);
  scan.read(a, steps - 1);
  for (int round = 0; round < steps; ++round) {
    const int step = steps - 1 - round;
    float* made = sums + (round & 1) * Kernel::kSums;
#pragma unroll
    for (int j = 0; j < Kernel::kEach; ++j) scan.advance(a, step, round, j);
    if (step > 0) scan.read(a, step - 1);
    scan.multiply(round, made);
    __syncthreads();
    scan.carry(made);
  }
  scan.finish(a);
}

}  // namespace plantune
