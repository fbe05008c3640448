// The end of an implicit GEMM convolution, after CUTLASS 2.x's main loop.
//
//   y[m][k] = Expression(sum[m][k] * scale[k] + bias[k], residual[m][k], offset)
//
// in float32, rounded once. y and residual, each of an element type of its own, are row-major with
// one row per output pixel (NHWC), scale and bias hold one float32 per channel; a missing residual or offset is zero. Writes `=`.
//
// Where K is split, each slice stores its partial sums as its threads hold them, and `reduce` adds
// the slices in their order: the result does not depend on which slice came first.

#pragma once

#include "cuda/cutlass_at_run_time.h"
#include "cuda/epilogue.h"

namespace plantune {

/// The operands beside the sums. `offset` may be null; `applies` says whether the expression's
/// function is.
struct ChannelOperands {
  float const* scale;
  float const* bias;
  float const* offset;
  int channels;
  bool applies;
};

/// The iterator over rows of a CUTLASS epilogue, for rows of another element type.
template <typename Iterator, typename Element>
struct WithElement;
template <template <typename, typename, bool, typename, bool> class Iterator, typename Map,
          typename Old, bool kScatter, typename Permute, bool kPlainStore, typename Element>
struct WithElement<Iterator<Map, Old, kScatter, Permute, kPlainStore>, Element> {
  using Type = Iterator<Map, Element, kScatter, Permute, kPlainStore>;
};

/// A CUTLASS epilogue's way from accumulators over shared memory to rows, with our own arithmetic
/// on it. `Default` is the `Epilogue` that CUTLASS picks for the main loop: its threads have the same
/// elements of rows whatever type these are.
template <typename Default, typename Expression, typename Residual, typename Result>
class ChannelEpilogue : public Default::Base {
 public:
  using Base = typename Default::Base;
  using AccumulatorTile = typename Default::AccumulatorTile;
  using ThreadMap = typename Default::OutputTileIterator::ThreadMap;
  using OutputIterator = typename WithElement<typename Default::OutputTileIterator, Result>::Type;
  using ResidualIterator =
      typename WithElement<typename Default::OutputTileIterator, Residual>::Type;
  using SharedStorage = typename Base::SharedStorage;

  static constexpr int kThreads = 32 * Base::WarpCount::kCount;
  static constexpr int kIterations = OutputIterator::kIterations;

 private:
  using Fragments = typename Default::AccumulatorFragmentIterator;
  using Sums = typename Fragments::Fragment;
  using SharedLoadIterator = typename Default::SharedLoadIterator;
  using Output = typename OutputIterator::Fragment;
  using Source = typename ResidualIterator::Fragment;
  using Vector = cutlass::AlignedArray<float, 4>;

  static constexpr int kAccess = ThreadMap::kElementsPerAccess;
  static constexpr int kColumns = ThreadMap::Iterations::kColumn;
  static constexpr int kVectors = Sums::kElements / Vector::kElements;
  // Enough loads under way to hide their latency, and registers for them.
  static constexpr int kLoadedAtOnce = kIterations % 4 == 0 ? 4 : 1;
  using Access = cutlass::AlignedArray<float, kAccess>;

  static_assert(Base::kPartitionsK == 1, "Warps must not share the K dimension of a tile.");
  static_assert(Sums::kElements % Vector::kElements == 0, "Partial sums are moved four at a time.");
  static_assert(Fragments::Policy::kIterations == kIterations,
                "Each part of the accumulators must be one part of the output.");

 public:
  /// Partial sums of one slice of a tile.
  static constexpr int kPartialFloats = kThreads * kIterations * Sums::kElements;

  CUTLASS_DEVICE
  ChannelEpilogue(SharedStorage& storage, ChannelOperands const& operands, int first_channel)
      : Base(storage, threadIdx.x, cutlass::canonical_warp_idx_sync(), threadIdx.x % 32),
        shared_load_iterator_(storage.reference(), threadIdx.x),
        applies_(operands.applies),
        offset_(operands.offset ? *operands.offset : 0.0f) {
    int const first = first_channel + ThreadMap::initial_offset(threadIdx.x).column();
    CUTLASS_PRAGMA_UNROLL
    for (int column = 0; column < kColumns; ++column) {
      int const channel = first + column * ThreadMap::Delta::kColumn;
      scale_[column].clear();
      bias_[column].clear();
      if (channel < operands.channels) {
        scale_[column] = *reinterpret_cast<Access const*>(operands.scale + channel);
        bias_[column] = *reinterpret_cast<Access const*>(operands.bias + channel);
      }
    }
  }

