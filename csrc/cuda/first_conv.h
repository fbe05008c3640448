// The convolution that reads an image of few channels, followed by a max pool of 3x3 or not:
//
//   v = Expression(conv(x, w) * scale + bias)
//   y = v, or the largest of 3x3 of v, stride 2, padding 1
//
// x is NCHW or NHWC, y is NHWC, both of T (2 bytes); w is packed as below, scale and bias are
// float. It writes `=`, sums in float in a fixed order, and rounds once: of several values the
// largest is that after rounding. A ReLU can wait until then (kReluLast). A NaN or infinity of x
// may also reach the next output to the left, whose window it is one pixel beyond: a product takes
// taps by twos.
//
// A warpgroup makes kRows rows of y, one by one. Channels are the rows of its products, pixels of
// one row of v their columns, so that the pool compares a thread's own values and those of a
// neighbouring lane. v never leaves registers.
//
// Rows of x come into a ring in shared memory as pixels of kPixel channels, such that kStrideW
// pixels are 16 bytes: what one pixel of v reads of a row begins 16 bytes after what the pixel
// before it reads. So a row of x is the matrix that the product needs, without a copy for each tap.
// The next rows are fetched during the products.
//
// w is packed by tiles of 64 channels, rows of the filter, steps of 16 values (tap, then channel),
// halves of a step; then 64 rows of 8 values, in the order of hopper_pairs.h.

#pragma once

#include "cuda/epilogue.h"
#include "cuda/hopper_async.h"
#include "cuda/hopper_mma.h"
#include "cuda/hopper_pairs.h"
#include "cuda/launch.h"
#include "cuda/vector.h"

namespace plantune {

/// The constants of C are a problem, a configuration, and which parts the step has.
template <class C>
class FirstConv {
  using T = typename C::T;
  using Two = typename Pair<T>::Type;
  using Expression = typename C::Expression;

  static constexpr int kWarpgroup = 128;
  static constexpr int kTileO = 64;
  static constexpr int kUnit = 16;  // bytes between what neighbouring pixels of v read
  static constexpr int kPixel = 8 / C::kStrideW;
  static constexpr int kPixelBytes = kPixel * int(sizeof(T));
  // Of one row of the filter.
  static constexpr int kSteps = ceil_div(C::kS * kPixel, 16);
  static constexpr int kStepBytes = kTileO * 16 * int(sizeof(T));
  static constexpr int kWeightBytes = C::kR * kSteps * kStepBytes;

  // A turn makes one row of y, from one or two rows of v.
  static constexpr int kConvRows = C::kPool ? 2 : 1;
  static constexpr int kColumns = C::kColumns, kEights = kColumns / 8;
  static constexpr int kNeeded = (kConvRows - 1) * C::kStrideH + C::kR;
  static constexpr int kAdvance = kConvRows * C::kStrideH;
  static constexpr int kRing = kNeeded + kAdvance;
  static constexpr int kUnits = kColumns - 1 + 2 * kSteps;
  static constexpr int kCopied = kUnits * C::kStrideW;  // pixels of a row of the ring
  static constexpr int kRowBytes = kUnits * kUnit;
  static constexpr int kFetches = ceil_div(kCopied, kWarpgroup);

  // Columns of v that a tile moves on by: a pool also reads the pair before its own.
  static constexpr int kTilesW = C::kTilesW;
  static constexpr int kMove = C::kPool ? kColumns - 2 : kColumns;
  static constexpr int kStrips = ceil_div(C::kOutH, C::kRows);
  static constexpr int kTilesO = ceil_div(C::kO, kTileO);
  static constexpr int kItems = C::kN * kStrips * kTilesW;

  static_assert(sizeof(T) == 2, "16 bytes are 8 elements");
  static_assert(8 % C::kStrideW == 0 && C::kC <= kPixel, "a pixel holds the channels of the image");
  static_assert(kColumns % 8 == 0 && kColumns >= 8 && kColumns <= 256, "columns of a product");
  static_assert(C::kO % 2 == 0, "a thread writes two channels");
  static_assert(!C::kPool || (C::kOutH == (C::kP + 1) / 2 && C::kOutW == (C::kQ + 1) / 2),
                "the pool has stride 2 and padding 1");

