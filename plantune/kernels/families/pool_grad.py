"""The gradients of average and max pooling, gathered pixel by pixel, and a chain of pointwise ops
that they go through, with the sums of what it makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from plantune.graph import Node, Step, TensorType
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, Parts, refuse
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.cuda.pool_window import PoolWindow
from plantune.kernels.patterns import pointwise_chain
from plantune.kernels.rendering import struct

GRADIENTS = ("avg_pool2d_grad", "max_pool2d_grad", "max_pool2d_taps_grad")
INPUTS_MAX, OUTPUTS_MAX, ALONG_MAX = 4, 4, 8
# Threads that add what the blocks leave of a sum.
ADD_THREADS = 1024
ADD = f"""
extern "C" __global__ __launch_bounds__({ADD_THREADS}) void add(Kernel::Arguments arguments) {{
  Kernel::add(arguments);
}}
"""


@dataclass(frozen=True)
class GradientParts(Parts):
    """The gradient dx of a pool from dy; `chain` makes of it what leaves, then what is added to
    `totals`.
    """

    chain: Step
    totals: tuple[Node, ...]

    @property
    def node(self) -> Node:
        return self.step.nodes[0]

    @property
    def dx(self) -> TensorType:
        return self.node.types[0]

    @property
    def window(self) -> PoolWindow:
        dy = self.step.types[self.node.inputs[0]]
        return PoolWindow(self.node, self.dx, dy, dy.dtype)

    @cached_property
    def expression(self) -> pointwise_chain.Expression:
        return pointwise_chain.expression_of(self.chain)

    @property
    def stored(self) -> tuple[str, ...]:
        """What leaves as an image."""
        names = tuple(name for name, _ in self.chain.outputs)
        return names[: len(names) - len(self.totals)]

    @property
    def dtypes(self) -> tuple[list[str], list[str]]:
        """Of what the chain reads, and of what leaves; the gathered gradient is not in memory."""
        read = [self.step.types[operand.name].dtype for operand in self.expression.operands]
        made = (*self.stored, *(node.name for node in self.totals))
        return read, [self.step.types[name].dtype for name in made]

    def geometry(self, config: Attrs) -> pointwise_chain.Geometry:
        """The addresses of the elements; a thread takes as many as the pool and the chain allow."""
        taken = self.window.taken(config)
        return pointwise_chain.geometry_of(self.chain, self.expression, config["layout"], taken)

    @property
    def along(self) -> int:
        """Pixels of a row that a thread makes: as many as windows are apart."""
        attrs: Any = self.node.attrs
        return int(attrs["stride"][1])

    def units(self, config: Attrs) -> int:
        """Vectors of so many pixels."""
        n, c, h, w = self.dx.shape
        return n * c // self.geometry(config).width * h * -(-w // self.along)

    def blocks(self, config: Attrs) -> int:
        return -(-self.units(config) // int(config["threads"]))


class PoolGrad(CudaFamily[GradientParts]):
    """Config: `layout` of images; `threads` of a block."""

    name: ClassVar = "pool_grad"
    mixes_types: ClassVar = True

    def read(self, step: Step) -> GradientParts:
        node, dx = step.nodes[0], step.nodes[0].types[0]
        refuse({"it does not start with the gradient of a pool": node.op not in GRADIENTS})
        totals = tuple(n for n in step.nodes[1:] if n.op == "sum_to")
        leaving, inside = dict(step.outputs), {v for n in step.nodes for v in n.inputs}
        refuse({"a sum is read inside of it": any(n.name in inside for n in totals)})
        parts = GradientParts(step, _chain(step, totals), totals)
        shapes = {type_.shape for _, type_ in parts.chain.outputs}
        many = len(parts.expression.operands) > INPUTS_MAX
        refuse(
            {
                **vector_kernel.not_an_element(step.types[node.inputs[0]].dtype),
                **pointwise_chain.not_elements(parts.chain),
                "there are no images": dx.numel == 0,
                f"what leaves has not the shape {dx.shape}": shapes != {dx.shape},
                "a sum is not read": any(n.name not in leaving for n in totals),
                f"a thread makes {ALONG_MAX} pixels at most, windows are {parts.along} apart": (
                    parts.along > ALONG_MAX
                ),
                "only the sum of all elements": any(n.types[0].numel != 1 for n in totals),
                f"it takes {INPUTS_MAX} inputs and {OUTPUTS_MAX} outputs at most": many
                or len(parts.chain.outputs) > OUTPUTS_MAX,
            }
        )
        return parts

    def estimate_us(self, parts: GradientParts, config: Attrs, arch: Arch) -> float:
        """Memory, or to look into each window that a pixel is in."""
        cost, attrs = arch.cost(self.name), dict[str, Any](parts.node.attrs)
        pairs = zip(attrs["kernel"], attrs["stride"], strict=True)
        windows: float = math.prod(max(size / stride, 1) for size, stride in pairs)
        found = "places" if parts.node.op.startswith("max") else "elements"
        times = (
            parts.step.traffic_bytes / cost["bytes_per_us"],
            parts.dx.numel * windows / cost[f"{found}_per_us"],
        )
        return float(cost["launch_us"] + max(times) * self.slowdown(parts, arch))

    def workspace_bytes(self, parts: GradientParts, config: Attrs) -> int:
        return 4 * len(parts.totals) * parts.blocks(config)

    def source(self, parts: GradientParts, config: Attrs, arch: Arch) -> str:
        expression, geometry = parts.expression, parts.geometry(config)
        names = [operand.name for operand in expression.operands]
        chain = struct(
            "Chain",
            pointwise_chain.members(expression, geometry, *parts.dtypes),
            Index="Window::Index",
            kTotals=len(parts.totals),
            kGathered=names.index(parts.node.name),
            **{"kWidth": geometry.width, "kVectors": 1, "kThreads": config["threads"]},
        )
        before = parts.window.source(config, geometry.width) + chain
        kernel, threads = "PoolGrad<Window, Chain>", config["threads"]
        source = vector_kernel.source(self.name, kernel, threads, before)
        return source + (ADD if parts.totals else "")

    def bind(self, parts: GradientParts, config: Attrs, frame: Frame) -> Binding:
        dy, *places = parts.node.inputs
        threads, blocks = int(config["threads"]), parts.blocks(config)
        read = [operand.name for operand in parts.expression.operands]
        read[read.index(parts.node.name)] = dy
        written = (*parts.stored, *(node.name for node in parts.totals))
        ends = (frame.scratch, parts.units(config), blocks)
        arguments = (*read, *(places[:1] or (None,)), *written, *ends)
        kernel, add = vector_kernel.VectorKernel(frame.built, blocks, threads), None
        if parts.totals:
            add = Launcher(frame.built, len(parts.totals), ADD_THREADS, name="add")
        # The source is written for constants in nchw.
        names = (*read, *places)
        return vector_kernel.bound([kernel], parts.step, frame, arguments, names, last=add)


def _chain(step: Step, totals: tuple[Node, ...]) -> Step:
    """What follows the pool's gradient, as a step that reads it and makes what leaves as an image,
    and last what is added.
    """
    names = {total.name for total in totals}
    nodes = [node for node in step.nodes[1:] if node.name not in names]
    leaving = (name for name, _ in step.outputs if name not in names)
    return step.part(nodes, (*leaving, *(total.inputs[0] for total in totals)))


FAMILY = PoolGrad()
