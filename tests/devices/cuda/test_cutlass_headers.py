"""CUTLASS's headers beside those of any release of CUDA."""

from __future__ import annotations

from plantune.devices.cuda.build import compile_cuda
from plantune.space.arch import load_arch

# Whether std::tuple_size has a definition for a tuple of CuTe's.
SOURCE = """#include "cuda/cutlass_channel_epilogue.h"
#include "cute/container/tuple.hpp"
template <typename T, int = sizeof(T)> constexpr bool is_defined(int) { return true; }
template <typename T> constexpr bool is_defined(...) { return false; }
static_assert(is_defined<cuda::std::tuple_size<cute::tuple<int>>>(0), "CuTe's own is gone.");
static_assert(!is_defined<std::tuple_size<cute::tuple<int>>>(0), "CUTLASS declares names of std.");
extern "C" __global__ void run() {}
"""


def test_nothing_of_std_is_declared_by_cutlass() -> None:
    """Headers of CUDA 13.2 declare `std::tuple_size` otherwise, and then nothing would compile."""
    compile_cuda(SOURCE, load_arch("sm80"))


LISTS = """#include "cuda/implicit_gemm_wgrad.h"
#if _CCCL_META_UNROLL_LIMIT > 10
#error "long lists of types"
#endif
extern "C" __global__ void run() {}
"""


def test_the_lists_of_types_of_cccl_are_short() -> None:
    """Long ones would take a seventh of each compilation."""
    compile_cuda(LISTS, load_arch("sm80"))
