// Images in another layout, nchw to nhwc or back, and their elements in another type.
//
//   out (N, columns, rows) = in (N, rows, columns) turned, both dense
//
// To nhwc the rows are the channels of an image and the columns its pixels, to nchw the other way
// round. Elements of In become those of Out, each rounded once; those that keep their type are moved
// as bits: unsigned integers of their size. Written by `=`. Deterministic.
//
// Memory decides its time: neighbours enter and leave as words of kIn and kOut elements, and each
// thread asks for all that it reads before it writes any of it. `out` begins at a whole word; `in`
// does if kAligned.

#pragma once

#include "cuda/launch.h"
#include "cuda/vector.h"

namespace plantune {

constexpr int kTurnThreads = 256;

struct Turn {
  void* out;
  const void* in;
  unsigned images, rows, columns;
  unsigned pieces;  // of an image: what a block, or a warp, turns at once
};

/// Elements of another type; those of their own are left as they are.
template <typename To>
struct Converted {
  template <typename From>
  static __device__ __forceinline__ To of(From value) {
    return from_float<To>(to_float(value));
  }
  static __device__ __forceinline__ To of(To value) { return value; }

  template <typename From>
  static __device__ __forceinline__ void pair(To* to, From first, From second) {
    round_pair(to, to_float(first), to_float(second));
  }
  static __device__ __forceinline__ void pair(To* to, To first, To second) {
    to[0] = first, to[1] = second;
  }
};

template <bool kAligned, typename T, int kSize>
__device__ __forceinline__ void load_word(T (&to)[kSize], const T* from) {
  if constexpr (kAligned) {
    using Word = typename WordOf<kSize * int(sizeof(T))>::Type;
    *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) to[i] = from[i];
  }
}

template <typename To, typename From, int kSize>
__device__ __forceinline__ void store_word(To* to, const From (&from)[kSize]) {
  using Word = typename WordOf<kSize * int(sizeof(To))>::Type;
  alignas(Word) To made[kSize];
  if constexpr (kSize == 1) made[0] = Converted<To>::of(from[0]);
#pragma unroll
  for (int i = 0; i + 1 < kSize; i += 2) Converted<To>::pair(made + i, from[i], from[i + 1]);
  *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(made);
}

/// Large images: a thread turns kOut rows of kIn columns in its registers. kLanes threads of a warp
/// stand side by side along the rows, the others along the columns.
template <typename In, typename Out, int kIn, int kOut, int kLanes>
struct TurnInRegisters {
  using Arguments = Turn;
  static constexpr int kAcross = 32 / kLanes;
  static constexpr int kPieceRows = kLanes * kOut, kPieceColumns = kAcross * kIn;
  static_assert(kLanes * kAcross == 32, "the threads of a warp are a rectangle");

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Turn& turn) {
    release_successor();
    wait_for_predecessor();
    const unsigned warp = blockIdx.x * (kTurnThreads / 32) + threadIdx.x / 32;
    const unsigned image = warp / turn.pieces, piece = warp % turn.pieces;
    if (image >= turn.images) return;
    const unsigned lane = threadIdx.x % 32;
    const unsigned bands = ceil_div(int(turn.rows), kPieceRows);
    const unsigned row = piece % bands * kPieceRows + lane % kLanes * kOut;
    const unsigned column = piece / bands * kPieceColumns + lane / kLanes * kIn;
    if (row >= turn.rows || column >= turn.columns) return;
    const size_t start = size_t(image) * turn.rows * turn.columns;
    const In* in = static_cast<const In*>(turn.in) + start + size_t(row) * turn.columns + column;
    Out* out = static_cast<Out*>(turn.out) + start + size_t(column) * turn.rows + row;
    alignas(16) In values[kOut][kIn];
#pragma unroll
    for (int i = 0; i < kOut; ++i) load_word<kAligned>(values[i], in + size_t(i) * turn.columns);
#pragma unroll
    for (int j = 0; j < kIn; ++j) {
      In turned[kOut];
#pragma unroll
      for (int i = 0; i < kOut; ++i) turned[i] = values[i][j];
      store_word(out + size_t(j) * turn.rows, turned);
    }
  }
};

/// What waits in shared memory is of the smaller type.
template <typename In, typename Out>
using Waiting = typename Either<sizeof(Out) < sizeof(In), Out, In>::Type;

