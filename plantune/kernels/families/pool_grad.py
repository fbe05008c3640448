"""The gradients of average and max pooling, gathered pixel by pixel."""

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

GRADIENTS = ("avg_pool2d_grad", "max_pool2d_grad")
SOURCE = (
    """#include "cuda/pool_grad.h"
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
using Kernel = plantune::PoolGrad<Window>;"""
    + vector_kernel.ENTRIES
)


@dataclass(frozen=True)
class GradientParts(Parts):
    """The gradient dx of a pool, from dy."""

    node: Node
    dy: TensorType
    dx: TensorType

    def taken(self, config: Attrs) -> int:
        """Channels that a thread takes: what divides all, no more than a vector has."""
        if config["layout"] != "nhwc":
            return 1
        vector = vector_kernel.VECTOR_BYTES // self.dx.torch_dtype.itemsize
        return math.gcd(vector, self.dx.shape[1])


class PoolGrad(CudaFamily[GradientParts]):
    """Config: `layout` of images; `threads` of a block."""

    name: ClassVar = "pool_grad"

    def read(self, step: Step) -> GradientParts:
        node = step.nodes[0]
        known = len(step.nodes) == 1 and node.op in GRADIENTS
        refuse({"only the gradient of one pool": not known})
        dy, dx = step.types[node.inputs[0]], node.types[0]
        refuse(
            {
                **vector_kernel.not_an_element(dx.dtype),
                "there are no images": dx.numel == 0,
            }
        )
        return GradientParts(step, node, dy, dx)

    def source(self, parts: GradientParts, config: Attrs, arch: Arch) -> str:
        _, channels, height, width = parts.dx.shape
        return SOURCE.format(
            element=vector_kernel.ELEMENTS[parts.dx.dtype],
            channels=channels,
            height=height,
            width=width,
            threads=config["threads"],
            **_window(parts, config),
        )

    def bind(self, parts: GradientParts, config: Attrs, frame: Frame) -> Binding:
        values, (dy, *others) = frame.values, parts.node.inputs
        count, threads = parts.dx.numel // parts.taken(config), int(config["threads"])
        kernel = vector_kernel.VectorKernel(frame.built, -(-count // threads), threads)

        def launch(stream: int) -> None:
            places = values[others[0]].data_ptr() if others else 0
            addresses = (values[dy].data_ptr(), values[parts.node.name].data_ptr(), places)
            kernel.launch(stream, vector_kernel.members(*addresses, count), [values[dy]])

        return Binding(launch)


def _window(parts: GradientParts, config: Attrs) -> dict[str, Any]:
    """What the header's Window says of the pool."""
    attrs = parts.node.attrs
    values: dict[str, Any] = {
        "index": "unsigned" if parts.dx.numel < 1 << 31 else "unsigned long long",
        "is_max": cxx_bool(parts.node.op == "max_pool2d_grad"),
        "count_padding": cxx_bool(attrs.get("count_padding")),
        "nhwc": cxx_bool(config["layout"] == "nhwc"),
        "vector": parts.taken(config),
        "out_height": parts.dy.shape[2],
        "out_width": parts.dy.shape[3],
    }
    for key, word in (("kernel", "{}s"), ("stride", "{}_stride"), ("padding", "{}_padding")):
        rows, columns = attrs[key]
        values |= {word.format("row"): rows, word.format("column"): columns}
    return values


FAMILY = PoolGrad()
