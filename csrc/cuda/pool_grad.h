// The gradient of average and max pooling, and a chain of pointwise ops that it goes through.
//
//   dy      (N, kOutHeight, kOutWidth, kChannels) or (N, kChannels, kOutHeight, kOutWidth)
//   places  like dy: the row * kWidth + column that won each window, of kTaps the row * kColumns +
//           column within the window; of a max pool alone
//   in      what else the chain reads, as `pointwise.h` says; out (N, kHeight, kWidth, kChannels) =
//           in the same order of axes, what leaves of the chain
//   totals  = the sums of what else the chain makes, one value each
//
// dy, each of `in`, each of `out` and each total have an element type of their own.
//
// Each element of the gradient gathers from the windows that it is in, in float and in a fixed
// order, and goes through the chain before it is rounded. Blocks leave parts of the totals, which
// `add` adds in a fixed order: deterministic.

#pragma once

#include "cuda/launch.h"
#include "cuda/pointwise.h"
#include "cuda/pool_window.h"
#include "cuda/sums.h"

namespace plantune {

/// A thread makes kVector channels of some pixels; the chain's input kGathered is the gradient, its
/// last kTotals outputs are added.
template <typename Window, typename Chain>
struct PoolGrad : PoolWindow<Window> {
  using Base = PoolWindow<Window>;
  using Pointwise = plantune::Pointwise<Chain>;
  using Read = typename Pointwise::Read;
  using typename Base::Index, typename Base::Mark, typename Base::Marks, typename Base::T;
  using typename Base::Word;
  using Base::kVector, Base::kMax, Base::kTaps, Base::kRows, Base::kColumns;
  using Base::kOutHeight, Base::kOutWidth;
  static constexpr int kInputs = Chain::kInputs, kTotals = Chain::kTotals;
  static constexpr int kStored = Chain::kOutputs - kTotals, kWarps = Window::kThreads / 32;
  // A thread makes as many pixels of a row as windows are apart: which of them a window covers is
  // known when this is compiled.
  static constexpr int kAlong = Base::kColumnStride;
  static constexpr int kUnits = ceil_div(Base::kWidth, kAlong);  // of a row
  // Windows that one pixel may be in, along a column, and those that the pixels of a thread may be
  // in along a row, the first of them before the thread's own place.
  static constexpr int kOverRows = ceil_div(kRows, Base::kRowStride);
  static constexpr int kBefore = ceil_div(kColumns, kAlong) - 1 - Base::kColumnPadding / kAlong;
  static constexpr int kOverColumns = kBefore + 1 + (kAlong - 1 + Base::kColumnPadding) / kAlong;
  static constexpr bool kAtOnce = kOverRows * kOverColumns <= 16;
  static constexpr bool kEqual = !kMax && Base::kCountPadding;  // divisors
  using Unit = typename Base::template Place<Base::kHeight, kUnits>;

  static_assert(Chain::kWidth == kVector, "the chain takes what a thread gathers");

  struct Arguments {
    const void* in[kInputs];
    const Mark* places;
    void* out[Chain::kOutputs];  // the totals at last
    float* parts;                // (totals, blocks)
    long long count;             // of vectors, of so many pixels each
    long long blocks;
  };

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const long long unit = blockIdx.x * (long long)(Window::kThreads) + threadIdx.x;
    float totals[kTotals > 0 ? kTotals : 1] = {};
    if (unit < a.count) make<kAligned>(a, Unit(Index(unit)), totals);
    if constexpr (kTotals > 0) leave_totals(a, totals);
  }

  /// A block adds all parts of one total.
  static __device__ __forceinline__ void add(const Arguments& a) {
    release_successor();
    wait_for_predecessor();
    const float* parts = a.parts + blockIdx.x * a.blocks;
    float sum = 0.f;
#pragma unroll 8
    for (long long i = threadIdx.x; i < a.blocks; i += blockDim.x) sum += parts[i];
    __shared__ float whole[32];
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) whole[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < int(blockDim.x) / 32; ++i) sum += whole[i];
    each<kTotals>([&](auto number) {
      constexpr int t = kStored + decltype(number)::kValue;
      using Total = typename Pointwise::template Output<t>;
      if (t == kStored + int(blockIdx.x)) *static_cast<Total*>(a.out[t]) = from_float<Total>(sum);
    });
  }

 private:
  using Floats = float[kVector];

  template <bool kAligned>
  static __device__ __forceinline__ void make(const Arguments& a, const Unit& at,
                                              float (&totals)[kTotals > 0 ? kTotals : 1]) {
    const Index first = at.first(Base::kHeight * Base::kWidth) +
                        Index(at.row * Base::kWidth + at.column * kAlong) * Base::kPixelStride;
    Read in[kAlong];
#pragma unroll
    for (int k = 0; k < kAlong; ++k) {
      if (at.column * kAlong + k >= Base::kWidth) continue;
      const Index i = first + k * Base::kPixelStride;
      each<kInputs>([&](auto number) {
        constexpr int j = decltype(number)::kValue;
        if constexpr (j != Chain::kGathered) {
          Pointwise::template load<kAligned, j>(a.in[j], i, kVector, in[k]);
        }
      });
    }
    Floats sums[kAlong] = {};
    gather<kAligned>(a, at, sums);
#pragma unroll
    for (int k = 0; k < kAlong; ++k) {
      if constexpr (kEqual) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) sums[k][e] *= 1.f / (kRows * kColumns);
      }
      if (at.column * kAlong + k >= Base::kWidth) continue;
      float made[Chain::kOutputs][kVector];
      evaluate(in[k], sums[k], made);
      const Index i = first + k * Base::kPixelStride;
      each<kStored>([&](auto number) {
        constexpr int j = decltype(number)::kValue;
        Pointwise::template store<j>(a.out[j], i, kVector, made[j]);
      });
