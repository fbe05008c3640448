// Forward convolution as an implicit GEMM: CUTLASS 2.x main loops with an epilogue of our own.
//
//   y = Expression(conv(x, w) * scale + bias, residual, offset)
//
// x, residual and y are NHWC, w is KRSC, all 16-byte aligned; x and w are of one element type,
// residual and y each of its own. scale and bias are float32, one per output channel. Sums are
// float32. Writes `=`; deterministic: split K is summed in the order of its slices.
//
// `run` does all of it, or leaves partial sums to `reduce`. CUTLASS's constructors derive from the
// problem what a launch needs; `make_params` runs them once on the device, and the launches get the
// result by value. It holds no addresses.

#pragma once

#include "cuda/cutlass_channel_epilogue.h"
#include "cuda/launch.h"
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

namespace plantune {

#if __CUDA_ARCH__ >= 900
constexpr bool kWaitsForPredecessor = true;
#else
constexpr bool kWaitsForPredecessor = false;
#endif

/// Who adds the slices of a split K: the last block of each tile, or the kernel `reduce`.
enum class SplitMode : int { kSerial, kParallel };

/// A convolution and how it is cut. `swizzle_log` is the logarithm of the tile columns that blocks
/// of neighbouring indices share.
struct ConvProblem {
  int n, h, w, c;
  int k, r, s, p, q;
  int pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
  int slices;
  SplitMode split_mode;
  int swizzle_log;
};

/// Everything a launch reads and writes. `residual` and `offset` may be null; `partial` and
/// `counters` are used where K is split, and `counters` must be zero before.
struct ConvOperands {
  void const* x;
  void const* w;
  void const* residual;
  void* y;
  float const* scale;
  float const* bias;
  float const* offset;
  float* partial;
  unsigned* counters;
  int64_t applies;  // whether the expression's function is

  CUTLASS_DEVICE ChannelOperands of_channels(int channels) const {
    return {scale, bias, offset, channels, applies != 0};
  }
};

using ImplicitGemmSwizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>;

/// A main loop of CUTLASS with its tiles: the warps of a block divide its tile among themselves.
/// Of a weight's gradient, x is the result's gradient, w the image, and y the weight's.
template <typename Defaults, cutlass::conv::Operator kOperator,
          cutlass::conv::IteratorAlgorithm Algorithm, typename Element_, typename TileShape_,
          typename Expression_, typename Residual_, typename Result_>
struct ImplicitGemm {
  using Element = Element_;    // of the factors
  using Residual = Residual_;  // of what is added
  using Result = Result_;
  using Expression = Expression_;
  using TileShape = TileShape_;
  using Layout = cutlass::layout::TensorNHWC;
  using Swizzle = ImplicitGemmSwizzle;
  using Mma = typename Defaults::Mma;
  static constexpr bool kOfWeight = kOperator == cutlass::conv::Operator::kWgrad;
  using Epilogue = ChannelEpilogue<typename Defaults::Epilogue, Expression, Residual, Result>;
  using OutputIterator = typename Epilogue::OutputIterator;
  using ResidualIterator = typename Epilogue::ResidualIterator;

  static constexpr int kThreads = 32 * Mma::WarpCount::kCount;
  static_assert(kThreads == Epilogue::kThreads, "All warps must take part in the epilogue.");
  static_assert(Epilogue::kPartialFloats == TileShape::kM * TileShape::kN,
                "The partial sums of a slice must be one tile.");

  union SharedStorage {
    typename Mma::SharedStorage main_loop;
    typename Epilogue::SharedStorage epilogue;
  };

  struct Params {
    cutlass::conv::Conv2dProblemSize problem;
    cutlass::gemm::GemmCoord tiles;  // and the slices as its k
    cutlass::MatrixCoord extent;     // output pixels, channels
    SplitMode split_mode;
    int swizzle_log;
    int k_iterations;
    int k_iterations_per_channel;
    typename Mma::IteratorA::Params x;
    typename Mma::IteratorB::Params w;
    typename OutputIterator::Params y;
    typename ResidualIterator::Params residual;

