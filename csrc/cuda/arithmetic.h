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

/// y + b, but where y is above zero at least b's next neighbour among numbers that are `step` of
/// their size apart, and `least` at least.
__device__ __forceinline__ float add_apart(float y, float b, float step, float least) {
  const float next = b + fmaxf(fabsf(b) * step, least), z = y + b;
  return y > 0.f && z < next ? next : z;
}

/// The gradient of a ReLU to whose result b was added so.
__device__ __forceinline__ float apart_grad(float dy, float z, float b) {
  return z <= b ? 0.f : dy;
}

/// Its absolute error is below 2e-7.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

__device__ __forceinline__ float sigmoid_grad(float dy, float y) { return dy * (1.f - y) * y; }

/// Finite at -inf only where PyTorch's is: nowhere.
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

__device__ __forceinline__ float silu_grad(float dy, float x) {
  const float s = sigmoid(x);
  return dy * s * (1.f + x * (1.f - s));
}

/// exp(-x * x / 2).
__device__ __forceinline__ float bell(float x) {
  float y = x * x * -0.72134752f;
#if __CUDA_ARCH__ >= 800
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(y));
  return y;
#else
  return exp2f(y);
#endif
}

/// The normal distribution's part below x; its absolute error is below 2e-7, and 3e-5 of it where x
/// is negative. `falls` is bell(x), times which a polynomial of 1 / (1 + 0.4 z) is the part beyond
/// |x| = z * sqrt(2). With erff, which takes some 40 instructions, an epilogue of a network's
/// products took as long as these: 33.6 us instead of 19.3 for 6272 x 384 x 1536 (H200, 2026-11-23).
__device__ __forceinline__ float part_below(float x, float falls) {
  const float t = __fdividef(1.f, fmaf(fabsf(x), 0.28284271f, 1.f));
  float beyond = -0.100401126f;
  beyond = fmaf(beyond, t, 0.356077135f);
  beyond = fmaf(beyond, t, -0.188580215f);
  beyond = fmaf(beyond, t, 0.237249881f);
  beyond = fmaf(beyond, t, 0.0794114396f);
  beyond = fmaf(beyond, t, 0.116242923f);
  beyond *= t * falls;
  return x < 0.f ? beyond : 1.f - beyond;
}

__device__ __forceinline__ float gelu(float x) { return x * part_below(x, bell(x)); }

__device__ __forceinline__ float gelu_grad(float dy, float x) {
  const float falls = bell(x);
  return dy * fmaf(x * 0.39894228f, falls, part_below(x, falls));
}

/// PyTorch's other gelu: tanh stands for erf, and sigmoid(2 * x) is (1 + tanh(x)) / 2.
__device__ __forceinline__ float gelu_tanh(float x) {
  return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
}

__device__ __forceinline__ float gelu_tanh_grad(float dy, float x) {
  const float s = sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
  const float slope = 1.59576912f * (1.f + 0.134145f * x * x);
  return dy * (s + x * s * (1.f - s) * slope);
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
