// The product of one warp on tensor cores that kernels of 16-bit elements are made of, from Ampere on.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace plantune {

/// (16, 8) += a (16, 16) * b (16, 8): a lane has two sums of an upper row, and two of a lower one.
__device__ __forceinline__ void mma_16x8x16(float* upper, float* lower, const uint4& a, uint2 b,
                                            __half) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
#endif
}

__device__ __forceinline__ void mma_16x8x16(float* upper, float* lower, const uint4& a, uint2 b,
                                            __nv_bfloat16) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(upper[0]), "+f"(upper[1]), "+f"(lower[0]), "+f"(lower[1])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
#endif
}

/// The same with a lane's sums in one place.
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&sums)[4], const uint4& a, unsigned b0,
                                            unsigned b1, T type) {
  mma_16x8x16(sums, sums + 2, a, {b0, b1}, type);
}

}  // namespace plantune
