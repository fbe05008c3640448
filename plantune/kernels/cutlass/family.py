"""What families of products on CUTLASS 2.x main loops share.

Problems of all sizes share a binary, also with other splits of K: only the tile, the pipeline and
the type are compiled in.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

from plantune.graph.step import Step
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, Frame, Parts
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.cutlass.gemm import (
    INDEX_MAX,
    Gemm,
    counters_of,
    estimate_us,
    partial_bytes,
    why_not_mode,
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
from plantune.kernels.patterns.expression import Chain, rendered
from plantune.kernels.patterns.other_step import float32_precision
from plantune.space.search_space import SearchSpace

# The optimized iterators keep a bit for each row and column of the filter.
FILTER_MAX = 32
# Channels that cp.async moves at least, of 16 bits.
ACCESS_MIN = 2
# Whose costs estimates rest on.
COSTS = "implicit_gemm_conv"
SOURCE = """#include "cuda/{header}.h"
{functors}using namespace cutlass;
using Conv = plantune::{kernel}<
    {arguments}, conv::IteratorAlgorithm::{algorithm},
    {expression}, {access}, {residual}, {result}>;
static_assert(sizeof(Conv::SharedStorage) == {shared_bytes}, "A launch asks for other memory.");
static_assert(Conv::kThreads == {threads}, "A launch has other threads.");
{entries}(Conv)
"""


@dataclass(frozen=True)
class ProductParts(Parts):
    """A step as a product of matrices, and the neighbouring channels of its two operands."""

    gemm: Gemm
    widths: tuple[int, int]

    def access(self, config: Attrs) -> int:
        """Channels that are moved at once."""
        return math.gcd(MainLoop.of(config, self.gemm.dtype).vector, *self.widths)

    def loop(self, config: Attrs) -> MainLoop:
        return MainLoop.of(config, self.gemm.dtype, self.access(config))


G = TypeVar("G", bound=ProductParts)


class ProductFamily(CudaFamily[G]):
    """Config: the tile of a block and of its warps, `stages`, `math`; who computes which part.

    `split_k` blocks share a tile, each a part of its depth. With the `split_mode` serial the last
    of them adds all parts, with parallel a second kernel does.
    """

    image_layout = "nhwc"
    mixes_types: ClassVar = True
    build_s = 2.5
    # The header, its class, and the macro that makes its entries.
    kernel: ClassVar[tuple[str, str, str]]

    def configs(self, space: SearchSpace) -> tuple[Attrs, ...]:
        return possible_configs(space, self.name)

    def threads(self, parts: G, config: Attrs) -> int:
        return parts.loop(config).threads

    def shared_bytes(self, parts: G, config: Attrs, arch: Arch) -> int:
        return parts.loop(config).shared_bytes(arch)

    def workspace_bytes(self, parts: G, config: Attrs) -> int:
        gemm = parts.gemm
        return partial_bytes(gemm, config) + counters_of(gemm, config) * COUNTER_BYTES

    def chain(self, parts: G) -> Chain:
        """What follows the product."""
        return ()

    def dtypes(self, parts: G) -> tuple[str, str]:
        """Of what is added, and of the result."""
        result = parts.step.types[parts.step.nodes[-1].name].dtype
        return result, result

    def source(self, parts: G, config: Attrs, arch: Arch) -> str:
        loop, (header, kernel, entries) = parts.loop(config), self.kernel
        residual, result = (ELEMENTS[dtype] for dtype in self.dtypes(parts))
        return SOURCE.format(
            **{"header": header, "kernel": kernel, "entries": entries},
            arguments=loop.arguments(arch),
            algorithm="kOptimized" if max(parts.gemm.filter) <= FILTER_MAX else "kAnalytic",
            shared_bytes=loop.shared_bytes(arch),
            threads=loop.threads,
            access=parts.access(config),
            residual=residual,
            result=result,
            **rendered(self.chain(parts)),
        )

    def estimate_us(self, parts: G, config: Attrs, arch: Arch) -> float:
        return estimate_us(parts.step, parts.gemm, config, arch, COSTS)


@cache
def possible_configs(space: SearchSpace, family: str, **fixed: Any) -> tuple[Attrs, ...]:
    """The configs of the space's product that can run some step; most cannot. What configs of the
    family do not say is `fixed`.
    """

    def is_possible(config: Attrs) -> bool:
        loops = (MainLoop.of(config, dtype) for dtype in ELEMENTS)
        return why_not_mode(Attrs(config, **fixed)) is None and any(
            loop.why_not(space.arch) is None for loop in loops
        )

    return tuple(filter(is_possible, space.configs(family)))


def not_a_product(gemm: Gemm, groups: int, *counted: int) -> dict[str, object]:
    """The reasons that there is no kernel for it, whatever the config, and whether each holds."""
    large = max(*counted, *gemm.image_elements) > INDEX_MAX
    known = ", ".join(ELEMENTS)
    return {
        "only convolutions without groups": groups != 1,
        f"CUTLASS multiplies {known}, not {gemm.dtype}": gemm.dtype not in ELEMENTS,
        "there is nothing to compute": 0 in (gemm.m, gemm.n, gemm.channels),
        "its pixels, or the elements of an image, do not fit into 32 bits": large,
    }


def why_not_tf32(step: Step, loop: MainLoop) -> str | None:
    precision = float32_precision(step)
    if loop.math == "tf32" and precision != "tf32":
        return f"torch multiplies float32 in {precision}, not in tf32"
    return None


def problem_of(
    shapes: tuple[tuple[int, ...], ...], attrs: Any, config: Attrs, swizzle: int = 1
) -> ConvProblem:
    """The problem of a convolution with images, filters and results of these `shapes`."""
    (n, c, height, width), (k, _, r, s), (_, _, p, q) = shapes
    return ConvProblem(
        *(n, height, width, c, k, r, s, p, q),
        *(*attrs["padding"], *attrs["stride"], *attrs["dilation"]),
        *(config["split_k"], SPLIT_MODES[config["split_mode"]]),
        swizzle.bit_length() - 1,
    )


def parts_at(gemm: Gemm, config: Attrs, start: int) -> dict[str, int]:
    """Where the parts of a divided depth, and the counters of finished ones, are."""
    if config["split_k"] == 1:
        return {}
    return {"partial": start, "counters": start + partial_bytes(gemm, config)}


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
