"""Products of many matrices on CUTLASS 2.x main loops, for every CUDA arch:
`csrc/cuda/batched_product.h`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from plantune.base.canonical import Attrs
from plantune.devices.cuda.flags import float32_precisions
from plantune.errors import IllegalCandidate
from plantune.graph.ops.overload import ARGUMENTS, MATMUL
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Binding, CudaFamily, Frame, Parts, Step, refuse
from plantune.kernels.cutlass.family import possible_configs
from plantune.kernels.cutlass.gemm import INDEX_MAX, Gemm, estimate_us, why_not_tile
from plantune.kernels.cutlass.main_loop import ELEMENTS, MainLoop
from plantune.space.search_space import SearchSpace

Shape = tuple[int, ...]
# The split of a depth, of which there is none here, as costs of products know it.
WHOLE = {"split_k": 1, "split_mode": "serial"}
ROWS, COLUMNS = "layout::RowMajor", "layout::ColumnMajor"
SOURCE = (
    """#include "cuda/batched_product.h"
using namespace cutlass;
using Kernel = plantune::BatchedProduct<
    {arguments},
    {layouts}, {accesses}>;
static_assert(sizeof(Kernel::SharedStorage) <= {shared_bytes}, "A launch asks for less memory.");
static_assert(Kernel::kThreads == {threads}, "A launch has other threads.");
"""
    # One block is enough: for another one on a multiprocessor the assembler spills a few bytes.
    + vector_kernel.ENTRIES.replace("({threads})", "({threads}, 1)")
)
# Narrow words of an operand that a thread has on their way; with 32 they had no place in registers.
LOADS_MAX = 16


@dataclass(frozen=True)
class Products:
    """y[i] (m x n) = left[i % lefts] (m x depth) * right[i % rights] (depth x n), so many `times`.
    An operand is in rows, or `turned`: in columns.
    """

    left: str
    right: str
    m: int
    n: int
    depth: int
    times: int = 1
    lefts: int = 1
    rights: int = 1
    left_turned: bool = False
    right_turned: bool = False

    @property
    def widths(self) -> tuple[int, int, int]:
        """What is adjacent in memory of left, right and y."""
        left = self.m if self.left_turned else self.depth
        return left, self.depth if self.right_turned else self.n, self.n


@dataclass(frozen=True)
class _Tiled(Gemm):
    """One product of `times`, for costs and tiles."""

    times: int = 1

    def tiles(self, config: Attrs) -> tuple[int, int]:
        down, across = super().tiles(config)
        return self.times * down, across


@dataclass(frozen=True)
class ProductsParts(Parts):
    products: Products

    @property
    def dtype(self) -> str:
        return self.step.nodes[0].types[0].dtype

    @property
    def groups(self) -> int:
        """Those of a convolution, 0 of a product."""
        groups: Any = self.step.nodes[0].attrs.get("groups", 0)
        return int(groups)

    @property
    def gemm(self) -> _Tiled:
        its = self.products
        return _Tiled(self.dtype, its.m, its.n, its.depth, (1, 1), (0, 0), its.times)

    def accesses(self, config: Attrs) -> tuple[int, ...]:
        """Neighbours that are moved at once, of left, right and y."""
        vector = MainLoop.of(config, self.dtype).vector
        return tuple(math.gcd(vector, width) for width in self.products.widths)

    def loop(self, config: Attrs) -> MainLoop:
        return MainLoop.of(config, self.dtype, min(self.accesses(config)))


class BatchedProduct(CudaFamily[ProductsParts]):
    """Config: the tile of a block and of its warps, `stages`, `math`."""

    name: ClassVar = "batched_product"
    image_layout = "nchw"
    build_s = 2.5

    def read(self, step: Step) -> ProductsParts:
        refuse({"only one product": len(step.nodes) != 1})
        found = _products_of(step)
        parts, known = ProductsParts(step, found), ", ".join(ELEMENTS)
        refuse(
            {
                f"CUTLASS multiplies {known}, not {parts.dtype}": parts.dtype not in ELEMENTS,
                "there is nothing to compute": 0 in (found.times, found.m, found.n, found.depth),
                "a matrix, or the count of blocks, does not fit into 32 bits": max(
                    found.m * found.n, found.m * found.depth, found.depth * found.n, found.times
                )
                > INDEX_MAX,
            }
        )
        return parts

    def configs(self, space: SearchSpace) -> tuple[Attrs, ...]:
        return possible_configs(space, self.name, **WHOLE)

    def why_not_config(self, parts: ProductsParts, config: Attrs, arch: Arch) -> str | None:
        loop = parts.loop(config)
        return (
            loop.why_not(arch)
            or _why_not_loads(loop)
            or _why_not_tf32(parts, loop)
            or why_not_tile(parts.gemm, loop)
        )

    def threads(self, parts: ProductsParts, config: Attrs) -> int:
        return parts.loop(config).threads

    def shared_bytes(self, parts: ProductsParts, config: Attrs, arch: Arch) -> int:
        return parts.loop(config).most_shared_bytes

    def estimate_us(self, parts: ProductsParts, config: Attrs, arch: Arch) -> float:
        whole = Attrs(config, **WHOLE)
        return estimate_us(parts.step, parts.gemm, whole, arch, "implicit_gemm_conv")

    def can_be_guessed(self, parts: ProductsParts, config: Attrs) -> bool:
        """Filters that are computed for each image: these convolutions took 0.12 to 0.43 of what
        the framework's took, their gradients 0.18 to 0.44, float32 0.42 to 0.95. Products took 0.89
        to 1.3 of cuBLAS's (25 steps, H200, 2026-11-24).
        """
        return parts.groups > 1

    def source(self, parts: ProductsParts, config: Attrs, arch: Arch) -> str:
        loop, its = parts.loop(config), parts.products
        layouts = (COLUMNS if turned else ROWS for turned in (its.left_turned, its.right_turned))
        return SOURCE.format(
            arguments=loop.arguments(arch),
            layouts=", ".join(layouts),
            accesses=", ".join(map(str, parts.accesses(config))),
            shared_bytes=loop.most_shared_bytes,
            threads=loop.threads,
        )

    def bind(self, parts: ProductsParts, config: Attrs, frame: Frame) -> Binding:
        its, loop = parts.products, parts.loop(config)
        blocks = math.prod(parts.gemm.tiles(config))
        kernel = vector_kernel.VectorKernel(
            frame.built, blocks, loop.threads, loop.most_shared_bytes
        )
        sizes = (its.m, its.n, its.depth, its.lefts, its.rights)
        arguments = (its.left, its.right, parts.step.nodes[0].name, *sizes)
        read = (its.left, its.right)
        return vector_kernel.bound([kernel], parts.step, frame, arguments, read)


def _why_not_loads(loop: MainLoop) -> str | None:
    loads = max(loop.tile[:2]) * loop.tile[2] // (loop.access * loop.threads)
    return f"{loads} loads of a thread at once" if loads > LOADS_MAX else None


def _why_not_tf32(parts: ProductsParts, loop: MainLoop) -> str | None:
    if loop.math != "tf32":
        return None
    if parts.groups > 1:
        return "cuDNN sums groups in float32, so that tf32 would be too far off beside it"
    conv, matmul, _ = float32_precisions()
    precision = conv if parts.groups else matmul
    return None if precision == "tf32" else f"torch multiplies float32 in {precision}, not in tf32"


def _products_of(step: Step) -> Products:
    """What a step multiplies; raises IllegalCandidate if it is no product of matrices."""
    (node,) = step.nodes
    shapes = [step.types[name].shape for name in node.inputs]
    if node.op == MATMUL:
        given = json.loads(node.attrs[ARGUMENTS])
        places = [given[name]["tensor"] for name in ("self", "other")]
        left, right = (node.inputs[place] for place in places)
        found = _of_batches(shapes[places[0]], shapes[places[1]], node.types[0].shape)
        return replace(found, left=left, right=right)
    if node.op not in ("conv2d", "conv2d_dgrad", "conv2d_wgrad"):
        raise IllegalCandidate("only products of matrices, and convolutions that are such")
    return _of_convolution(step, node.attrs, shapes, node.types[0].shape)


def _of_batches(left: Shape, right: Shape, made: Shape) -> Products:
    """Of matrices along the last two axes; the operands get their names later."""
    refuse({"an operand is a vector": min(len(left), len(right)) < 2})
    (m, n), depth, times = made[-2:], left[-1], math.prod(made[:-2])
    lefts, rights = _repeated(left[:-2], made), _repeated(right[:-2], made)
    if rights == 1:  # rows of all left matrices follow each other
        return Products("", "", times * m, n, depth)
    return Products("", "", m, n, depth, times, lefts, rights)


def _repeated(lead: Shape, made: Shape) -> int:
    """After how many matrices an operand begins again."""
    while lead and lead[0] == 1:
        lead = lead[1:]
    inner = made[:-2][len(made) - 2 - len(lead) :]
    refuse({f"matrices {lead} are broadcast to {made[:-2]} inside of others": lead != inner})
    return math.prod(lead)


def _of_convolution(step: Step, attrs: Attrs, shapes: list[Shape], made: Shape) -> Products:
    """Of single pixels whose filters change from call to call, each group on its own."""
    node, groups = step.nodes[0], int(attrs["groups"])
    geometry: Any = (attrs["stride"], attrs["padding"])
    first, second = node.inputs
    weight = made if node.op == "conv2d_wgrad" else shapes[1]
    refuse(
        {
            "only convolutions of single pixels": geometry != ((1, 1), (0, 0))
            or weight[2:] != (1, 1),
            "other families multiply by weights that stay": step.constants,
        }
    )
    images, _, height, width = shapes[0]
    outputs, channels, pixels = weight[0] // groups, weight[1], height * width
    all_images = images * groups
    if node.op == "conv2d_wgrad":
        refuse({f"sums over {images} images": images != 1})
        sizes = (outputs, channels, pixels, groups, groups, groups)
        return Products(first, second, *sizes, right_turned=True)
    rest = (all_images, groups, all_images)
    if node.op == "conv2d":
        return Products(second, first, outputs, pixels, channels, *rest)
    return Products(second, first, channels, pixels, outputs, *rest, left_turned=True)


FAMILY = BatchedProduct()
