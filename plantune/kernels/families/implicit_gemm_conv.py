"""Forward convolutions as implicit GEMMs on CUTLASS 2.x main loops, for every CUDA arch.

`csrc/cuda/implicit_gemm_conv.h` has the kernels. Convolutions of all sizes share a binary, also
with other splits of K: only the tile, the pipeline and the type are compiled in.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from plantune.errors import IllegalCandidate
from plantune.kernels.constants import Constants, Form, floats
from plantune.kernels.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, Step, refuse
from plantune.kernels.cutlass.gemm import (
    INDEX_MAX,
    Gemm,
    counters_of,
    estimate_us,
    partial_bytes,
    why_not_channels,
    why_not_mode,
    why_not_split,
    why_not_swizzle,
    why_not_tile,
)
from plantune.kernels.cutlass.launch import (
    COUNTER_BYTES,
    SPLIT_MODES,
    ConvOperands,
    ConvProblem,
    evenly_spread_bytes,
    prepare,
)
from plantune.kernels.cutlass.main_loop import ELEMENTS, MainLoop
from plantune.kernels.launcher import Launcher
from plantune.kernels.patterns.epilogue import ConvEpilogue, ConvParts, conv_epilogue
from plantune.kernels.patterns.expression import Chain, functions_in, rendered
from plantune.kernels.patterns.other_step import as_convolution, filter_form
from plantune.space.search_space import SearchSpace

# The optimized iterators keep a bit for each row and column of the filter.
FILTER_MAX = 32
# Channels that cp.async moves at least, of 16 bits.
ACCESS_MIN = 2
UNALIGNED_THREADS, UNALIGNED_BLOCKS_MAX = 256, 1 << 16
SOURCE = """#include "cuda/implicit_gemm_conv.h"
{functors}using namespace cutlass;
using Conv = plantune::ImplicitGemmConv<
    {arguments}, conv::IteratorAlgorithm::{algorithm},
    {expression}, {access}>;
static_assert(sizeof(Conv::SharedStorage) == {shared_bytes}, "A launch asks for other memory.");
static_assert(Conv::kThreads == {threads}, "A launch has other threads.");
PLANTUNE_IMPLICIT_GEMM_CONV(Conv)
"""


@dataclass(frozen=True)
class GemmParts(ConvParts):
    """A convolution, and what it is as a product of matrices."""

    gemm: Gemm

    def loop(self, config: Attrs) -> MainLoop:
        return MainLoop.of(config, self.gemm.dtype, self.access(config))

    def access(self, config: Attrs) -> int:
        """Channels that are moved at once."""
        vector = MainLoop.of(config, self.gemm.dtype).vector
        return math.gcd(vector, self.gemm.channels, self.gemm.n)


class ImplicitGemmConv(CudaFamily[GemmParts]):
    """Config: the tile of a block and of its warps, `stages`, `math`; who computes which part.

    `split_k` blocks share a tile, each a part of the channels. With the `split_mode` serial the
    last of them adds all parts, with parallel a second kernel does. `swizzle` columns of tiles are
    taken before the next row of tiles.
    """

    name: ClassVar = "implicit_gemm_conv"
    reads_channels_last: ClassVar = True
    image_layout = "nhwc"
    build_s = 2.5

    def configs(self, space: SearchSpace) -> tuple[Attrs, ...]:
        return possible_configs(space, self.name)

    def read(self, step: Step) -> GemmParts:
        step = as_convolution(step)
        parts = GemmParts(step, conv_epilogue(step), Gemm.of(step))
        gemm, known = parts.gemm, ", ".join(ELEMENTS)
        large = max(gemm.m, *gemm.image_elements) > INDEX_MAX
        refuse(
            {
                "only convolutions without groups": parts.conv.attrs["groups"] != 1,
                f"CUTLASS multiplies {known}, not {gemm.dtype}": gemm.dtype not in ELEMENTS,
                "there is nothing to compute": 0 in (gemm.m, gemm.n, gemm.channels),
                "its pixels, or the elements of an image, do not fit into 32 bits": large,
            }
        )
        if gemm.dtype != "float32" and (reason := why_not_channels(gemm, ACCESS_MIN)):
            raise IllegalCandidate(reason)
        return parts

    def why_not_config(self, parts: GemmParts, config: Attrs, arch: Arch) -> str | None:
        gemm, loop = parts.gemm, parts.loop(config)
        return (
            loop.why_not(arch)
            or why_not_tf32(loop)
            or why_not_channels(gemm, ACCESS_MIN if loop.math == "mma" else loop.vector)
            or why_not_tile(gemm, loop)
            or why_not_split(gemm, config)
            or why_not_swizzle(gemm, config)
        )

    def threads(self, parts: GemmParts, config: Attrs) -> int:
        return parts.loop(config).threads

    def shared_bytes(self, parts: GemmParts, config: Attrs, arch: Arch) -> int:
        return parts.loop(config).shared_bytes(arch)

    def workspace_bytes(self, parts: GemmParts, config: Attrs) -> int:
        gemm = parts.gemm
        return partial_bytes(gemm, config) + counters_of(gemm, config) * COUNTER_BYTES

    def source(self, parts: GemmParts, config: Attrs, arch: Arch) -> str:
        loop = parts.loop(config)
        return SOURCE.format(
            arguments=loop.arguments(arch),
            algorithm="kOptimized" if max(parts.gemm.filter) <= FILTER_MAX else "kAnalytic",
            shared_bytes=loop.shared_bytes(arch),
            threads=loop.threads,
            access=parts.access(config),
            **rendered(_compiled_chain(parts.epilogue)),
        )

    def bind(self, parts: GemmParts, config: Attrs, frame: Frame) -> Binding:
        constants = self.constants(parts, frame)
        with torch.cuda.device(frame.device):
            launch = _launching(parts, config, frame, constants)
        return Binding(launch, constants=constants.all)

    def constants(self, parts: GemmParts, frame: Frame) -> Constants:
        """What the kernels read of weights."""
        return read_constants(parts, frame, filter_form(parts.step, parts.weight))

    def estimate_us(self, parts: GemmParts, config: Attrs, arch: Arch) -> float:
        return estimate_us(parts.step, parts.gemm, config, arch, ImplicitGemmConv.name)


@cache
def possible_configs(space: SearchSpace, family: str) -> tuple[Attrs, ...]:
    """Those of the space's product that can run some step; most of it cannot."""

    def is_possible(config: Attrs) -> bool:
        loops = (MainLoop.of(config, dtype) for dtype in ELEMENTS)
        return why_not_mode(config) is None and any(
            loop.why_not(space.arch) is None for loop in loops
        )

    return tuple(filter(is_possible, space.configs(family)))