 public:
  static constexpr int kThreads = C::kGroups * kWarpgroup;
  // Columns of a product are 16 bytes apart here. compute-sanitizer takes them to be 32, as they
  // mostly are, so there is room for such columns after the last row.
  static constexpr int kSharedBytes =
      kWeightBytes + C::kGroups * kRing * kRowBytes + (kColumns - 1) * kUnit;
  static constexpr int kBlocks = ceil_div(kItems, C::kGroups) * kTilesO;

  struct Arguments {
    const T* x;
    const uint4* w;
    const float* scale;
    const float* bias;
    T* y;
  };

  static __device__ __forceinline__ void run(const Arguments& a) {
    extern __shared__ __align__(128) uint8_t memory[];
    const uint32_t weights = shared_address(memory);
    const uint4* packed = a.w + blockIdx.x % kTilesO * (kWeightBytes / 16);
    const int group = threadIdx.x / kWarpgroup;
    const int item = blockIdx.x / kTilesO * C::kGroups + group;
    const uint32_t ring = weights + kWeightBytes + group * kRing * kRowBytes;
    const FirstConv conv(a, weights, ring, item);
    copy_weights(weights, packed);
    wait_for_predecessor();
    if (item < kItems) conv.fetch_first_rows();
    // Not before: blocks of the next kernel would take places, and of these blocks more would share
    // an SM: 15 us became 22 for 128 blocks (resnet18, batch 16, H200, 2026-11-22).
    release_successor();
    asm volatile("cp.async.wait_all;" ::: "memory");
    publish_writes();
    __syncthreads();
    if (item < kItems) conv.make_rows();
  }

 private:
  const Arguments& a_;
  const uint32_t weights_, ring_;
  int thread_, image_, column_, first_, end_;
  float scale_[2], bias_[2];
  const T* x_;  // of the image

