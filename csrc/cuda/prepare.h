// All that a pass computes from weights before its first kernel, in one launch.
//
//   job:  out[i] = expression(in[0][i], in[1][i], ...) for each element of a box, in out's type
//   pack: out[i] = in[0][index[i] - 1], 0 where index[i] is 0
//   turn: out (O, R, C) = in (O, C, R) turned, both dense and of the same 16 bits
//
// A job says for each tensor how far apart its elements lie along up to kJobAxes axes, 0 where it
// is broadcast. Inputs and outputs are float, __half or __nv_bfloat16; expressions are computed in
// float and rounded once. Written by `=`. Deterministic.
//
// It releases no successor before it ends: kernels behind it may read what it wrote before they
// wait for the kernel in front of them.

#pragma once

#include "cuda/arithmetic.h"
#include "cuda/launch.h"
#include "cuda/vector.h"

namespace plantune {

constexpr int kJobInputs = 4, kJobAxes = 4;
// A thread has a word or two, so that all loads of a pass are under way at once.
constexpr int kPrepareThreads = 128, kPrepareChunk = 1024;
// Elements that turn in shared memory at once.
constexpr int kTurned = 2304;
constexpr unsigned char kPack = 255, kTurn = 254;
enum ElementType : unsigned char { kFloat32, kFloat16, kBfloat16 };

struct Job {
  void* out;
  const void* in[kJobInputs];
  unsigned sizes[kJobAxes];  // the innermost axis is the last
  unsigned out_strides[kJobAxes];
  unsigned in_strides[kJobInputs][kJobAxes];
  unsigned count;
  unsigned char out_type, in_types[kJobInputs];
  unsigned char inputs, expression;
  unsigned char width;  // neighbours along the innermost axis that leave as one word, or 1
};

template <int kJobs>
struct JobTable {
  int count;
  unsigned first_blocks[kJobs];
  Job jobs[kJobs];
};

__device__ __forceinline__ float load_element(const void* from, unsigned i, unsigned char type) {
  if (type == kFloat16) return to_float(static_cast<const __half*>(from)[i]);
  if (type == kBfloat16) return to_float(static_cast<const __nv_bfloat16*>(from)[i]);
  return static_cast<const float*>(from)[i];
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
    wait_for_predecessor();
    if (table.count == 0) return;
    const int number = job_of_block(table);
    const Job& job = table.jobs[number];
    const unsigned block = blockIdx.x - table.first_blocks[number];
    const unsigned begin = block * kPrepareChunk;
    const unsigned end = job.count - begin < kPrepareChunk ? job.count : begin + kPrepareChunk;
    if (job.expression == kTurn) {
      turn(job, block);
    } else if (job.expression == kPack) {
      pack(job, begin, end);
    } else if (job.width == 8) {
      fill<8>(job, begin, end);
    } else if (job.width == 4) {
      fill<4>(job, begin, end);
    } else {
      fill<1>(job, begin, end);
    }
    __threadfence();  // for those that read it before they wait for the kernel in front
  }

 private:
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
    float v[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      v[k] = at[k] == 0 ? 0.f : load_element(job.in[0], at[k] - 1, job.in_types[0]);
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const unsigned i = begin + k * kPrepareThreads + threadIdx.x;
      if (i < end) store_element(job.out, i, job.out_type, v[k]);
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
        const unsigned at = axis == 0 ? i : i % job.sizes[axis];
        if (axis > 0) i /= job.sizes[axis];
        out += at * job.out_strides[axis];
#pragma unroll
        for (int k = 0; k < kJobInputs; ++k) in[k] += at * job.in_strides[k][axis];
      }
    }
  };

  template <int kWidth>
  static __device__ __forceinline__ void fill(const Job& job, unsigned begin, unsigned end) {
#pragma unroll 1
    for (unsigned i = begin + threadIdx.x * kWidth; i < end; i += kPrepareThreads * kWidth) {
      const Places places(job, i);
      float v[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        float x[kJobInputs];
#pragma unroll
        for (int k = 0; k < kJobInputs; ++k) {
          const unsigned at = places.in[k] + e * job.in_strides[k][kJobAxes - 1];
          x[k] = k < job.inputs ? load_element(job.in[k], at, job.in_types[k]) : 0.f;
        }
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
