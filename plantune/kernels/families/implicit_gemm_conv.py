"""Forward convolutions as implicit GEMMs on CUTLASS 2.x main loops, for every CUDA arch.

`csrc/cuda/implicit_gemm_conv.h` has the kernels. Convolutions of all sizes share a binary, also
with other splits of K: only the tile, the pipeline and the type are compiled in.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import ClassVar

import torch

from plantune.canonical import Attrs
from plantune.cuda.kernel import Kernel
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.constants import Constant, conv_weight
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.cutlass.cost import Rates, estimate_us
from plantune.kernels.cutlass.gemm import (
    INDEX_MAX,
    Gemm,
    counters_of,
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
    address_of,
    evenly_spread_bytes,
    prepare,
)
from plantune.kernels.cutlass.main_loop import ELEMENTS, MainLoop
from plantune.kernels.family import Binding, Frame, images
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue
from plantune.space.arch import Arch
from plantune.space.search_space import SearchSpace

# The optimized iterators keep a bit for each row and column of the filter.
FILTER_MAX = 32
UNALIGNED_THREADS, UNALIGNED_BLOCKS_MAX = 256, 1 << 16
SOURCE = """#include "cuda/implicit_gemm_conv.h"
using namespace cutlass;
using Conv = plantune::ImplicitGemmConv<
    {arguments}, conv::IteratorAlgorithm::{algorithm}>;
static_assert(sizeof(Conv::SharedStorage) == {shared_bytes}, "A launch asks for other memory.");
static_assert(Conv::kThreads == {threads}, "A launch has other threads.");
PLANTUNE_IMPLICIT_GEMM_CONV(Conv)
"""


class ImplicitGemmConv(CudaFamily):
    """Config: the tile of a block and of its warps, `stages`, `math`; who computes which part.

    `split_k` blocks share a tile, each a part of the channels. With the `split_mode` serial the
    last of them adds all parts, with parallel a second kernel does. `swizzle` columns of tiles are
    taken before the next row of tiles.
    """

    name: ClassVar = "implicit_gemm_conv"
    reads_channels_last: ClassVar = True
    build_s = 2.5

    def configs(self, space: SearchSpace) -> tuple[Attrs, ...]:
        return _possible_configs(space)

    def why_not_step(self, step: Step) -> str | None:
        try:
            epilogue = conv_epilogue(step)
        except IllegalCandidate as reason:
            return str(reason)
        if epilogue.conv.attrs["groups"] != 1:
            return "only convolutions without groups"
        return _why_not_gemm(Gemm.of(step))

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        gemm = Gemm.of(step)
        loop = MainLoop.of(config, gemm.dtype)
        return (
            loop.why_not(arch)
            or _why_not_tf32(loop)
            or why_not_channels(gemm, loop.vector)
            or why_not_tile(gemm, loop)
            or why_not_split(gemm, config)
            or why_not_swizzle(gemm, config)
        )

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, "nhwc")

    def threads(self, step: Step, config: Attrs) -> int:
        return MainLoop.of(config, Gemm.of(step).dtype).threads

    def block_bytes(self, step: Step, config: Attrs, arch: Arch) -> int:
        return MainLoop.of(config, Gemm.of(step).dtype).shared_bytes(arch)

    def workspace_bytes(self, step: Step, config: Attrs) -> int:
        gemm = Gemm.of(step)
        return partial_bytes(gemm, config) + counters_of(gemm, config) * COUNTER_BYTES

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        gemm = Gemm.of(step)
        loop = MainLoop.of(config, gemm.dtype)
        return SOURCE.format(
            arguments=loop.arguments(arch),
            algorithm="kOptimized" if max(gemm.filter) <= FILTER_MAX else "kAnalytic",
            shared_bytes=loop.shared_bytes(arch),
            threads=loop.threads,
        )

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        epilogue = conv_epilogue(step)
        constants = Constants(step, epilogue, frame)
        with torch.cuda.device(frame.device):
            launch = _launching(step, config, frame, constants)
        return Binding(launch, constants=constants.all)

    def estimate_us(self, step: Step, config: Attrs) -> float:
        return estimate_us(step, config)

    def estimate_us_on(self, step: Step, config: Attrs, arch: Arch) -> float:
        return estimate_us(step, config, Rates.of(arch))


@cache
def _possible_configs(space: SearchSpace) -> tuple[Attrs, ...]:
    """Those of the space's product that can run some step; most of it cannot."""

    def is_possible(config: Attrs) -> bool:
        loops = (MainLoop.of(config, dtype) for dtype in ELEMENTS)
        return why_not_mode(config) is None and any(
            loop.why_not(space.arch) is None for loop in loops
        )

    return tuple(filter(is_possible, space.configs(ImplicitGemmConv.name)))


def _why_not_gemm(gemm: Gemm) -> str | None:
    if gemm.dtype not in ELEMENTS:
        return f"CUTLASS multiplies {', '.join(ELEMENTS)}, not {gemm.dtype}"
    if 0 in (gemm.m, gemm.n, gemm.channels):
        return "there is nothing to compute"
    if max(gemm.m, *gemm.image_elements) > INDEX_MAX:
        return "its pixels, or the elements of an image, do not fit into 32 bits"
    return None if gemm.dtype == "float32" else why_not_channels(gemm, 8)


