"""Products of other widths than the powers of two that `csrc/cuda/hopper_mma.h` knows."""

from __future__ import annotations

from plantune.kernels.hopper.design import ELEMENTS

KNOWN = (64, 128, 256)
NAMES = {"float16": "F16", "bfloat16": "BF16"}
# CUTLASS keeps most of them in a header of its own, half a second to compile.
ATOM = """#include <cute/arch/mma_sm90_gmma_ext.hpp>
template <>
struct plantune::MmaAtom<{element}, {columns}> {{
  using Type = cute::SM90::GMMA::MMA_64x{columns}x16_F32{name}{name}_SS<
      cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>;
}};"""


def other_width(dtype: str, columns: int) -> str:
    """Source behind that header which lets products have so many columns, a multiple of 8."""
    if columns in KNOWN:
        return ""
    return ATOM.format(element=ELEMENTS[dtype], name=NAMES[dtype], columns=columns)
