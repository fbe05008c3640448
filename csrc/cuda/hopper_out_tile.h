// Tiles of the images that a convolution's epilogue reads and writes on Hopper, each with elements
// of its own type: how they lie in shared memory, where tensor copies bring them and take them away.

#pragma once

#include "cuda/hopper_async.h"
#include "cuda/hopper_mma.h"
#include "cuda/planes.h"
#include "cuda/vector.h"

namespace plantune {

/// The elements of a convolution's result, and of what its epilogue reads and writes beside it.
template <class Y_, class Residual_ = Y_, class Unshifted_ = Y_, class Saved_ = Y_>
struct OutElements {
  using Y = Y_;
  using Residual = Residual_;
  using Unshifted = Unshifted_;
  using Saved = Saved_;
  /// Then an element of one image takes the place of the same one of another.
  static constexpr bool kOneSize = sizeof(Y) == sizeof(Residual) &&
                                   sizeof(Y) == sizeof(Unshifted) && sizeof(Y) == sizeof(Saved);
};

/// kOwn channels of each of kPixels pixels, in boxes of up to 128 bytes of a pixel: as many as a
/// row holds whose 16-byte pieces are swizzled.
template <class E, int kOwn, int kPixels>
struct OutTile {
  using Element = E;
  static constexpr int kBoxes = ceil_div(kOwn * int(sizeof(E)), kRowBytes);
  static constexpr int kChannels = kOwn / kBoxes;  // of a box
  static constexpr int kRow = kChannels * int(sizeof(E));
  static constexpr int kBoxBytes = kPixels * kRow;
  static constexpr int kBytes = kBoxes * kBoxBytes;

  /// What a box with so many pixels brings.
  static constexpr int copied(int pixels) { return pixels * kRow * kBoxes; }

  /// Where a thread has its two of the channels from 8 * j on: number 2 * (lane % 4) and the next.
  /// `box_bytes` are from one box to the next.
  static __device__ __forceinline__ uint32_t place(uint32_t start, int pixel, int j) {
    constexpr int kPieces = kRow / 16, kEights = kChannels / 8;
    constexpr int kPiecesOfEight = int(sizeof(E)) / 2, kLanes = 4 / kPiecesOfEight;
    const int lane = threadIdx.x % 32 % 4;
    const int number = j % kEights * kPiecesOfEight + (kPiecesOfEight > 1 ? lane / kLanes : 0);
    const int piece = number ^ (pixel * kRow / kRowBytes % kPieces);
    const int eight = j / kEights * kBoxBytes + pixel * kRow + piece * 16;
    return start + eight + lane % kLanes * 2 * int(sizeof(E));
  }

  /// Where it is further on from its place of channel 0 of the same pixel.
  static __device__ __forceinline__ uint32_t moved(uint32_t from, int j, int box_bytes) {
    constexpr int kEights = kChannels / 8;
    return (from ^ j % kEights * 8 * int(sizeof(E))) + j / kEights * box_bytes;
  }

  static __device__ __forceinline__ float2 load(uint32_t at) {
    if constexpr (sizeof(E) == 4) {
      return load_pair(at);
    } else {
      return unpacked<E>(load_word(at));
    }
  }

  static __device__ __forceinline__ void store(uint32_t at, float2 v) {
    if constexpr (sizeof(E) == 4) {
      store_pair(at, v);
    } else {
      store_word(at, packed<E>(v));
    }
  }
};

}  // namespace plantune
