// Images in another layout: nchw to nhwc, or back.
//
//   out (N, columns, rows) = in (N, rows, columns) turned, both dense
//
// To nhwc the rows are the channels of an image and the columns its pixels, to nchw the other way
// round. Elements are moved as bits: T is an unsigned integer of their size. Written by `=`.
// Deterministic.
//
// Memory decides its time: neighbours enter and leave as words of kIn and kOut elements, and each
// thread asks for all that it reads before it writes any of it.

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

template <typename T, int kSize>
__device__ __forceinline__ void load_word(T (&to)[kSize], const T* from) {
  using Word = typename WordOf<kSize * int(sizeof(T))>::Type;
  union {
    Word word;
    T values[kSize];
  } read;
  read.word = *reinterpret_cast<const Word*>(from);
#pragma unroll
  for (int i = 0; i < kSize; ++i) to[i] = read.values[i];
}

template <typename T, int kSize>
__device__ __forceinline__ void store_word(T* to, const T (&from)[kSize]) {
  using Word = typename WordOf<kSize * int(sizeof(T))>::Type;
  union {
    Word word;
    T values[kSize];
  } written;
#pragma unroll
  for (int i = 0; i < kSize; ++i) written.values[i] = from[i];
  *reinterpret_cast<Word*>(to) = written.word;
}

/// Large images: a thread turns kOut rows of kIn columns in its registers. kLanes threads of a warp
/// stand side by side along the rows, the others along the columns.
template <typename T, int kIn, int kOut, int kLanes>
struct TurnInRegisters {
  static constexpr int kAcross = 32 / kLanes;
  static constexpr int kPieceRows = kLanes * kOut, kPieceColumns = kAcross * kIn;
  static_assert(kLanes * kAcross == 32, "the threads of a warp are a rectangle");

  static __device__ __forceinline__ void run(const Turn& turn) {
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
    const T* in = static_cast<const T*>(turn.in) + start + size_t(row) * turn.columns + column;
    T* out = static_cast<T*>(turn.out) + start + size_t(column) * turn.rows + row;
    T values[kOut][kIn];
#pragma unroll
    for (int i = 0; i < kOut; ++i) load_word<T, kIn>(values[i], in + size_t(i) * turn.columns);
#pragma unroll
    for (int j = 0; j < kIn; ++j) {
      T turned[kOut];
#pragma unroll
      for (int i = 0; i < kOut; ++i) turned[i] = values[i][j];
      store_word<T, kOut>(out + size_t(j) * turn.rows, turned);
    }
  }
};

/// Few columns: a block reads kRows whole rows as they lie, and writes words along them.
template <typename T, int kIn, int kOut, int kRows, int kColumnsMax>
struct GatherRows {
  static __device__ __forceinline__ void run(const Turn& turn) {
    static_assert(kRows % kOut == 0, "a word lies within the rows of a block");
    __shared__ alignas(16) T tile[kRows * kColumnsMax];
    wait_for_predecessor();
    const unsigned image = blockIdx.x / turn.pieces, piece = blockIdx.x % turn.pieces;
    const unsigned first = piece * kRows, columns = turn.columns;
    const unsigned rows = turn.rows - first < kRows ? turn.rows - first : kRows;
    const size_t start = size_t(image) * turn.rows * columns;
    const T* in = static_cast<const T*>(turn.in) + start + size_t(first) * columns;
    T* out = static_cast<T*>(turn.out) + start + first;
    const unsigned words = rows * columns / kIn;
    constexpr int kMost = ceil_div(kRows * kColumnsMax / kIn, kTurnThreads);
    T read[kMost][kIn];
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const unsigned i = k * kTurnThreads + threadIdx.x;
      if (i < words) load_word<T, kIn>(read[k], in + i * kIn);
    }
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const unsigned i = k * kTurnThreads + threadIdx.x;
      if (i < words) store_word<T, kIn>(tile + i * kIn, read[k]);
    }
    __syncthreads();
    const unsigned bands = rows / kOut;
    for (unsigned i = threadIdx.x; i < bands * columns; i += kTurnThreads) {
      const unsigned row = i % bands * kOut, column = i / bands;
      T word[kOut];
#pragma unroll
      for (int k = 0; k < kOut; ++k) word[k] = tile[(row + k) * columns + column];
      store_word<T, kOut>(out + size_t(column) * turn.rows + row, word);
    }
  }
};

/// Few rows: a block reads words along kColumns columns, and writes what it turned as it lies.
template <typename T, int kIn, int kOut, int kRowsMax, int kColumns>
struct ScatterColumns {
  static __device__ __forceinline__ void run(const Turn& turn) {
    static_assert(kColumns % kIn == 0, "a word lies within the columns of a block");
    __shared__ alignas(16) T tile[kRowsMax * kColumns];
    wait_for_predecessor();
    const unsigned image = blockIdx.x / turn.pieces, piece = blockIdx.x % turn.pieces;
    const unsigned first = piece * kColumns, rows = turn.rows;
    const unsigned columns = turn.columns - first < kColumns ? turn.columns - first : kColumns;
    const size_t start = size_t(image) * rows * turn.columns;
    const T* in = static_cast<const T*>(turn.in) + start + first;
    T* out = static_cast<T*>(turn.out) + start + size_t(first) * rows;
    constexpr unsigned kAcross = kColumns / kIn;  // the last block of an image leaves some out
    constexpr int kMost = ceil_div(kRowsMax * kColumns / kIn, kTurnThreads);
    T read[kMost][kIn];
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const unsigned i = k * kTurnThreads + threadIdx.x;
      const unsigned row = i / kAcross, column = i % kAcross * kIn;
      if (row >= rows || column >= columns) continue;
      load_word<T, kIn>(read[k], in + size_t(row) * turn.columns + column);
    }
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const unsigned i = k * kTurnThreads + threadIdx.x;
      const unsigned row = i / kAcross, column = i % kAcross * kIn;
      if (row >= rows || column >= columns) continue;
#pragma unroll
      for (int j = 0; j < kIn; ++j) tile[(column + j) * rows + row] = read[k][j];
    }
    __syncthreads();
    const unsigned words = rows * columns / kOut;
    for (unsigned i = threadIdx.x; i < words; i += kTurnThreads) {
      T word[kOut];
      load_word<T, kOut>(word, tile + i * kOut);
      store_word<T, kOut>(out + i * kOut, word);
    }
  }
};

}  // namespace plantune
