// All that a pass computes from weights before its first kernel, in one launch.
//
//   job:  out[i] = expression(in[0][i], in[1][i], ...) for each element of a box, in out's type
//   pack: out[i] = in[0][index[i] - 1], 0 where index[i] is 0
//   split: three planes of bfloat16 of in[0], one after the other, see planes.h
//   turn: out (O, R, C) = in (O, C, R) turned, both dense and of the same 16 bits
//
// A job says for each tensor how far apart its elements are along up to kJobAxes axes, 0 where it
// is broadcast. Inputs and outputs are float, __half or __nv_bfloat16; expressions are computed in
// float and rounded once. Written by `=`. Deterministic.
//
// It releases no successor before it ends: later kernels may read what it wrote before they
// wait for the kernel in front of them.
//
// Most of its time is latency: of the arguments, of a tensor's elements, of the stores. So a block
// copies its job at once, and a thread asks for all that it reads before it uses any of it.

#pragma once

#include "cuda/arithmetic.h"
#include "cuda/launch.h"
#include "cuda/planes.h"
#include "cuda/vector.h"

namespace plantune {

constexpr int kJobInputs = 4, kJobAxes = 4;
// A thread has a word or two, so that all loads of a pass are under way at once.
constexpr int kPrepareThreads = 128, kPrepareChunk = 1024;
// Elements that turn in shared memory at once.
constexpr int kTurned = 2304;
constexpr unsigned char kPack = 255, kTurn = 254, kSplit = 253;
enum ElementType : unsigned char { kFloat32, kFloat16, kBfloat16 };

struct Job {
  void* out;
  const void* in[kJobInputs];
  unsigned sizes[kJobAxes];  // the innermost axis is the last
  unsigned out_strides[kJobAxes];
  unsigned in_strides[kJobInputs][kJobAxes];
  unsigned count, first_block;
  unsigned char out_type, in_types[kJobInputs];
  unsigned char inputs, expression;
  // Neighbours along the innermost axis that leave as one word, or 1.
  unsigned char width;
  unsigned char axes;   // those in use, the last ones
};

/// Jobs of one block come first.
template <int kJobs>
struct JobTable {
  int count;
  unsigned singles;
  unsigned first_blocks[kJobs];
  Job jobs[kJobs];
};

/// An element as it is stored, 0 where it is not there. No branch and no conversion: either
/// would wait for each element before the next one is asked for.
__device__ __forceinline__ unsigned load_bits(const void* from, unsigned i, unsigned char type,
                                              bool there) {
  const bool wide = type == kFloat32;
  const char* place = static_cast<const char*>(from) + static_cast<size_t>(i) * (wide ? 4 : 2);
  unsigned bits = 0;
  asm volatile(
      "{\n"
      ".reg .pred wide, narrow;\n"
      "setp.ne.u32 wide, %2, 0;\n"
      "setp.ne.u32 narrow, %3, 0;\n"
      "@wide ld.global.u32 %0, [%1];\n"
      "@narrow ld.global.u16 %0, [%1];\n"
      "}\n"
      : "+r"(bits)
      : "l"(place), "r"(unsigned(there && wide)), "r"(unsigned(there && !wide)));
  return bits;
}

__device__ __forceinline__ float from_bits(unsigned bits, unsigned char type) {
  const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  return type == kFloat16 ? half : __uint_as_float(type == kBfloat16 ? bits << 16 : bits);
}

__device__ __forceinline__ void store_element(void* to, unsigned i, unsigned char type, float v) {
  if (type == kFloat16) {
    static_cast<__half*>(to)[i] = from_float<__half>(v);
  } else if (type == kBfloat16) {
    static_cast<__nv_bfloat16*>(to)[i] = from_float<__nv_bfloat16>(v);
  } else {
    static_cast<float*>(to)[i] = v;
  }
}

/// Expressions::evaluate(number, in) computes one of the network's expressions.
template <class Expressions, int kJobs>
struct Preparation {
  using Table = JobTable<kJobs>;

