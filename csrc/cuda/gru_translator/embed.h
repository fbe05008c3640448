// Rows of a table, one for each word: x[i] = table[words[i]], whole vectors of 4 floats.

#pragma once

namespace plantune {

template <int kWidth>
__device__ __forceinline__ void embed(const long long* words, const float* table, float* x) {
  static_assert(kWidth % 4 == 0, "rows are copied in vectors");
  const float4* from = reinterpret_cast<const float4*>(table + size_t(words[blockIdx.x]) * kWidth);
  float4* to = reinterpret_cast<float4*>(x + size_t(blockIdx.x) * kWidth);
  for (int i = threadIdx.x; i < kWidth / 4; i += blockDim.x) to[i] = __ldg(from + i);
}

}  // namespace plantune
