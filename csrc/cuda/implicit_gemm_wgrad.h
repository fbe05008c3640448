// The gradient of a convolution's weight as an implicit GEMM, on CUTLASS 2.x main loops:
//
//   dw[k, r, s, c] = sum over pixels of dy[pixel, k] * x[pixel at tap (r, s), c]
//
// dy and x are NHWC of one element type, dw is KRSC of its own, all 16-byte aligned. Sums are float32;
// what slices of the pixels leave is added in their order: deterministic. Writes `=`. The kernels are
// those of `implicit_gemm_conv.h`, whose rows are output channels here, and whose columns taps of channels.

#pragma once

#include "cuda/implicit_gemm_conv.h"
#include "cutlass/conv/kernel/default_conv2d_wgrad.h"

namespace plantune {

/// kAccess channels are read and written at once.
template <typename Element, typename OperatorClass, typename ArchTag, typename TileShape,
          typename WarpShape, typename InstructionShape, int Stages,
          cutlass::conv::IteratorAlgorithm Algorithm, typename Expression, int kAccess,
          typename Residual, typename Result>
struct ImplicitGemmWgrad
    : ImplicitGemm<
          cutlass::conv::kernel::DefaultConv2dWgrad<
              Element, cutlass::layout::TensorNHWC, Element, cutlass::layout::TensorNHWC, Element,
              cutlass::layout::TensorNHWC, float, OperatorClass, ArchTag, TileShape, WarpShape,
              InstructionShape,
              cutlass::epilogue::thread::LinearCombination<Element, kAccess, float, float>,
              ImplicitGemmSwizzle, Stages, cutlass::arch::OpMultiplyAdd, Algorithm,
              cutlass::conv::StrideSupport::kStrided, kAccess, kAccess>,
          cutlass::conv::Operator::kWgrad, Algorithm, Element, TileShape, Expression, Residual,
          Result> {};

}  // namespace plantune
