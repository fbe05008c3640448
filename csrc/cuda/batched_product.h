// Products of many matrices on CUTLASS 2.x main loops: for each number i of a batch
//
//   y[i] (rows x columns) = a[i % lefts] (rows x depth) * b[i % rights] (depth x columns)
//
// All are dense, y in rows, a and b in rows or in columns, of one element type. Sums are float32, made
// in a fixed order by one block: deterministic. Writes `=`.

#pragma once

#include "cuda/cutlass_at_run_time.h"
#include "cuda/launch.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/default_gemm.h"

namespace plantune {

/// kAccessA and kAccessB neighbours of an operand are read at once, kAccessY of y are written.
template <typename Element, typename OperatorClass, typename ArchTag, typename TileShape,
          typename WarpShape, typename InstructionShape, int kStages, typename LayoutA,
          typename LayoutB, int kAccessA, int kAccessB, int kAccessY>
struct BatchedProduct {
  using Rows = cutlass::layout::RowMajor;
  using Unchanged = cutlass::epilogue::thread::LinearCombination<
      Element, kAccessY, float, float, cutlass::epilogue::thread::ScaleType::Nothing>;
  using Defaults = typename cutlass::gemm::kernel::DefaultGemm<
      Element, LayoutA, kAccessA, Element, LayoutB, kAccessB, Element, Rows, float, OperatorClass,
      ArchTag, TileShape, WarpShape, InstructionShape, Unchanged,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, kStages, false,
      cutlass::arch::OpMultiplyAdd>;
  using Mma = typename Defaults::Mma;
  using Epilogue = typename Defaults::Epilogue;
  using OutputIterator = typename Epilogue::OutputTileIterator;
  static constexpr int kThreads = 32 * Mma::WarpCount::kCount;

  union SharedStorage {
    typename Mma::SharedStorage main_loop;
    typename Epilogue::SharedStorage epilogue;
  };

  struct Arguments {
    Element const *a, *b;
    Element* y;
    int64_t rows, columns, depth, lefts, rights;
  };

  /// One product, and the block's tile of it: neighbouring blocks share rows of a.
  struct Job {
    Element const *a, *b;
    Element* y;
    int rows, columns, depth;
    cutlass::MatrixCoord first;

    CUTLASS_DEVICE explicit Job(Arguments const& all)
        : rows(int(all.rows)), columns(int(all.columns)), depth(int(all.depth)) {
      unsigned const across = unsigned(columns + TileShape::kN - 1) / TileShape::kN;
      unsigned const down = unsigned(rows + TileShape::kM - 1) / TileShape::kM;
      unsigned const product = blockIdx.x / across / down;
      first = {int(blockIdx.x / across % down) * TileShape::kM,
               int(blockIdx.x % across) * TileShape::kN};
      a = all.a + product % all.lefts * all.rows * all.depth;
      b = all.b + product % all.rights * all.depth * all.columns;
      y = all.y + product * all.rows * all.columns;
    }
  };

  template <bool kAligned>
  CUTLASS_DEVICE static void run(Arguments const& arguments) {
    release_successor();
    if constexpr (kAligned) {
      multiply(Job(arguments));
    } else {
      multiply_singly(Job(arguments));
    }
  }

 private:
  CUTLASS_DEVICE
  static void multiply(Job const& job) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(shared_memory);
    LayoutA const rows_of_a = LayoutA::packed({job.rows, job.depth});
    LayoutB const rows_of_b = LayoutB::packed({job.depth, job.columns});
    typename Mma::IteratorA::Params const params_a(rows_of_a);
    typename Mma::IteratorB::Params const params_b(rows_of_b);
    typename Mma::IteratorA a(params_a, const_cast<Element*>(job.a), {job.rows, job.depth},
                              threadIdx.x, {job.first.row(), 0});
    typename Mma::IteratorB b(params_b, const_cast<Element*>(job.b), {job.depth, job.columns},
                              threadIdx.x, {0, job.first.column()});
    Mma mma(storage.main_loop, threadIdx.x, cutlass::canonical_warp_idx_sync(), threadIdx.x % 32);
    typename Mma::FragmentC sums;
    sums.clear();
    wait_for_predecessor();
    mma((job.depth + TileShape::kK - 1) / TileShape::kK, sums, a, b, sums);

    typename OutputIterator::Params const params_y{Rows(job.columns)};
    OutputIterator y(params_y, job.y, {job.rows, job.columns}, threadIdx.x, job.first);
    Epilogue epilogue(storage.epilogue, threadIdx.x, cutlass::canonical_warp_idx_sync(),
                      threadIdx.x % 32);
    epilogue(Unchanged({}), y, sums);
  }

  /// The same for addresses that no vector may be read from, which a caller may bring: simple, slow.
  CUTLASS_DEVICE
  static void multiply_singly(Job const& job) {
    wait_for_predecessor();
    LayoutA const of_a = LayoutA::packed({job.rows, job.depth});
    LayoutB const of_b = LayoutB::packed({job.depth, job.columns});
    for (int i = threadIdx.x; i < TileShape::kMN; i += kThreads) {
      int const row = job.first.row() + i / TileShape::kN;
      int const column = job.first.column() + i % TileShape::kN;
      if (row >= job.rows || column >= job.columns) {
        continue;
      }
      float sum = 0;
      for (int k = 0; k < job.depth; ++k) {
        sum += float(job.a[of_a({row, k})]) * float(job.b[of_b({k, column})]);
      }
      job.y[int64_t(row) * job.columns + column] = Element(sum);
    }
  }
};

}  // namespace plantune
