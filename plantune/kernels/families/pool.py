"""Average and max pooling, and the mean over an image's pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from plantune.canonical import Attrs
from plantune.graph.graph import Node
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels import vector_kernel
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame, Parts
from plantune.kernels.legality import refuse
from plantune.kernels.rendering import cxx_bool
from plantune.space.arch import Arch

POOLS = ("avg_pool2d", "max_pool2d")
# A row of so many channels of a pixel is worth a block of its own.
SLICE_MIN = 64
POOL = (
    """#include "cuda/pool.h"
struct Window {{
  using T = {element};
  using Index = {index};
  static constexpr bool kMax = {is_max}, kCountPadding = {count_padding}, kNhwc = {nhwc};
  static constexpr int kVector = {vector}, kThreads = {threads}, kChannels = {channels};
  static constexpr int kHeight = {height}, kWidth = {width};
  static constexpr int kOutHeight = {out_height}, kOutWidth = {out_width};
  static constexpr int kRows = {rows}, kColumns = {columns};
  static constexpr int kRowStride = {row_stride}, kColumnStride = {column_stride};
  static constexpr int kRowPadding = {row_padding}, kColumnPadding = {column_padding};
}};
using Kernel = plantune::Pool<Window>;"""
    + vector_kernel.ENTRIES
)
MEAN = (
    """#include "cuda/pool.h"
using Kernel = plantune::PixelMean<{element}, {channels}, {slice}, {pixels}, {threads}>;"""
    + vector_kernel.ENTRIES
)


@dataclass(frozen=True)
class PoolParts(Parts):
    """A pool, or the mean of an image's pixels, from x to y."""

    node: Node
    x: TensorType
    y: TensorType

    @property
    def is_mean(self) -> bool:
        return self.node.op == "mean"

    @property
    def vector(self) -> int:
        """Elements of one vector."""
        return vector_kernel.VECTOR_BYTES // self.x.torch_dtype.itemsize


class Pool(CudaFamily[PoolParts]):
    """Config: `layout` of images; `threads` of a block."""

    name: ClassVar = "pool"

    def read(self, step: Step) -> PoolParts:
        node = step.nodes[0]
        known = len(step.nodes) == 1 and node.op in (*POOLS, "mean")
        refuse({"only one pool, or the mean of an image's pixels": not known})
        x, mean = step.types[node.inputs[0]], node.op == "mean"
        pixels = len(x.shape) == 4 and node.attrs.get("dims") == (2, 3)
        refuse(
            {
                **vector_kernel.not_an_element(x.dtype),
                "there are no images": x.numel == 0 or node.inputs[0] in step.constants,
                "only the places are read": node.name not in dict(step.outputs),
                "the mean is not that of an image's pixels": mean and not pixels,
                f"channels are read by eights, got shape {x.shape}": pixels and x.shape[1] % 8,
            }
        )
        return PoolParts(step, node, x, node.types[0])

    def why_not_config(self, parts: PoolParts, config: Attrs, arch: Arch) -> str | None:
        if parts.is_mean and config["layout"] != "nhwc":
            return "the mean is taken along the pixels of nhwc images"
        return None

    def source(self, parts: PoolParts, config: Attrs, arch: Arch) -> str:
        _, channels, height, width = parts.x.shape
        shared = {
            "element": vector_kernel.ELEMENTS[parts.x.dtype],
            "channels": channels,
            "threads": config["threads"],
        }
        if parts.is_mean:
            return MEAN.format(slice=_slice(parts, config), pixels=height * width, **shared)
        return POOL.format(height=height, width=width, **shared, **_window(parts, config))

    def bind(self, parts: PoolParts, config: Attrs, frame: Frame) -> Binding:
        node, values = parts.node, frame.values
        x, y = node.inputs[0], node.name
        if parts.is_mean:
            n, channels = parts.x.shape[:2]
            rest, blocks = [], n * (channels // _slice(parts, config))
        else:
            count = parts.y.numel // _taken(parts, config)
            read = node.outputs[-1] if node.op == "max_pool2d" else ""
            places = values[read].data_ptr() if read in dict(parts.step.outputs) else 0
            rest, blocks = [places, count], -(-count // int(config["threads"]))

        kernel = vector_kernel.VectorKernel(frame.built, blocks, int(config["threads"]))

        def launch(stream: int) -> None:
            arguments = vector_kernel.members(values[x].data_ptr(), values[y].data_ptr(), *rest)
            kernel.launch(stream, arguments, [values[x]])

        return Binding(launch)


def _taken(parts: PoolParts, config: Attrs) -> int:
    """Channels that a thread of a pool takes: what divides all, no more than a vector has."""
    return math.gcd(parts.vector, parts.x.shape[1]) if config["layout"] == "nhwc" else 1


def _slice(parts: PoolParts, config: Attrs) -> int:
    """Channels of one block of a mean, such that its threads have something to do; 0 for none."""
    _, channels, height, width = parts.x.shape
    vector, threads = parts.vector, int(config["threads"])
    slices = [size for size in range(8, channels + 1, 8) if channels % size == 0]
    fitting = [size for size in slices if size // vector <= threads]
    filled = threads * vector // (height * width)
    return next((size for size in fitting if size >= max(SLICE_MIN, filled)), max(fitting))


def _window(parts: PoolParts, config: Attrs) -> dict[str, Any]:
    """What the header's Window says of a pool."""
    node, x, y = parts.node, parts.x, parts.y
    values: dict[str, Any] = {
        "index": "unsigned" if max(x.numel, y.numel) < 1 << 31 else "unsigned long long",
        "is_max": cxx_bool(node.op == "max_pool2d"),
        "count_padding": cxx_bool(node.attrs.get("count_padding")),
        "nhwc": cxx_bool(config["layout"] == "nhwc"),
        "vector": _taken(parts, config),
        "out_height": y.shape[2],
        "out_width": y.shape[3],
    }
    for key, word in (("kernel", "{}s"), ("stride", "{}_stride"), ("padding", "{}_padding")):
        rows, columns = node.attrs[key]
        values |= {word.format("row"): rows, word.format("column"): columns}
    return values


FAMILY = Pool()
