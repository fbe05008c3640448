// Hopper's asynchronous copies and barriers as one-instruction functions: tensor copies into shared
// memory, transaction barriers (mbarrier), and what blocks of a cluster need to read each other.
//
// Addresses of shared memory are 32-bit numbers, as the instructions take them.

#pragma once

#include <cuda/std/cstdint>

#include "cuda/cluster.h"

namespace plantune {

/// How to load boxes of a tensor, encoded by the driver; a __grid_constant__ kernel parameter.
struct alignas(64) TensorMap {
  char bytes[128];
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint64_t map_address(const TensorMap& map) {
  return reinterpret_cast<uint64_t>(&map);
}

/// Fetches a tensor map into the cache that the copy engine reads it from.
__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map_address(map)) : "memory");
}

// Barriers, 8 bytes each in shared memory.

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Shows initialised barriers to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives, and holds the phase open until so many bytes were copied, too.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool phase_ended(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

/// Waits until the phase of that parity has ended. With PLANTUNE_SPIN_LIMIT it traps at last.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
#ifdef PLANTUNE_SPIN_LIMIT
  for (int i = 0; i < PLANTUNE_SPIN_LIMIT; ++i) {
    if (phase_ended(barrier, parity)) return;
  }
  asm volatile("trap;");
#else
  while (!phase_ended(barrier, parity)) {
  }
#endif
}

/// A slot of a ring buffer, and the parity of the ring's current round.
template <int kStages>
struct Slot {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Tensor copies: one thread starts them, the barrier counts every byte of the box, also of what
// is outside of the tensor and is filled with zeros.

__device__ __forceinline__ void load_box(const TensorMap& map, uint32_t to, uint32_t barrier,
                                         int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(to), "l"(map_address(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void load_box(const TensorMap& map, uint32_t to, uint32_t barrier,
                                         int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];"
      ::"r"(to), "l"(map_address(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void load_box(const TensorMap& map, uint32_t to, uint32_t barrier,
                                         int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
      ::"r"(to), "l"(map_address(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

/// Starts to copy a box from shared memory; what is outside of the tensor is left out.
__device__ __forceinline__ void store_box(const TensorMap& map, uint32_t from, int c0, int c1,
                                          int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
      ::"l"(map_address(map)), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

/// Shows what this thread wrote to shared memory to the copy engine.
__device__ __forceinline__ void publish_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Waits until the boxes that this thread stores have left shared memory.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Plain accesses.

__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float4 load_four(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store_word(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void store_pair(uint32_t address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

__device__ __forceinline__ void store_words(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_zeros(uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

/// A barrier of the first so many threads of the block.
template <int kThreads>
__device__ __forceinline__ void sync_first() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

/// Sends 16 bytes to a peer's shared memory; the barrier there counts them when they have come.
__device__ __forceinline__ void send_to_peer(uint32_t address, uint32_t barrier, float4 v) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];"
      ::"r"(address), "r"(barrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}

}  // namespace plantune
