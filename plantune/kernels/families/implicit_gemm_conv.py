"""Forward convolutions as implicit GEMMs on CUTLASS 2.x main loops, for every CUDA arch."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.cutlass.implicit_gemm import GemmParts, ImplicitGemm, read_constants
from plantune.kernels.family import Frame
from plantune.kernels.patterns.other_step import filter_arrangement
from plantune.kernels.weights.constants import Constants


class ImplicitGemmConv(ImplicitGemm):
    """Config: see `ImplicitGemm`."""

    name: ClassVar = "implicit_gemm_conv"
    reads_channels_last: ClassVar = True

    def constants(self, parts: GemmParts, frame: Frame) -> Constants:
        return read_constants(parts, frame, filter_arrangement(parts.step, parts.weight))


FAMILY = ImplicitGemmConv()