def _compiled_chain(epilogue: ConvEpilogue) -> Chain:
    """All parts of the usual order, so that a binary serves all steps that have it: what is missing
    is zero or, of the function, switched off.
    """
    try:
        function = epilogue.only_function()
    except IllegalCandidate:
        return epilogue.chain
    return ("residual", function or "relu", "offset")


def why_not_tf32(loop: MainLoop) -> str | None:
    precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    if loop.math == "tf32" and precision != "tf32":
        return f"torch.backends.cudnn.conv.fp32_precision is {precision}, not tf32"
    return None


def read_constants(parts: GemmParts, frame: Frame, weight: Form) -> Constants:
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


def _problem(parts: GemmParts, config: Attrs) -> ConvProblem:
    conv = parts.conv
    x, w, y = (parts.step.types[name].shape for name in (*conv.inputs, conv.name))
    n, c, height, width = x
    attrs = conv.attrs
    return ConvProblem(
        *(n, height, width, c, w[0], w[2], w[3], y[2], y[3]),
        *(*attrs["padding"], *attrs["stride"], *attrs["dilation"]),
        *(config["split_k"], SPLIT_MODES[config["split_mode"]]),
        config["swizzle"].bit_length() - 1,
    )


def _launching(
    parts: GemmParts, config: Attrs, frame: Frame, constants: Constants
) -> Callable[[int], None]:
    """A call that enqueues one convolution."""
    gemm, images = parts.gemm, {"x": parts.x, "y": parts.y, "residual": parts.epilogue.residual}
    problem, counters = _problem(parts, config), counters_of(gemm, config)
    access = parts.access(config) * parts.step.types[parts.x].torch_dtype.itemsize
    run_tiles = launching_tiles(config, frame, problem, counters)
    blocks = min(-(-gemm.m * gemm.n // UNALIGNED_THREADS), UNALIGNED_BLOCKS_MAX)
    unaligned = Launcher(frame.built, blocks, UNALIGNED_THREADS, name="run_unaligned")
    usual = {
        word: torch.full((gemm.n,), number, device=frame.device)
        for word, number in (("scale", 1.0), ("bias", 0.0))
        if word not in constants
    }
    same: dict[str, Any] = {"applies": bool(functions_in(parts.epilogue.chain))}
    if config["split_k"] > 1 and frame.workspace is not None:
        work = frame.workspace.data_ptr()
        same |= {"partial": work, "counters": work + partial_bytes(gemm, config)}

    def launch(stream: int) -> None:
        vectors = {word: tensor.data_ptr() for word, tensor in usual.items()}
        operands = constants.into(ConvOperands, images, **vectors, **same)
        if (operands.x | (operands.residual or 0)) % access:
            unaligned.launch(stream, problem, operands, programmatic=False)
        else:
            run_tiles(stream, operands)

    return launch


def launching_tiles(
    config: Attrs, frame: Frame, problem: ConvProblem, counters: int
) -> Callable[[int, ConvOperands], None]:
    """A call that enqueues the tiles, with what clears counters before or adds slices after."""
    prepared = prepare(frame.built, problem, frame.device)
    report, programmatic = prepared.report, bool(prepared.report.waits)
    rows, columns, slices = report.tiles
    width = config["swizzle"]

    def launcher(name: str, grid: tuple[int, ...], shared_bytes: int) -> Launcher:
        if programmatic:
            shared_bytes = evenly_spread_bytes(shared_bytes, math.prod(grid), frame.device)
        return Launcher(frame.built, grid, report.threads, name=name, shared_bytes=shared_bytes)

    clear = Launcher(frame.built, 1, 256, name="clear")
    grid = (rows * width, -(-columns // width), slices)
    launchers = [launcher("run", grid, report.shared_bytes)]
    if slices > 1 and config["split_mode"] == "parallel":
        grid = (rows * report.parts, columns, 1)
        launchers.append(launcher("reduce", grid, report.epilogue_bytes))

    def launch(stream: int, operands: ConvOperands) -> None:
        if counters:
            memory, count = ctypes.c_void_p(operands.counters), ctypes.c_int(counters)
            clear.launch(stream, memory, count, programmatic=programmatic)
        for each in launchers:
            each.launch(stream, prepared.params, operands, programmatic=programmatic)

    return launch


FAMILY = ImplicitGemmConv()
