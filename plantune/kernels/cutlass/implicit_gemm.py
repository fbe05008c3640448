"""Convolutions as implicit GEMMs on CUTLASS 2.x main loops: `csrc/cuda/implicit_gemm_conv.h`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from plantune.errors import IllegalCandidate
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, Frame, Step, refuse
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.cutlass import family as cutlass
from plantune.kernels.cutlass.gemm import (
    Gemm,
    counters_of,
    why_not_channels,
    why_not_split,
    why_not_swizzle,
    why_not_tile,
)
from plantune.kernels.cutlass.launch import ConvOperands
from plantune.kernels.patterns.epilogue import ConvParts, conv_epilogue, not_factors
from plantune.kernels.patterns.expression import Chain, functions_in
from plantune.kernels.patterns.other_step import as_convolution
from plantune.kernels.weights.constants import Arrangement, Constants, floats

UNALIGNED_THREADS, UNALIGNED_BLOCKS_MAX = 256, 1 << 16


@dataclass(frozen=True)
class GemmParts(ConvParts, cutlass.ProductParts):
    """A convolution, and what it is as a product of matrices."""


class ImplicitGemm(cutlass.ProductFamily[GemmParts]):
    """Config: see `ProductFamily`; `swizzle` columns of tiles are taken before the next row of
    tiles.
    """

    kernel = ("implicit_gemm_conv", "ImplicitGemmConv", "PLANTUNE_IMPLICIT_GEMM_CONV")

    def read(self, step: Step) -> GemmParts:
        step = as_convolution(step)
        epilogue, gemm = conv_epilogue(step), Gemm.of(step)
        parts = GemmParts(step, gemm, (gemm.channels, gemm.n), epilogue)
        refuse(
            {
                **cutlass.not_a_product(gemm, parts.conv.attrs["groups"], gemm.m),
                **not_factors(step, parts.conv),
                **vector_kernel.not_an_element(*self.dtypes(parts)),
            }
        )
        return parts

    def dtypes(self, parts: GemmParts) -> tuple[str, str]:
        """Without a residual none is read, so that one binary serves both."""
        result = parts.step.types[parts.y].dtype
        residual = parts.epilogue.residual
        return result if residual is None else parts.step.types[residual].dtype, result

    def why_not_config(self, parts: GemmParts, config: Attrs, arch: Arch) -> str | None:
        gemm, loop = parts.gemm, parts.loop(config)
        return (
            loop.why_not(arch)
            or cutlass.why_not_tf32(parts.step, loop)
            or why_not_channels(gemm, 1 if loop.math == "mma" else loop.vector)
            or why_not_tile(gemm, loop)
            or why_not_split(gemm, config)
            or why_not_swizzle(gemm, config)
        )

    def can_be_guessed(self, parts: GemmParts, config: Attrs) -> bool:
        """Single 16-bit channels are moved by many more instructions than estimates count."""
        return parts.loop(config).math != "mma" or parts.access(config) > 1

    def chain(self, parts: GemmParts) -> Chain:
        """All parts of the usual order, so that a binary serves all steps that have it: what is
        missing is zero or, of the function, switched off.
        """
        try:
            function = parts.epilogue.only_function()
        except IllegalCandidate:
            return parts.epilogue.chain
        return ("residual", function or "relu", "offset")

    def bind(self, parts: GemmParts, config: Attrs, frame: Frame) -> Binding:
        constants = self.constants(parts, frame)
        with torch.cuda.device(frame.device):
            launch = _launching(parts, config, frame, constants)
        return Binding(launch, constants=constants.all)

    @abstractmethod
    def constants(self, parts: GemmParts, frame: Frame) -> Constants:
        """What the kernels read of weights."""


def read_constants(parts: GemmParts, frame: Frame, weight: Arrangement) -> Constants:
    """The filter as KRSC, float32 vectors, and the offset."""
    epilogue, k = parts.epilogue, parts.outputs
    return Constants(
        frame,
        {
            "w": (parts.weight, weight),
            "scale": (epilogue.scale, floats(k)),
            "bias": (epilogue.bias, floats(k)),
            "offset": (epilogue.offset, floats(1)),
        },
    )


def _launching(
    parts: GemmParts, config: Attrs, frame: Frame, constants: Constants
) -> Callable[[int], None]:
    """A call that enqueues one convolution."""
    gemm, images = parts.gemm, {"x": parts.x, "y": parts.y, "residual": parts.epilogue.residual}
    shapes: Any = tuple(parts.step.types[n].shape for n in (*parts.conv.inputs, parts.conv.name))
    problem = cutlass.problem_of(shapes, parts.conv.attrs, config, config["swizzle"])
    access = parts.access(config) * parts.step.types[parts.x].torch_dtype.itemsize
    residual = parts.step.types[parts.epilogue.residual or parts.x].torch_dtype
    added = min(parts.access(config) * residual.itemsize, vector_kernel.VECTOR_BYTES)
    run_tiles = cutlass.launching_tiles(config, frame, problem, counters_of(gemm, config))
    blocks = min(-(-gemm.m * gemm.n // UNALIGNED_THREADS), UNALIGNED_BLOCKS_MAX)
    unaligned = Launcher(frame.built, blocks, UNALIGNED_THREADS, name="run_unaligned")
    usual = {
        word: torch.full((gemm.n,), number, device=frame.device)
        for word, number in (("scale", 1.0), ("bias", 0.0))
        if word not in constants
    }
    same: dict[str, Any] = {"applies": bool(functions_in(parts.epilogue.chain))}
    same |= cutlass.parts_at(gemm, config, frame.scratch)

    def launch(stream: int) -> None:
        vectors = {word: tensor.data_ptr() for word, tensor in usual.items()}
        operands = constants.into(ConvOperands, images, **vectors, **same)
        if operands.x % access or (operands.residual or 0) % added:
            unaligned.launch(stream, problem, operands, programmatic=False)
        else:
            run_tiles(stream, operands)

    return launch
