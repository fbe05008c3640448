// Warpgroup matrix products on Hopper: d (64 x n, float, in registers) += A (64 x 16) * B (16 x n),
// both operands of 2 bytes in shared memory, in rows of 128 bytes that are swizzled: along K, or
// where an operand is transposed, along its other axis. Of floats, whose upper 19 bits count, a
// product takes 8 values of K, along which both operands must lie.
//
// Of d a thread holds, for each 8 columns j, d[4j .. 4j+1] of row 16 * warp + lane / 4 and
// d[4j+2 .. 4j+3] of the row 8 further down, from column 8j + 2 * (lane % 4) on.

#pragma once

#include <cuda/std/cstdint>

namespace plantune {

constexpr int kRowBytes = 128;   // 64 elements of K, 32 floats: a row of the swizzle's pattern
constexpr int kGroupBytes = 8 * kRowBytes;  // 8 rows, after which the pattern repeats

/// One product of n columns; a kernel's source defines those that it starts.
template <class T, int n>
struct Product;

/// One product whose A comes from registers and whose B is transposed: a warp has 16 rows, in the
/// order in which `ldmatrix` gives four matrices of 8x8.
template <class T, int n>
struct RegisterProduct;

/// One product whose A comes from registers and whose B lies along K.
template <class T, int n>
struct PlaneProduct;

/// Describes rows in shared memory whose groups of 8 are `group_bytes` apart. The swizzle depends
/// on the address alone, so the first row may be any row of the pattern.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t group_bytes) {
  constexpr uint64_t kSwizzle128 = 1;
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(1) << 16 |
         uint64_t(group_bytes >> 4) << 32 | kSwizzle128 << 62;
}

/// The same of rows of 64 bytes, one after the other, of which 16-byte pieces are swizzled by 4.
__device__ __forceinline__ uint64_t short_rows_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle64 = 2;
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(1) << 16 |
         uint64_t(kGroupBytes / 2 >> 4) << 32 | kSwizzle64 << 62;
}

/// Describes a transposed operand: rows of 64 columns, one for each value of K. Further columns are
/// `part_bytes` further on, further groups of 8 values of K `group_bytes`.
__device__ __forceinline__ uint64_t transposed_descriptor(uint32_t address, uint32_t part_bytes,
                                                          uint32_t group_bytes = kGroupBytes) {
  constexpr uint64_t kSwizzle128 = 1;
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(part_bytes >> 4) << 16 |
         uint64_t(group_bytes >> 4) << 32 | kSwizzle128 << 62;
}

/// Starts d = A * B, or += where `adds`, over 32 bytes of K. The caller fences, commits and waits.
template <class T, int n>
__device__ __forceinline__ void multiply_step(uint64_t a, uint64_t b, bool adds,
                                              float (&d)[n / 2]) {
  Product<T, n>::start(a, b, adds, d);
}

/// Starts d += A * B over one row of K, 64 elements or 32 floats. The caller fences, commits and waits.
template <class T, int n, bool kTransposed = false>
__device__ __forceinline__ void multiply_row(uint64_t a, uint64_t b, float (&d)[n / 2]) {
  constexpr int kSteps = 4, kStepUnits = 2;  // of 32 bytes, counted in 16
  constexpr int kStepUnitsOfB = kTransposed ? 2 * kGroupBytes / 16 : kStepUnits;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    multiply_step<T, n>(a + k * kStepUnits, b + k * kStepUnitsOfB, true, d);
  }
}

/// Keeps sums in their registers from here on: products under way change them unseen.
template <int kSize>
__device__ __forceinline__ void fence_registers(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// The same for factors: products under way still read them.
template <int kSize>
__device__ __forceinline__ void fence_registers(uint32_t (&a)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

/// Before the first product: what this warpgroup wrote to registers of sums is there.
__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// Makes a group of the products started so far.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most so many groups are under way.
template <int kGroups>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

}  // namespace plantune