    CUTLASS_DEVICE explicit Params(ConvProblem const& p)
        : problem(p.n, p.h, p.w, p.c, p.k, p.r, p.s, p.p, p.q, p.pad_h, p.pad_w, p.stride_h,
                  p.stride_w, p.dilation_h, p.dilation_w,
                  cutlass::conv::Mode::kCrossCorrelation, p.slices),
          extent(kOfWeight ? p.k : p.n * p.p * p.q, kOfWeight ? p.r * p.s * p.c : p.k),
          split_mode(p.split_mode),
          swizzle_log(p.swizzle_log),
          x(Mma::IteratorA::getParams(problem, kOfWeight ? Layout::packed({p.n, p.p, p.q, p.k})
                                                         : Layout::packed({p.n, p.h, p.w, p.c}))),
          w(problem, kOfWeight ? Layout::packed({p.n, p.h, p.w, p.c})
                               : Layout::packed({p.k, p.r, p.s, p.c})),
          y(cutlass::layout::RowMajor(extent.column())),
          residual(cutlass::layout::RowMajor(extent.column())) {
      tiles = Swizzle::get_tiled_shape(kOperator, problem,
                                       {TileShape::kM, TileShape::kN, TileShape::kK}, p.slices);
      k_iterations =
          cutlass::conv::implicit_gemm_k_iterations(kOperator, TileShape::kK, problem, Algorithm);
      k_iterations_per_channel = cutlass::conv::implicit_gemm_k_iterations_per_channel(
          kOperator, problem, Algorithm);
    }
  };

  /// What Python computed as well; a test holds them together.
  struct Report {
    int params_bytes, shared_bytes, epilogue_bytes, threads;
    int tiles[3];
    int parts;
    int waits;  // whether a launch may overlap the one in front
  };

  CUTLASS_DEVICE
  static void make_params(ConvProblem const& problem, Report* report, Params* params) {
    *params = Params(problem);
    *report = {sizeof(Params),
               sizeof(SharedStorage),
               sizeof(typename Epilogue::SharedStorage),
               kThreads,
               {params->tiles.m(), params->tiles.n(), params->tiles.k()},
               Epilogue::kIterations,
               kWaitsForPredecessor};
  }

  CUTLASS_DEVICE
  static void run(Params const& params, ConvOperands const& operands) {
    release_successor();
    auto const tile = Swizzle::get_tile_offset(params.swizzle_log);
    if (tile.m() >= params.tiles.m() || tile.n() >= params.tiles.n()) {
      return;
    }
    SharedStorage& storage = shared_storage();

    // Main loop.
    typename Mma::IteratorA x(params.x, params.problem, static_cast<Element const*>(operands.x),
                              threadIdx.x, {tile.m() * TileShape::kM, tile.k() * TileShape::kK});
    typename Mma::IteratorB w(params.w, params.problem, static_cast<Element const*>(operands.w),
                              threadIdx.x, {tile.k() * TileShape::kK, tile.n() * TileShape::kN});
    Mma mma(storage.main_loop, threadIdx.x, cutlass::canonical_warp_idx_sync(), threadIdx.x % 32);
    typename Mma::FragmentC sums;
    sums.clear();
    wait_for_predecessor();
    mma(params.k_iterations, sums, x, w, sums, params.k_iterations_per_channel);

    // Epilogue.
    if (params.tiles.k() == 1) {
      Epilogue epilogue(storage.epilogue, operands.of_channels(params.extent.column()),
                        tile.n() * TileShape::kN);
      epilogue(result_of(params, operands, tile), residual_of(params, operands, tile), sums);
      return;
    }
    int64_t const index = tile.m() + int64_t(tile.n()) * params.tiles.m();
    int64_t const slice_floats =
        int64_t(params.tiles.m()) * params.tiles.n() * Epilogue::kPartialFloats;
    float* partial = operands.partial + index * Epilogue::kPartialFloats;
    Epilogue::store_partial(partial + tile.k() * slice_floats, sums);
    if (params.split_mode == SplitMode::kSerial &&
        is_last(operands.counters + index, params.tiles.k())) {
      Epilogue epilogue(storage.epilogue, operands.of_channels(params.extent.column()),
                        tile.n() * TileShape::kN);
      epilogue.reduce(result_of(params, operands, tile), residual_of(params, operands, tile),
                      partial, slice_floats, params.tiles.k());
    }
  }

