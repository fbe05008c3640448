// Warpgroup matrix products on Hopper: d (64 x n, float, in registers) += A (64 x 16) * B (16 x n),
// both operands of 2 bytes in shared memory, K-major, in rows of 128 bytes that are swizzled.
//
// Of d a thread holds, for each 8 columns j, d[4j .. 4j+1] of row 16 * warp + lane / 4 and
// d[4j+2 .. 4j+3] of the row 8 further down, from column 8j + 2 * (lane % 4) on.

#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/numeric/integer_sequence.hpp>

namespace plantune {

constexpr int kRowBytes = 128;   // 64 elements of K: one row of the swizzle's pattern
constexpr int kGroupBytes = 8 * kRowBytes;  // 8 rows, after which the pattern repeats

template <class T, int n>
struct MmaAtom;

#define PLANTUNE_MMA_ATOM(T, NAME, n)                                                      \
  template <>                                                                              \
  struct MmaAtom<T, n> {                                                                   \
    using Type = cute::SM90::GMMA::MMA_64x##n##x16_F32##NAME##NAME##_SS<                   \
        cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;                           \
  };
PLANTUNE_MMA_ATOM(__half, F16, 64)
PLANTUNE_MMA_ATOM(__half, F16, 128)
PLANTUNE_MMA_ATOM(__half, F16, 256)
PLANTUNE_MMA_ATOM(__nv_bfloat16, BF16, 64)
PLANTUNE_MMA_ATOM(__nv_bfloat16, BF16, 128)
PLANTUNE_MMA_ATOM(__nv_bfloat16, BF16, 256)
#undef PLANTUNE_MMA_ATOM

/// Describes rows in shared memory whose groups of 8 lie `group_bytes` apart. The swizzle depends
/// on the address alone, so the first row may be any row of the pattern.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t group_bytes) {
  constexpr uint64_t kSwizzle128 = 1;
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(1) << 16 |
         uint64_t(group_bytes >> 4) << 32 | kSwizzle128 << 62;
}

namespace detail {
template <class Atom, int kSize, int... i>
__device__ __forceinline__ void call(uint64_t a, uint64_t b, float (&d)[kSize],
                                     cute::integer_sequence<int, i...>,
                                     cute::SM90::GMMA::ScaleOut out) {
  Atom::fma(a, b, d[i]..., out);
}
}  // namespace detail

/// Starts d = A * B, or += where `adds`, over 16 values. The caller fences, commits and waits.
template <class T, int n>
__device__ __forceinline__ void multiply_step(uint64_t a, uint64_t b, bool adds,
                                              float (&d)[n / 2]) {
  using Out = cute::SM90::GMMA::ScaleOut;
  detail::call<typename MmaAtom<T, n>::Type>(a, b, d, cute::make_integer_sequence<int, n / 2>{},
                                             adds ? Out::One : Out::Zero);
}

/// Starts d += A * B over one row of K, 64 elements. The caller fences, commits and waits.
template <class T, int n>
__device__ __forceinline__ void multiply_row(uint64_t a, uint64_t b, float (&d)[n / 2]) {
  constexpr int kSteps = 4, kStepUnits = 2;  // of 16 elements: 32 bytes, counted in 16
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    multiply_step<T, n>(a + k * kStepUnits, b + k * kStepUnits, true, d);
  }
}

template <int kSize>
__device__ __forceinline__ void fence_registers(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) cute::warpgroup_fence_operand(d[i]);
}

}  // namespace plantune