def _why_not_tf32(loop: MainLoop) -> str | None:
    precision = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    if loop.math == "tf32" and precision != "tf32":
        return f"torch.backends.cudnn.conv.fp32_precision is {precision}, not tf32"
    return None


class Constants:
    """What the kernels read of weights: the filter as KRSC, float32 vectors, and the offset."""

    def __init__(self, step: Step, epilogue: ConvEpilogue, frame: Frame) -> None:
        name, values = epilogue.conv.inputs[1], frame.values
        k = step.types[name].shape[0]
        self.weight = conv_weight(step, name, frame)
        like = torch.empty(0, dtype=torch.float32, device=frame.device)
        self.scale, self.bias = like.new_ones(k), like.new_zeros(k)
        self.offset = like.new_zeros(1) if epilogue.offset is not None else None
        parts = (
            (epilogue.scale, self.scale),
            (epilogue.bias, self.bias),
            (epilogue.offset, self.offset),
        )
        vectors = [
            Constant(values, part, memory)
            for part, memory in parts
            if part is not None and memory is not None
        ]
        self.all = (self.weight, *vectors)


def _problem(step: Step, config: Attrs) -> ConvProblem:
    conv = step.nodes[0]
    x, w, y = (step.types[name].shape for name in (*conv.inputs, conv.name))
    n, c, height, width = x
    attrs = conv.attrs
    return ConvProblem(
        *(n, height, width, c, w[0], w[2], w[3], y[2], y[3]),
        *(*attrs["padding"], *attrs["stride"], *attrs["dilation"]),
        *(config["split_k"], SPLIT_MODES[config["split_mode"]]),
        config["swizzle"].bit_length() - 1,
    )


def _operands(step: Step, config: Attrs, frame: Frame, constants: Constants) -> ConvOperands:
    """What stays the same; images and weight are those of each launch."""
    gemm, work = Gemm.of(step), address_of(frame.workspace)
    split = config["split_k"] > 1
    return ConvOperands(
        scale=address_of(constants.scale),
        bias=address_of(constants.bias),
        offset=address_of(constants.offset),
        partial=work if split else None,
        counters=work + partial_bytes(gemm, config) if work and split else None,
        relu=conv_epilogue(step).relu,
    )


def _launching(
    step: Step, config: Attrs, frame: Frame, constants: Constants
) -> Callable[[int], None]:
    """A call that enqueues one convolution."""
    epilogue, gemm, values = conv_epilogue(step), Gemm.of(step), frame.values
    x, residual, y = epilogue.conv.inputs[0], epilogue.residual, step.nodes[-1].name
    problem, operands = _problem(step, config), _operands(step, config, frame, constants)
    access = MainLoop.of(config, gemm.dtype).vector * step.types[x].torch_dtype.itemsize
    run_tiles = _launching_tiles(config, frame, problem, counters_of(gemm, config))
    unaligned = Kernel(frame.built, "run_unaligned")
    blocks = min(-(-gemm.m * gemm.n // UNALIGNED_THREADS), UNALIGNED_BLOCKS_MAX)

    def launch(stream: int) -> None:
        operands.x = values[x].data_ptr()
        operands.w = constants.weight.tensor.data_ptr()
        operands.y = values[y].data_ptr()
        operands.residual = None if residual is None else values[residual].data_ptr()
        if (operands.x | (operands.residual or 0)) % access:
            unaligned.launch(stream, (blocks, 1, 1), UNALIGNED_THREADS, (problem, operands))
        else:
            run_tiles(stream, operands)

    return launch


def _launching_tiles(
    config: Attrs, frame: Frame, problem: ConvProblem, counters: int
) -> Callable[[int, ConvOperands], None]:
    """A call that enqueues the tiles, with what clears counters before or adds slices after."""
    prepared = prepare(frame.built, problem, frame.device)
    report, programmatic = prepared.report, bool(prepared.report.waits)
    rows, columns, slices = report.tiles
    width = config["swizzle"]
    run, reduce, clear = (Kernel(frame.built, name) for name in ("run", "reduce", "clear"))
    grids = [(run, (rows * width, -(-columns // width), slices), report.shared_bytes)]
    if slices > 1 and config["split_mode"] == "parallel":
        grids.append((reduce, (rows * report.parts, columns, 1), report.epilogue_bytes))
    if programmatic:
        grids = [
            (kernel, grid, evenly_spread_bytes(shared, math.prod(grid), frame.device))
            for kernel, grid, shared in grids
        ]

    def launch(stream: int, operands: ConvOperands) -> None:
        if counters:
            memory, count = ctypes.c_void_p(operands.counters), ctypes.c_int(counters)
            clear.launch(stream, (1, 1, 1), 256, (memory, count), programmatic=programmatic)
        for kernel, grid, shared_bytes in grids:
            kernel.launch(
                stream,
                grid,
                report.threads,
                (prepared.params, operands),
                shared_bytes=shared_bytes,
                programmatic=programmatic,
            )

    return launch


FAMILY = ImplicitGemmConv()