  /// Starts to copy the weights of the block's channels. They are packed by kernels that release no
  /// successor before they end.
  static __device__ __forceinline__ void copy_weights(uint32_t to, const uint4* from) {
#pragma unroll
    for (int i = threadIdx.x; i < kWeightBytes / 16; i += kThreads) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i * 16), "l"(from + i)
                   : "memory");
    }
  }

  __device__ __forceinline__ FirstConv(const Arguments& a, uint32_t weights, uint32_t ring,
                                       int item)
      : a_(a), weights_(weights), ring_(ring), thread_(threadIdx.x % kWarpgroup) {
    column_ = item % kTilesW * kMove, item /= kTilesW;
    first_ = item % kStrips * C::kRows, item /= kStrips;
    end_ = min(first_ + C::kRows, C::kOutH);
    image_ = item;
    const int channel = channel_of(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale_[i] = C::kScale ? __ldg(a.scale + channel + i) : 1.f;
      bias_[i] = C::kBias ? __ldg(a.bias + channel + i) : 0.f;
    }
    x_ = a.x + (long long)(image_) * (C::kC * C::kH * C::kW);
  }

  /// threadIdx.x, read anew where a register for it would be one too many.
  static __device__ __forceinline__ int thread_again() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
  }

  /// The first of a thread's two channels.
  static __device__ __forceinline__ int channel_of(int thread) {
    return blockIdx.x % kTilesO * kTileO + pair_of(thread);
  }

  // Phase 1: rows of x.

  __device__ __forceinline__ bool copies(int fetch) const {
    return (fetch + 1) * kWarpgroup <= kCopied || thread_ + fetch * kWarpgroup < kCopied;
  }

  /// Pixels outside of the image are zeros. Without branches: products are under way.
  __device__ __forceinline__ void fetch_row(int h,
                                            unsigned short (&values)[kFetches][C::kC]) const {
    constexpr int kPixelStride = C::kNhwc ? C::kC : 1;
    constexpr int kChannelStride = C::kNhwc ? 1 : C::kH * C::kW;
    const bool inside = h >= 0 && h < C::kH;
#pragma unroll
    for (int fetch = 0; fetch < kFetches; ++fetch) {
      const int w = column_ * C::kStrideW - C::kPadW + thread_ + fetch * kWarpgroup;
      const bool there = inside && w >= 0 && w < C::kW;
      const T* from = x_ + (there ? (h * C::kW + w) * kPixelStride : 0);
#pragma unroll
      for (int c = 0; c < C::kC; ++c) {
        const unsigned short value =
            *reinterpret_cast<const unsigned short*>(from + c * kChannelStride);
        values[fetch][c] = there ? value : 0;
      }
    }
  }

  __device__ __forceinline__ void put_row(int slot,
                                          const unsigned short (&values)[kFetches][C::kC]) const {
    const uint32_t row = ring_ + slot * kRowBytes;
#pragma unroll
    for (int fetch = 0; fetch < kFetches; ++fetch) {
      uint32_t words[ceil_div(kPixel, 2)] = {};
#pragma unroll
      for (int c = 0; c < C::kC; ++c) words[c / 2] |= uint32_t(values[fetch][c]) << 16 * (c % 2);
      if (!copies(fetch)) continue;
      const uint32_t at = row + (thread_ + fetch * kWarpgroup) * kPixelBytes;
      if constexpr (kPixel == 4) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(words[0]), "r"(words[1])
                     : "memory");
      } else {
#pragma unroll
        for (int i = 0; i < ceil_div(kPixel, 2); ++i) store_word(at + 4 * i, words[i]);
      }
    }
  }

  static __device__ __forceinline__ int wrapped(int slot) {
    return slot < kRing ? slot : slot - kRing;
  }

  /// The row of x that the first row of the filter reads for a row of v.
  static __device__ __forceinline__ int row_of(int conv_row) {
    return conv_row * C::kStrideH - C::kPadH;
  }

  /// Those of the first turn; a pool also needs the last row of v of the turn before.
  __device__ __forceinline__ void fetch_first_rows() const {
    constexpr int kRows = C::kPool ? kNeeded + C::kStrideH : kNeeded;
    const int first_row = row_of(C::kPool ? 2 * first_ - 1 : first_);
    constexpr int kAtOnce = 3;
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += kAtOnce) {
      unsigned short values[kAtOnce][kFetches][C::kC];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) fetch_row(first_row + begin + i, values[i]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (begin + i < kRows) put_row(begin + i, values[i]);
      }
    }
  }

  /// Every thread of the warpgroup, and its products, see the rows that all have put.
  __device__ __forceinline__ void publish_rows() const {
    publish_writes();
    asm volatile("bar.sync %0, 128;" ::"r"(1 + thread_again() / kWarpgroup) : "memory");
  }

  // Phase 2: products.

  /// Describes groups of 8 rows of 16 bytes, in which the second half of a step is elsewhere.
  static __device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t half_bytes) {
    constexpr uint64_t kGroup = 8 * kUnit;
    return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(half_bytes >> 4) << 16 |
           (kGroup >> 4) << 32;
  }

  /// Starts the products of a row of v, whose first row of x is in a slot.
  __device__ __forceinline__ void start_row(int slot, float (&sums)[kColumns / 2]) const {
    // Not known to be the same in all turns, lest all descriptors be kept in registers.
    uint32_t first_weights = weights_;
    asm volatile("" : "+r"(first_weights));
    fence_registers(sums);
    fence_products();
#pragma unroll
    for (int r = 0; r < C::kR; ++r) {
      const uint64_t pixels = descriptor(ring_ + wrapped(slot + r) * kRowBytes, kUnit);
      const uint64_t weights = descriptor(first_weights + r * kSteps * kStepBytes, kStepBytes / 2);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        multiply_step<T, kColumns>(weights + k * (kStepBytes >> 4), pixels + 2 * k, r + k > 0,
                                   sums);
      }
    }
    commit_products();
    fence_registers(sums);
  }

  static __device__ __forceinline__ void finish_row(float (&sums)[kColumns / 2]) {
    wait_for_products<0>();
    fence_registers(sums);
  }

  // Phase 3: what leaves.

  static __device__ __forceinline__ Two from_left(Two v) {
    unsigned bits = *reinterpret_cast<unsigned*>(&v);
    bits = __shfl_sync(~0u, bits, (int(threadIdx.x) + 3) % 4, 4);
    return *reinterpret_cast<Two*>(&bits);
  }

  __device__ __forceinline__ Two value_at(const float (&sums)[kColumns / 2], int eight,
                                          int which) const {
    const float2 v =
        evaluate<Expression>(pair_at<C::kScale>(sums, eight, which, scale_, bias_));
    return Pair<T>::of(v.x, v.y);
  }

  /// Gives `take` the largest of three neighbours in a row, for each 8 columns.
  template <class Take>
  __device__ __forceinline__ void pool_row(const float (&sums)[kColumns / 2], Take take) const {
    const int lane = thread_ % 4;
    Two before = least<T>();
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      Two right = value_at(sums, i, 1);
      if (C::kQ % 2 && column_ + 8 * i + 2 * lane + 1 >= C::kQ) right = least<T>();
      const Two own = larger(value_at(sums, i, 0), right);
      take(i, larger(own, from_left(lane == 3 ? before : right)));
      before = right;
    }
  }

  /// Where a row of y has this thread's channels; null where there are no such channels.
  __device__ __forceinline__ T* row_at(int row) const {
    const int channel = channel_of(thread_again());
    const long long pixel = ((long long)(image_)*C::kOutH + row) * C::kOutW;
    return channel < C::kO ? a_.y + pixel * C::kO + channel : nullptr;
  }

  static __device__ __forceinline__ void put(T* row, int column, Two v) {
    if constexpr (C::kReluLast) v = larger(v, Pair<T>::of(0.f, 0.f));
    if (column < C::kOutW && row != nullptr) *reinterpret_cast<Two*>(row + column * C::kO) = v;
  }

  __device__ __forceinline__ void make_rows() const {
    float sums[kColumns / 2];
    if constexpr (C::kPool) {
      make_pooled_rows(sums);
    } else {
      int slot = 0;
#pragma unroll 1
      for (int row = first_; row < end_; ++row) {
        multiply_row(row, 0, slot, sums);
        put_row_of(row, sums);
        slot = wrapped(slot + kAdvance);
        publish_rows();
      }
    }
  }

  /// The products of the turn's row `part` of v, while the rows of x that it moves on by come.
  __device__ __forceinline__ void multiply_row(int turn, int part, int slot,
                                               float (&sums)[kColumns / 2]) const {
    start_row(wrapped(slot + part * C::kStrideH), sums);
    unsigned short next[C::kStrideH][kFetches][C::kC];
    const int ahead = kNeeded + part * C::kStrideH;
#pragma unroll
    for (int i = 0; i < C::kStrideH; ++i) {
      fetch_row(row_of(turn * kConvRows) + ahead + i, next[i]);
    }
    finish_row(sums);
#pragma unroll
    for (int i = 0; i < C::kStrideH; ++i) put_row(wrapped(slot + ahead + i), next[i]);
  }

  __device__ __forceinline__ void put_row_of(int row, const float (&sums)[kColumns / 2]) const {
    T* const to = row_at(row);
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const int column = column_ + 8 * i + thread_ % 4 * 2;
      put(to, column, value_at(sums, i, 0));
      put(to, column + 1, value_at(sums, i, 1));
    }
  }

  /// The last row of v of the turn before the first belongs to the first row, too.
  __device__ __forceinline__ void make_pooled_rows(float (&sums)[kColumns / 2]) const {
    Two kept[kEights];
    start_row(0, sums);
    finish_row(sums);
    publish_rows();  // The first turn overwrites rows that these products read.
    pool_row(sums, [&](int i, Two best) { kept[i] = first_ > 0 ? best : least<T>(); });
    int slot = C::kStrideH;
#pragma unroll 1
    for (int turn = first_; turn < end_; ++turn) {
      multiply_row(turn, 0, slot, sums);
      pool_row(sums, [&](int i, Two best) { kept[i] = larger(kept[i], best); });
      multiply_row(turn, 1, slot, sums);
      const bool there = C::kP % 2 == 0 || 2 * turn + 1 < C::kP;
      T* const to = row_at(turn);
      pool_row(sums, [&](int i, Two best) {
        if (!there) best = least<T>();
        put_pooled(to, i, larger(kept[i], best));
        kept[i] = best;
      });
      slot = wrapped(slot + kAdvance);
      publish_rows();
    }
  }

  __device__ __forceinline__ void put_pooled(T* row, int eight, Two v) const {
    const int lane = thread_ % 4;
    // The first pair of a later tile only serves the next one.
    if (eight > 0 || column_ == 0 || lane > 0) put(row, column_ / 2 + 4 * eight + lane, v);
  }
};

}  // namespace plantune