  static __device__ __forceinline__ void run(const Table& table) {
    __shared__ Job job;
    copy(job, table);
    wait_for_predecessor();
    run(job, blockIdx.x - job.first_block);
    // For those that read it before they wait for the kernel in front.
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }

 private:
  static __device__ __forceinline__ void run(const Job& job, unsigned block) {
    const unsigned begin = block * kPrepareChunk;
    const unsigned end = job.count - begin < kPrepareChunk ? job.count : begin + kPrepareChunk;
    if (job.expression == kTurn) {
      turn(job, block);
    } else if (job.expression == kPack) {
      pack(job, begin, end);
    } else if (job.expression == kSplit) {
      split(job, begin, end);
    } else if (job.width == 8) {
      fill<8>(job, begin, end);
    } else if (job.width == 4) {
      fill<4>(job, begin, end);
    } else {
      fill<1>(job, begin, end);
    }
  }

  /// The job of this block, by all words at once: read one by one, each would come from memory.
  /// Jobs of one block are asked for before it is known that this is one of them.
  static __device__ __forceinline__ void copy(Job& job, const Table& table) {
    constexpr int kWords = sizeof(Job) / sizeof(unsigned);
    static_assert(kWords <= kPrepareThreads, "a thread copies a word at most");
    const unsigned word = threadIdx.x < kWords ? threadIdx.x : 0;
    unsigned value = word_of(table, blockIdx.x < kJobs ? blockIdx.x : 0, word);
    if (blockIdx.x >= table.singles) value = word_of(table, job_of_block(table), word);
    if (threadIdx.x < kWords) reinterpret_cast<unsigned*>(&job)[word] = value;
    __syncthreads();
  }

  static __device__ __forceinline__ unsigned word_of(const Table& table, int job, unsigned word) {
    return reinterpret_cast<const unsigned*>(&table.jobs[job])[word];
  }

  /// The last job that begins at this block or before it.
  static __device__ __forceinline__ int job_of_block(const Table& table) {
    int begun = 0;
    for (int first = 0; first < table.count; first += 32) {
      const int lane = first + int(threadIdx.x % 32);
      const bool has = lane < table.count && table.first_blocks[lane] <= blockIdx.x;
      begun += __popc(__ballot_sync(~0u, has));
    }
    return begun - 1;
  }

  static __device__ __forceinline__ void pack(const Job& job, unsigned begin, unsigned end) {
    constexpr int kEach = kPrepareChunk / kPrepareThreads;
    const int* index = static_cast<const int*>(job.in[1]);
    int at[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const unsigned i = begin + k * kPrepareThreads + threadIdx.x;
      at[k] = i < end ? index[i] : 0;
    }
    unsigned bits[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      bits[k] = load_bits(job.in[0], at[k] - 1, job.in_types[0], at[k] != 0);
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const unsigned i = begin + k * kPrepareThreads + threadIdx.x;
      if (i < end) store_element(job.out, i, job.out_type, from_bits(bits[k], job.in_types[0]));
    }
  }

  /// A thread asks for all floats before it splits any.
  static __device__ __forceinline__ void split(const Job& job, unsigned begin, unsigned end) {
    constexpr int kEach = kPrepareChunk / kPrepareThreads, kPlanes = 3;
    unsigned at[kEach], bits[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const unsigned i = begin + k * kPrepareThreads + threadIdx.x;
      const Places places(job, i < end ? i : begin);
      at[k] = places.out;
      bits[k] = load_bits(job.in[0], places.in[0], job.in_types[0], i < end);
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (begin + k * kPrepareThreads + threadIdx.x >= end) continue;
      unsigned planes[kPlanes];
      plantune::split<__nv_bfloat16>({from_bits(bits[k], job.in_types[0]), 0.f}, planes);
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        unsigned short* to = static_cast<unsigned short*>(job.out);
        to[at[k] + size_t(plane) * job.count] = static_cast<unsigned short>(planes[plane]);
      }
    }
  }