  /// Finishes a tile from its accumulators. A null residual's iterator loads nothing.
  CUTLASS_DEVICE
  void operator()(OutputIterator output, ResidualIterator residual,
                  AccumulatorTile const& accumulators) {
    Fragments fragments(accumulators);
    CUTLASS_PRAGMA_UNROLL
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      Sums sums;
      fragments.load(sums);
      ++fragments;
      store(output, residual, sums);
    }
  }

  /// Stores a slice's accumulators, to be summed by `reduce`.
  CUTLASS_DEVICE
  static void store_partial(float* partial, AccumulatorTile const& accumulators) {
    Fragments fragments(accumulators);
    Vector* vectors = reinterpret_cast<Vector*>(partial) + threadIdx.x;
    CUTLASS_PRAGMA_UNROLL
    for (int iteration = 0; iteration < kIterations; ++iteration) {
      Sums sums;
      fragments.load(sums);
      ++fragments;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        vectors[(iteration * kVectors + i) * kThreads] = reinterpret_cast<Vector const*>(&sums)[i];
      }
    }
  }

  /// Finishes a tile from the partial sums of all slices, which are `slice_floats` apart from each
  /// other. All threads of a block must take part.
  CUTLASS_DEVICE
  void reduce(OutputIterator output, ResidualIterator residual, float const* partial,
              int64_t slice_floats, int slices) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < kIterations; first += kLoadedAtOnce) {
      Sums sums[kLoadedAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLoadedAtOnce; ++i) {
        sums[i].clear();
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int slice = 0; slice < slices; ++slice) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLoadedAtOnce; ++i) {
          add(sums[i], partial + slice * slice_floats, first + i);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLoadedAtOnce; ++i) {
        store(output, residual, sums[i]);
      }
    }
  }

  /// The same for one of the tile's kIterations parts.
  CUTLASS_DEVICE
  void reduce_part(OutputIterator output, ResidualIterator residual, float const* partial,
                   int64_t slice_floats, int slices, int iteration) {
    output += iteration;
    residual += iteration;
    Sums sums;
    sums.clear();
    #pragma unroll 4
    for (int slice = 0; slice < slices; ++slice) {
      add(sums, partial + slice * slice_floats, iteration);
    }
    store(output, residual, sums);
  }

 private:
  /// Adds a slice's part of a tile.
  CUTLASS_DEVICE
  static void add(Sums& sums, float const* partial, int iteration) {
    float4 const* vectors = reinterpret_cast<float4 const*>(partial) + threadIdx.x;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      // Past L1, which does not see what other multiprocessors stored meanwhile.
      float4 const addend = __ldcg(vectors + (iteration * kVectors + i) * kThreads);
      sums[4 * i] += addend.x;
      sums[4 * i + 1] += addend.y;
      sums[4 * i + 2] += addend.z;
      sums[4 * i + 3] += addend.w;
    }
  }

  /// Finishes and stores a part of the tile, and moves on to the next one.
  CUTLASS_DEVICE
  void store(OutputIterator& output, ResidualIterator& residual, Sums const& sums) {
    Source source;
    source.clear();
    residual.load(source);
    ++residual;
    output.store(finished(sums, source));
    ++output;
  }

  /// Gives each thread whole accesses of a row, and computes the output of them.
  CUTLASS_DEVICE
  Output finished(Sums const& sums, Source const& source) {
    __syncthreads();
    this->warp_tile_iterator_.store(sums);
    __syncthreads();
    typename SharedLoadIterator::Fragment rows;
    shared_load_iterator_.load(rows);
    Output output;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Output::kElements; ++i) {
      int const column = i / kAccess % kColumns;
      float const value = rows[i] * scale_[column][i % kAccess] + bias_[column][i % kAccess];
      float const residual = float(Residual(source[i]));
      output[i] = Result(Expression::of({value, residual, offset_, applies_}));
    }
    return output;
  }

  SharedLoadIterator shared_load_iterator_;
  Access scale_[kColumns];
  Access bias_[kColumns];
  bool applies_;
  float offset_;
};

}  // namespace plantune