  /// One part of one tile: blocks are (tiles.m * parts, tiles.n).
  CUTLASS_DEVICE
  static void reduce(Params const& params, ConvOperands const& operands) {
    release_successor();
    wait_for_predecessor();
    int const part = blockIdx.x % Epilogue::kIterations;
    cutlass::gemm::GemmCoord const tile(blockIdx.x / Epilogue::kIterations, blockIdx.y, 0);
    int64_t const index = tile.m() + int64_t(tile.n()) * params.tiles.m();
    int64_t const slice_floats =
        int64_t(params.tiles.m()) * params.tiles.n() * Epilogue::kPartialFloats;
    float const* partial = operands.partial + index * Epilogue::kPartialFloats;
    Epilogue epilogue(shared_storage().epilogue, operands.of_channels(params.extent.column()),
                      tile.n() * TileShape::kN);
    epilogue.reduce_part(result_of(params, operands, tile), residual_of(params, operands, tile),
                         partial, slice_floats, params.tiles.k(), part);
  }

 private:
  CUTLASS_DEVICE
  static SharedStorage& shared_storage() {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    return *reinterpret_cast<SharedStorage*>(shared_memory);
  }

  CUTLASS_DEVICE
  static OutputIterator result_of(Params const& params, ConvOperands const& operands,
                                  cutlass::gemm::GemmCoord const& tile) {
    return OutputIterator(params.y, static_cast<Result*>(operands.y), params.extent, threadIdx.x,
                          {tile.m() * TileShape::kM, tile.n() * TileShape::kN});
  }

  CUTLASS_DEVICE
  static ResidualIterator residual_of(Params const& params, ConvOperands const& operands,
                                      cutlass::gemm::GemmCoord const& tile) {
    auto* rows = static_cast<Residual*>(const_cast<void*>(operands.residual));
    return ResidualIterator(params.residual, rows, params.extent, threadIdx.x,
                            {tile.m() * TileShape::kM, tile.n() * TileShape::kN});
  }