  /// sizes: O, the channels of a block, C, R. A block turns some channels of one filter.
  static __device__ __forceinline__ void turn(const Job& job, unsigned block) {
    __shared__ __align__(16) unsigned short tile[kTurned];
    const unsigned most = job.sizes[1], channels = job.sizes[2], taps = job.sizes[3];
    const unsigned tiles = (channels + most - 1) / most;
    const unsigned first = block % tiles * most;
    const unsigned count = channels - first < most ? channels - first : most;
    const unsigned long long filter = (unsigned long long)(block / tiles) * channels * taps;
    const unsigned short* from = static_cast<const unsigned short*>(job.in[0]) + filter;
    unsigned short* to = static_cast<unsigned short*>(job.out) + filter + first;
    const uint4* words = reinterpret_cast<const uint4*>(from + first * taps);
    for (unsigned i = threadIdx.x; i < count * taps / 8; i += kPrepareThreads) {
      reinterpret_cast<uint4*>(tile)[i] = words[i];
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < count / 8 * taps; i += kPrepareThreads) {
      const unsigned tap = i / (count / 8), channel = i % (count / 8) * 8;
      Vector<unsigned short, 8> word;
#pragma unroll
      for (int e = 0; e < 8; ++e) word.values[e] = tile[(channel + e) * taps + tap];
      word.store(to + tap * channels + channel);
    }
  }

  /// Where the tensors of a job have an element of the box.
  struct Places {
    unsigned out = 0, in[kJobInputs] = {};

    __device__ __forceinline__ Places(const Job& job, unsigned i) {
#pragma unroll
      for (int axis = kJobAxes - 1; axis >= 0; --axis) {
        const bool last = axis == kJobAxes - job.axes;
        const unsigned rest = last ? 0 : i / job.sizes[axis];
        const unsigned at = i - rest * job.sizes[axis];
        out += at * job.out_strides[axis];
#pragma unroll
        for (int k = 0; k < kJobInputs; ++k) in[k] += at * job.in_strides[k][axis];
        if (last) break;
        i = rest;
      }
    }
  };

  template <int kWidth>
  static __device__ __forceinline__ void fill(const Job& job, unsigned begin, unsigned end) {
#pragma unroll 1
    for (unsigned i = begin + threadIdx.x * kWidth; i < end; i += kPrepareThreads * kWidth) {
      const Places places(job, i);
      unsigned bits[kJobInputs][kWidth];
#pragma unroll
      for (int k = 0; k < kJobInputs; ++k) {
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const unsigned at = places.in[k] + e * job.in_strides[k][kJobAxes - 1];
          bits[k][e] = load_bits(job.in[k], at, job.in_types[k], k < job.inputs);
        }
      }
      float v[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        float x[kJobInputs];
#pragma unroll
        for (int k = 0; k < kJobInputs; ++k) x[k] = from_bits(bits[k][e], job.in_types[k]);
        v[e] = Expressions::evaluate(job.expression, x);
      }
      store(job, places.out, v);
    }
  }

  static __device__ __forceinline__ void store(const Job& job, unsigned at, const float (&v)[1]) {
    store_element(job.out, at, job.out_type, v[0]);
  }
  static __device__ __forceinline__ void store(const Job& job, unsigned at, const float (&v)[4]) {
    Vector<float, 4> word;
    word.round(v);
    word.store(static_cast<float*>(job.out) + at);
  }
  static __device__ __forceinline__ void store(const Job& job, unsigned at, const float (&v)[8]) {
    if (job.out_type == kFloat16) {
      store_eight(static_cast<__half*>(job.out) + at, v);
    } else {
      store_eight(static_cast<__nv_bfloat16*>(job.out) + at, v);
    }
  }
  template <typename T>
  static __device__ __forceinline__ void store_eight(T* to, const float (&v)[8]) {
    Vector<T, 8> word;
    word.round(v);
    word.store(to);
  }
};

}  // namespace plantune