/// Few columns: a block reads kRows whole rows as they lie, and writes words along them.
template <typename In, typename Out, int kIn, int kOut, int kRows, int kColumnsMax>
struct GatherRows {
  using Arguments = Turn;
  using Between = Waiting<In, Out>;

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Turn& turn) {
    static_assert(kRows % kOut == 0, "a word lies within the rows of a block");
    __shared__ alignas(16) Between tile[kRows * kColumnsMax];
    release_successor();
    wait_for_predecessor();
    const unsigned image = blockIdx.x / turn.pieces, piece = blockIdx.x % turn.pieces;
    const unsigned first = piece * kRows, columns = turn.columns;
    const unsigned rows = turn.rows - first < kRows ? turn.rows - first : kRows;
    const size_t start = size_t(image) * turn.rows * columns;
    const In* in = static_cast<const In*>(turn.in) + start + size_t(first) * columns;
    Out* out = static_cast<Out*>(turn.out) + start + first;
    const unsigned words = rows * columns / kIn;
    constexpr int kMost = ceil_div(kRows * kColumnsMax / kIn, kTurnThreads);
    alignas(16) In read[kMost][kIn];
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const unsigned i = k * kTurnThreads + threadIdx.x;
      if (i < words) load_word<kAligned>(read[k], in + i * kIn);
    }
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const unsigned i = k * kTurnThreads + threadIdx.x;
      if (i < words) store_word(tile + i * kIn, read[k]);
    }
    __syncthreads();
    const unsigned bands = rows / kOut;
    for (unsigned i = threadIdx.x; i < bands * columns; i += kTurnThreads) {
      const unsigned row = i % bands * kOut, column = i / bands;
      Between word[kOut];
#pragma unroll
      for (int k = 0; k < kOut; ++k) word[k] = tile[(row + k) * columns + column];
      store_word(out + size_t(column) * turn.rows + row, word);
    }
  }
};

/// Few rows: a block reads words along kColumns columns, and writes what it turned as it lies.
template <typename In, typename Out, int kIn, int kOut, int kRowsMax, int kColumns>
struct ScatterColumns {
  using Arguments = Turn;
  using Between = Waiting<In, Out>;

  template <bool kAligned>
  static __device__ __forceinline__ void run(const Turn& turn) {
    static_assert(kColumns % kIn == 0, "a word lies within the columns of a block");
    __shared__ alignas(16) Between tile[kRowsMax * kColumns];
    release_successor();
    wait_for_predecessor();
    const unsigned image = blockIdx.x / turn.pieces, piece = blockIdx.x % turn.pieces;
    const unsigned first = piece * kColumns, rows = turn.rows;
    const unsigned columns = turn.columns - first < kColumns ? turn.columns - first : kColumns;
    const size_t start = size_t(image) * rows * turn.columns;
    const In* in = static_cast<const In*>(turn.in) + start + first;
    Out* out = static_cast<Out*>(turn.out) + start + size_t(first) * rows;
    constexpr unsigned kAcross = kColumns / kIn;  // the last block of an image leaves some out
    constexpr int kMost = ceil_div(kRowsMax * kColumns / kIn, kTurnThreads);
    alignas(16) In read[kMost][kIn];
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const unsigned i = k * kTurnThreads + threadIdx.x;
      const unsigned row = i / kAcross, column = i % kAcross * kIn;
      if (row >= rows || column >= columns) continue;
      load_word<kAligned>(read[k], in + size_t(row) * turn.columns + column);
    }
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const unsigned i = k * kTurnThreads + threadIdx.x;
      const unsigned row = i / kAcross, column = i % kAcross * kIn;
      if (row >= rows || column >= columns) continue;
#pragma unroll
      for (int j = 0; j < kIn; ++j) {
        tile[(column + j) * rows + row] = Converted<Between>::of(read[k][j]);
      }
    }
    __syncthreads();
    const unsigned words = rows * columns / kOut;
    for (unsigned i = threadIdx.x; i < words; i += kTurnThreads) {
      alignas(16) Between word[kOut];
      load_word<true>(word, tile + i * kOut);
      store_word(out + i * kOut, word);
    }
  }
};

}  // namespace plantune