  /// Whether all other slices of the tile have stored their partial sums; these can then be read.
  CUTLASS_DEVICE
  static bool is_last(unsigned* counter, unsigned slices) {
    __threadfence();
    __syncthreads();
    bool const last = threadIdx.x == 0 && atomicAdd(counter, 1u) == slices - 1;
    bool const answer = __syncthreads_or(last);
    __threadfence();
    return answer;
  }
};

/// A forward convolution. kAccess channels are read and written at once.
template <typename Element, typename OperatorClass, typename ArchTag, typename TileShape,
          typename WarpShape, typename InstructionShape, int Stages,
          cutlass::conv::IteratorAlgorithm Algorithm, typename Expression, int kAccess,
          typename Residual, typename Result>
struct ImplicitGemmConv
    : ImplicitGemm<
          cutlass::conv::kernel::DefaultConv2dFprop<
              Element, cutlass::layout::TensorNHWC, Element, cutlass::layout::TensorNHWC, Element,
              cutlass::layout::TensorNHWC, float, OperatorClass, ArchTag, TileShape, WarpShape,
              InstructionShape,
              cutlass::epilogue::thread::LinearCombination<Element, kAccess, float, float>,
              ImplicitGemmSwizzle, Stages, cutlass::arch::OpMultiplyAdd, Algorithm,
              cutlass::conv::StrideSupport::kUnity, kAccess, kAccess>,
          cutlass::conv::Operator::kFprop, Algorithm, Element, TileShape, Expression, Residual,
          Result> {
  static constexpr bool kIsSimt =
      cutlass::platform::is_same<OperatorClass, cutlass::arch::OpClassSimt>::value;
  static_assert(kIsSimt || TileShape::kK == WarpShape::kK, "Warps must not share a tile's K.");
};

/// The same function for addresses that are not 16-byte aligned, which no program makes but a
/// caller may: one output at a time, simple and slow.
template <typename Element, typename Expression, typename Residual, typename Result>
CUTLASS_DEVICE void convolve_unaligned(ConvProblem const& problem, ConvOperands const& operands) {
  release_successor();
  wait_for_predecessor();
  Element const* x = static_cast<Element const*>(operands.x);
  Residual const* residual = static_cast<Residual const*>(operands.residual);
  int64_t const outputs = int64_t(problem.n) * problem.p * problem.q * problem.k;
  int64_t const first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < outputs; i += int64_t(gridDim.x) * blockDim.x) {
    int const k = int(i % problem.k);
    int64_t const pixel = i / problem.k;
    int const q = int(pixel % problem.q);
    int const p = int(pixel / problem.q % problem.p);
    int64_t const n = pixel / problem.q / problem.p;
    float sum = 0;
    for (int rs = 0; rs < problem.r * problem.s; ++rs) {
      int const h = p * problem.stride_h - problem.pad_h + rs / problem.s * problem.dilation_h;
      int const w = q * problem.stride_w - problem.pad_w + rs % problem.s * problem.dilation_w;
      if (h < 0 || h >= problem.h || w < 0 || w >= problem.w) {
        continue;
      }
      Element const* a = x + ((n * problem.h + h) * problem.w + w) * problem.c;
      Element const* b = static_cast<Element const*>(operands.w) +
                         (int64_t(k) * problem.r * problem.s + rs) * problem.c;
      float products = 0;
      for (int c = 0; c < problem.c; ++c) {
        products += float(a[c]) * float(b[c]);
      }
      sum += products;
    }
    At const at{sum * operands.scale[k] + operands.bias[k], residual ? float(residual[i]) : 0.0f,
                operands.offset ? *operands.offset : 0.0f, operands.applies != 0};
    static_cast<Result*>(operands.y)[i] = Result(Expression::of(at));
  }
}

/// Zeroes the counters of a split K.
CUTLASS_DEVICE void clear_counters(unsigned* counters, int count) {
  release_successor();
  wait_for_predecessor();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    counters[i] = 0;
  }
}

}  // namespace plantune

/// The kernels of one instantiation that read aligned addresses.
/// `reduce` is told that one block is enough: else the assembler spills a word for one more.
#define PLANTUNE_IMPLICIT_GEMM(Conv)                                                           \
  extern "C" __global__ void __launch_bounds__(Conv::kThreads)                                 \
      run(__grid_constant__ const Conv::Params params,                                         \
          __grid_constant__ const plantune::ConvOperands operands) {                           \
    Conv::run(params, operands);                                                               \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(Conv::kThreads, 1)                              \
      reduce(__grid_constant__ const Conv::Params params,                                      \
             __grid_constant__ const plantune::ConvOperands operands) {                        \
    Conv::reduce(params, operands);                                                            \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(1)                                              \
      make_params(plantune::ConvProblem problem, Conv::Report* report, Conv::Params* params) { \
    Conv::make_params(problem, report, params);                                                \
  }                                                                                            \
  extern "C" __global__ void __launch_bounds__(256) clear(unsigned* counters, int count) {     \
    plantune::clear_counters(counters, count);                                                 \
  }

/// All kernels of a forward convolution.
#define PLANTUNE_IMPLICIT_GEMM_CONV(Conv)                                                      \
  PLANTUNE_IMPLICIT_GEMM(Conv)                                                                 \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      run_unaligned(plantune::ConvProblem problem, plantune::ConvOperands operands) {          \
    plantune::convolve_unaligned<Conv::Element, Conv::Expression, Conv::Residual,              \
                                 Conv::Result>(problem, operands);                             \
  }
