"""Average and max pooling, and the mean over an image's pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from plantune.canonical import Attrs
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame, images
from plantune.kernels.vector_kernel import ELEMENTS, VECTOR_BYTES, VectorKernel, members
from plantune.space.arch import Arch

POOLS = ("avg_pool2d", "max_pool2d")
# A row of so many channels of a pixel is worth a block of its own.
SLICE_MIN = 64
KERNELS = """
extern "C" __global__ __launch_bounds__({threads}) void run(Kernel::Arguments arguments) {{
  Kernel::run<true>(arguments);
}}
extern "C" __global__ __launch_bounds__({threads}) void run_unaligned(
    Kernel::Arguments arguments) {{
  Kernel::run<false>(arguments);
}}
"""
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
    + KERNELS
)
MEAN = (
    """#include "cuda/pool.h"
using Kernel = plantune::PixelMean<{element}, {channels}, {slice}, {pixels}, {threads}>;"""
    + KERNELS
)


class Pool(CudaFamily):
    """Config: `layout` of images; `threads` of a block."""

    name: ClassVar = "pool"

    def why_not_step(self, step: Step) -> str | None:
        node = step.nodes[0]
        x = step.types[node.inputs[0]]
        if len(step.nodes) > 1 or node.op not in (*POOLS, "mean"):
            return "only one pool, or the mean of an image's pixels"
        if x.dtype not in ELEMENTS:
            return f"the kernel is written for {', '.join(ELEMENTS)}, got {x.dtype}"
        if x.numel == 0 or node.inputs[0] in step.constants:
            return "there are no images"
        if node.name not in dict(step.outputs):
            return "only the places are read"
        return _why_not_mean(x, node.attrs) if node.op == "mean" else None

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        node = step.nodes[0]
        if node.op != "mean":
            return super().why_not_config(step, config, arch)
        if config["layout"] != "nhwc":
            return "the mean is taken along the pixels of nhwc images"
        return super().why_not_config(step, config, arch)

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, config["layout"])

    def threads(self, step: Step, config: Attrs) -> int:
        return int(config["threads"])

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        node = step.nodes[0]
        type_ = step.types[node.inputs[0]]
        _, channels, height, width = type_.shape
        shared = {
            "element": ELEMENTS[type_.dtype],
            "channels": channels,
            "threads": config["threads"],
        }
        if node.op == "mean":
            return MEAN.format(slice=_slice(step, config), pixels=height * width, **shared)
        return POOL.format(height=height, width=width, **shared, **_window(step, config))

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        node, values = step.nodes[0], frame.values
        kernel = VectorKernel(frame.built, int(config["threads"]))
        x, y = node.inputs[0], node.name
        if node.op == "mean":
            n, channels = step.types[x].shape[:2]
            rest, blocks = [], n * (channels // _slice(step, config))
        else:
            count = step.types[node.name].numel // _vector(step, config)
            read = node.outputs[-1] if node.op == "max_pool2d" else ""
            places = values[read].data_ptr() if read in dict(step.outputs) else 0
            rest, blocks = [places, count], -(-count // int(config["threads"]))

        def launch(stream: int) -> None:
            arguments = members(values[x].data_ptr(), values[y].data_ptr(), *rest)
            kernel.launch(stream, (blocks, 1, 1), [arguments], [values[x]])

        return Binding(launch)


def _why_not_mean(x: TensorType, attrs: Attrs) -> str | None:
    if len(x.shape) != 4 or attrs["dims"] != (2, 3):
        return "the mean is not that of an image's pixels"
    if x.shape[1] % 8:
        return f"channels are read by eights, got shape {x.shape}"
    return None


def _vector(step: Step, config: Attrs) -> int:
    """Channels that a thread of a pool takes: what divides all, no more than a vector has."""
    type_ = step.types[step.nodes[0].inputs[0]]
    whole = VECTOR_BYTES // type_.torch_dtype.itemsize
    return math.gcd(whole, type_.shape[1]) if config["layout"] == "nhwc" else 1


def _slice(step: Step, config: Attrs) -> int:
    """Channels of one block of a mean, such that its threads have something to do; 0 for none."""
    type_ = step.types[step.nodes[0].inputs[0]]
    _, channels, height, width = type_.shape
    vector, threads = VECTOR_BYTES // type_.torch_dtype.itemsize, int(config["threads"])
    parts = [part for part in range(8, channels + 1, 8) if channels % part == 0]
    fitting = [part for part in parts if part // vector <= threads]
    filled = threads * vector // (height * width)
    return next((part for part in fitting if part >= max(SLICE_MIN, filled)), max(fitting))


def _window(step: Step, config: Attrs) -> dict[str, Any]:
    """What the header's Window says of a pool."""
    node = step.nodes[0]
    x, y = step.types[node.inputs[0]], node.types[0]
    values: dict[str, Any] = {
        "index": "unsigned" if max(x.numel, y.numel) < 1 << 31 else "unsigned long long",
        "is_max": _word(node.op == "max_pool2d"),
        "count_padding": _word(bool(node.attrs.get("count_padding"))),
        "nhwc": _word(config["layout"] == "nhwc"),
        "vector": _vector(step, config),
        "out_height": y.shape[2],
        "out_width": y.shape[3],
    }
    for key, word in (("kernel", "{}s"), ("stride", "{}_stride"), ("padding", "{}_padding")):
        rows, columns = node.attrs[key]
        values |= {word.format("row"): rows, word.format("column"): columns}
    return values


def _word(holds: bool) -> str:
    return "true" if holds else "false"


FAMILY = Pool()