#pragma unroll
      for (int t = 0; t < kTotals; ++t) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) totals[t] += made[kStored + t][e];
      }
    }
  }

  static __device__ __forceinline__ void evaluate(const Read& in, const Floats& gathered,
                                                  float (&made)[Chain::kOutputs][kVector]) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      float x[kInputs], y[Chain::kOutputs];
      each<kInputs>([&](auto number) {
        constexpr int k = decltype(number)::kValue;
        if constexpr (k == Chain::kGathered) {
          x[k] = gathered[e];
        } else {
          x[k] = in.template element<k>(e);
        }
      });
      Chain::evaluate(x, y);
#pragma unroll
      for (int j = 0; j < Chain::kOutputs; ++j) made[j][e] = y[j];
    }
  }

  /// Where a window begins, the `d`-th of those along a row, from the thread's first pixel on.
  static __device__ __forceinline__ constexpr int left_of(int d) {
    return (d - kBefore) * kAlong - Base::kColumnPadding;
  }

  /// Whether it covers a pixel of the thread.
  static __device__ __forceinline__ constexpr bool covers(int d, int k) {
    return left_of(d) <= k && k < left_of(d) + kColumns;
  }

  /// Whether it covers any of them.
  static __device__ __forceinline__ constexpr bool reaches(int d) {
    for (int k = 0; k < kAlong; ++k) {
      if (covers(d, k)) return true;
    }
    return false;
  }

  /// A window: its pixel of dy, and whether it is there and reaches the thread's row.
  struct Over {
    int p, q, row;  // `row` is the thread's in the window
    bool there;

    __device__ __forceinline__ Over(const Unit& at, int r, int d) {
      p = (at.row + Base::kRowPadding) / Base::kRowStride - r;
      q = at.column + d - kBefore;
      const int top = p * Base::kRowStride - Base::kRowPadding;
      row = at.row - top;
      there = p >= 0 && p < kOutHeight && q >= 0 && q < kOutWidth && top + kRows > at.row;
    }

    __device__ __forceinline__ Index in(const Unit& at) const {
      return at.first(kOutHeight * kOutWidth) + Index(p * kOutWidth + q) * Base::kPixelStride;
    }
  };

  template <bool kAligned>
  static __device__ __forceinline__ void gather(const Arguments& a, const Unit& at,
                                                Floats (&sums)[kAlong]) {
    constexpr int kWindows = kOverRows * kOverColumns;
    if constexpr (kAtOnce) {
      Word dy[kWindows];
      Marks marks[kWindows];
#pragma unroll
      for (int w = 0; w < kWindows; ++w) load<kAligned>(a, at, w, dy[w], marks[w]);
#pragma unroll
      for (int w = 0; w < kWindows; ++w) add_window(a, at, w, dy[w], marks[w], sums);
    } else {
#pragma unroll 1
      for (int w = 0; w < kWindows; ++w) {
        Word dy;
        Marks marks;
        load<kAligned>(a, at, w, dy, marks);
        add_window(a, at, w, dy, marks, sums);
      }
    }
  }

  template <bool kAligned>
  static __device__ __forceinline__ void load(const Arguments& a, const Unit& at, int w, Word& dy,
                                              Marks& marks) {
    const Over over(at, w / kOverColumns, w % kOverColumns);
    if (!over.there || !reaches(w % kOverColumns)) return;
    const T* from = static_cast<const T*>(a.in[Chain::kGathered]);
    dy.template load<kAligned>(from + over.in(at));
    if constexpr (kMax && kTaps && kAligned) {
      marks = *reinterpret_cast<const Marks*>(a.places + over.in(at));
    } else if constexpr (kMax) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) marks.of[e] = a.places[over.in(at) + e];
    }
  }

  static __device__ __forceinline__ void add_window(const Arguments& a, const Unit& at, int w,
                                                    const Word& dy, const Marks& marks,
                                                    Floats (&sums)[kAlong]) {
    const Over over(at, w / kOverColumns, w % kOverColumns);
    if (!over.there || !reaches(w % kOverColumns)) return;
    // Equal divisors wait for the sum.
    const float part = kMax || kEqual ? 1.f : 1.f / Base::divisor(over.p, over.q);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const float value = kMax ? dy[e] : dy[e] * part;
      // From the row's first place, or the first pixel of the thread, on.
      const int won = !kMax   ? 0
                      : kTaps ? int(marks.of[e]) - over.row * kColumns + left_of(w % kOverColumns)
                              : int(marks.of[e]) - at.row * Base::kWidth - at.column * kAlong;
#pragma unroll
      for (int k = 0; k < kAlong; ++k) {
        const bool own = !kMax || won == k;
        if (covers(w % kOverColumns, k) && own) sums[k][e] += value;
      }
    }
  }

  static __device__ __forceinline__ void leave_totals(
      const Arguments& a, const float (&totals)[kTotals > 0 ? kTotals : 1]) {
    __shared__ float parts[kTotals > 0 ? kTotals : 1][kWarps];
#pragma unroll
    for (int t = 0; t < kTotals; ++t) {
      const float sum = sum_of_warp(totals[t]);
      if (threadIdx.x % 32 == 0) parts[t][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= kTotals) return;
    float sum = parts[threadIdx.x][0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) sum += parts[threadIdx.x][i];
    a.parts[threadIdx.x * a.blocks + blockIdx.x] = sum;
  }
};

}  // namespace plantune
