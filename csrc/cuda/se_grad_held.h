// What a thread of SeGrad has of the images between its passes: Chain::kHeld of them, kRounds vectors
// of each, in registers (kHold 1), in its own places of dynamic shared memory (kHold 2), or nowhere
// (kHold 0), so that it reads them again.
//
// From Ampere on shared memory also takes images that are read: all that has a slot there, by
// kSlotOf, is asked for at once.

#pragma once

#include "cuda/vector.h"

namespace plantune {

template <typename Chain, typename Word, int kRounds>
struct SeGradHeld {
  using T = typename Chain::T;  // of what is held
  static constexpr bool kInRegisters = Chain::kHold == 1, kInShared = Chain::kHold == 2;
#if __CUDA_ARCH__ >= 800
  static constexpr bool kAsks = kInShared;
#else
  static constexpr bool kAsks = false;
#endif

  Word words[Chain::kHeld][kInRegisters ? kRounds : 1];

  __device__ __forceinline__ void put(int k, int round, const Word& word) {
    if constexpr (kInRegisters) words[k][round] = word;
    if constexpr (kInShared) place(k, round) = word;
  }

  __device__ __forceinline__ Word get(int k, int round) const {
    if constexpr (kInRegisters) return words[k][round];
    return place(k, round);
  }

  static __device__ __forceinline__ Word& place(int k, int round) {
    extern __shared__ uint4 memory[];
    return reinterpret_cast<Word*>(memory)[(k * kRounds + round) * Chain::kThreads + threadIdx.x];
  }

  /// Whether an image that is read comes through a slot of shared memory.
  template <bool kAligned>
  static constexpr bool is_asked(int k) {
    return kAsks && kAligned && Chain::kSlotOf[k] >= 0;
  }

  template <bool kAligned, typename Tile>
  static __device__ __forceinline__ void ask(const void* const (&read)[Chain::kRead],
                                             const Tile& tile) {
#if __CUDA_ARCH__ >= 800
    if constexpr (kAsks && kAligned) {
#pragma unroll 4
      for (int round = 0; round < kRounds; ++round) {
        if (!tile.has(round)) continue;
#pragma unroll
        for (int k = 0; k < Chain::kRead; ++k) {
          if (!is_asked<kAligned>(k)) continue;
          const unsigned to = __cvta_generic_to_shared(&place(Chain::kSlotOf[k], round));
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                       "l"(static_cast<const T*>(read[k]) + tile.at(round))
                       : "memory");
        }
      }
    }
#endif
  }

  /// A thread reads what it has asked for itself, so no other waits.
  template <bool kAligned>
  static __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 800
    if constexpr (kAsks && kAligned) asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  }
};

}  // namespace plantune
