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

/// Finite at -inf only where PyTorch's is: nowhere.
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

__device__ __forceinline__ float silu_grad(float dy, float x) {
  const float s = sigmoid(x);
  return dy * s * (1.f + x * (1.f - s));
}

/// x times the normal distribution's part below x.
__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.f + erff(x * 0.70710678f)); }

__device__ __forceinline__ float gelu_grad(float dy, float x) {
  const float below = 0.5f * (1.f + erff(x * 0.70710678f));
  return dy * (below + x * 0.39894228f * __expf(-0.5f * x * x));
}

/// PyTorch's other gelu: tanh stands for erf.
__device__ __forceinline__ float gelu_tanh(float x) {
  return 0.5f * x * (1.f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

__device__ __forceinline__ float gelu_tanh_grad(float dy, float x) {
  const float t = tanhf(0.79788456f * (x + 0.044715f * x * x * x));
  const float slope = 0.79788456f * (1.f + 0.134145f * x * x);
  return dy * (0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * slope);
}

/// Between 0 and 6; NaN stays.
__device__ __forceinline__ float to_six(float x) { return x <= 0.f ? 0.f : x >= 6.f ? 6.f : x; }

__device__ __forceinline__ float hardsigmoid(float x) { return to_six(x + 3.f) * (1.f / 6.f); }

__device__ __forceinline__ float hardsigmoid_grad(float dy, float x) {
  return x > -3.f && x < 3.f ? dy * (1.f / 6.f) : 0.f;
}

__device__ __forceinline__ float hardswish(float x) { return x * hardsigmoid(x); }

__device__ __forceinline__ float hardswish_grad(float dy, float x) {
  return x <= -3.f ? 0.f : x < 3.f ? dy * (x * (1.f / 3.f) + 0.5f) : dy;
}

__device__ __forceinline__ float elu(float x) { return x > 0.f ? x : expm1f(x); }

__device__ __forceinline__ float elu_grad(float dy, float x) {
  return x > 0.f ? dy : dy * expf(x);
}

/// log(1 + exp(x)), which is x from 20 on.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

__device__ __forceinline__ float softplus_grad(float dy, float x) {
  return x > 20.f ? dy : dy * sigmoid(x);
}

__device__ __forceinline__ float mish(float x) { return x * tanhf(log1pf(expf(x))); }

__device__ __forceinline__ float mish_grad(float dy, float x) {
  const float t = tanhf(log1pf(expf(x)));
  return dy * (t + x * sigmoid(x) * (1.f - t * t));
}

__device__ __forceinline__ float rsqrt(float x, float eps) { return rsqrtf(x + eps); }

}  // namespace plantune
