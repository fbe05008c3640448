// Adjacent elements: moved as one word of up to 16 bytes, computed with in float.
//
// T is float, __half or __nv_bfloat16, or a byte that is only read. Activations are read by plain loads: a kernel that starts
// before the one in front has ended must not read them through the read-only cache.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace plantune {

constexpr int kWordBytes = 16;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int smaller(int a, int b) { return a < b ? a : b; }

/// The largest power of two that is not above `value`.
constexpr int power_below(int value) { return value < 2 ? 1 : 2 * power_below(value / 2); }

template <bool kFirst, typename First, typename Second>
struct Either {
  using Type = First;
};
template <typename First, typename Second>
struct Either<false, First, Second> {
  using Type = Second;
};

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = unsigned char;
};
template <>
struct WordOf<2> {
  using Type = unsigned short;
};
template <>
struct WordOf<4> {
  using Type = unsigned;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

__device__ __forceinline__ float to_float(unsigned char value) { return float(value); }
__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

/// The nearest number of a type, as a float.
template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

/// Two values rounded by one instruction where the chip has it.
__device__ __forceinline__ void round_pair(float* to, float a, float b) { to[0] = a, to[1] = b; }
__device__ __forceinline__ void round_pair(__half* to, float a, float b) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(a, b);
}
__device__ __forceinline__ void round_pair(__nv_bfloat16* to, float a, float b) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
}

/// kSize_ elements; a whole word by default.
template <typename T, int kSize_ = kWordBytes / int(sizeof(T))>
struct Vector {
  static constexpr int kSize = kSize_;
  static constexpr int kBytes = kSize * int(sizeof(T));
  static_assert(kBytes <= kWordBytes, "a thread moves at most 16 bytes at once");
  using Word = typename WordOf<kBytes>::Type;

  alignas(kBytes) T values[kSize];

  /// Reads kSize elements; where the address is not aligned to all of them, one by one.
  template <bool kAligned>
  __device__ __forceinline__ void load(const T* from) {
    if constexpr (kAligned && kBytes == kWordBytes) {
      // Volatile, and so in this order.
      Word word;
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                   : "l"(from));
      *reinterpret_cast<Word*>(values) = word;
    } else if constexpr (kAligned) {
      *reinterpret_cast<Word*>(values) = *reinterpret_cast<const Word*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = from[i];
    }
  }

  __device__ __forceinline__ void store(T* to) const {
    const Word word = *reinterpret_cast<const Word*>(values);
    if constexpr (kBytes == kWordBytes) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                   :
                   : "l"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
                   : "memory");
    } else {
      *reinterpret_cast<Word*>(to) = word;
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = from_float<T>(0.f);
  }

  __device__ __forceinline__ float operator[](int i) const { return to_float(values[i]); }

  /// Rounds each of kSize numbers once.
  __device__ __forceinline__ void round(const float* from) {
    if constexpr (kSize == 1) {
      values[0] = from_float<T>(from[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; i += 2) round_pair(values + i, from[i], from[i + 1]);
    }
  }
};

}  // namespace plantune
