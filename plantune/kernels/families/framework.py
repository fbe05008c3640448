"""The framework's own ops, one after the other as eager calls them: a candidate of every step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from plantune.base.canonical import words
from plantune.devices.device import Runnable
from plantune.graph import Node, Step, TensorType
from plantune.graph.layouts import aligned, in_layout, view_bytes
from plantune.graph.ops import op_named
from plantune.graph.ops.base import PointwiseOp
from plantune.graph.ops.history import HISTORY
from plantune.graph.ops.pointwise import BroadcastOp
from plantune.kernels.chips import slowdown
from plantune.kernels.family import Arch, Attrs, Binding, Frame, KernelFamily, Parts
from plantune.kernels.one_call import BIASED, call_together, calls_in
from plantune.kernels.torch_ops import viewed, writes

# Their kernels follow the layout of the image: batch norm writes in it even into given memory of
# another layout, pools copy the image first if it is not that of the result.
BY_LAYOUT_OF_IMAGE = frozenset(
    words(
        "conv2d conv2d_dgrad conv2d_wgrad batch_norm batch_norm_grad avg_pool2d avg_pool2d_grad "
        "max_pool2d max_pool2d_grad"
    )
)
# They make rows, whatever layout images have. A product of attention in channels_last is a copy of
# what was made in rows.
IN_ROWS = words("reshape layer_norm layer_norm_grad aten.matmul.default aten.einsum.default")
# They take memory to be in rows, as the trace of the network saw it.
READS_ROWS = frozenset(
    words(
        "batch_norm batch_norm_grad group_norm group_norm_grad aten.as_strided.default "
        "aten.unflatten.int aten.view.dtype aten.view_as.default aten.view_as_complex.default"
    )
)
# Launches of torch's beside the first, each of which reads and writes numbers of eight bytes:
# places in an image become taps of a window, and back.
PLACES = {"max_pool2d_taps": 12, "max_pool2d_taps_grad": 9}
PLACE_BYTES = 8
# Its products of 16 bits read so many channels of a pixel at once, in channels_last.
TOGETHER = 8
# Their results are new, with the strides of what they read.
MAKES_ANY_STRIDES = ("aten.scaled_dot_product_attention.default",)


class Framework(KernelFamily[Parts]):
    """Config: `layout`, in which images are made."""

    name: ClassVar = "framework"
    arch_kinds = frozenset(("cpu", "cuda"))

    def read(self, step: Step) -> Parts:
        return Parts(step)

    def layouts(self, parts: Parts, config: Attrs) -> Mapping[str, str]:
        step = parts.step
        inputs = {
            name: config["layout"]
            for node in step.nodes
            if node.op in BY_LAYOUT_OF_IMAGE
            for name in node.inputs
            if name in dict(step.inputs)
            and len(step.types[name].shape) == 4
            and name not in step.constants
        }
        return {**inputs, **{name: _made_in(step, name, config) for name, _ in step.outputs}}

    def adopts(self, parts: Parts, config: Attrs) -> frozenset[str]:
        made = (nodes[-1].outputs for nodes in calls_in(parts.step) if not writes(nodes[0].op))
        leaving = {name for name, _ in parts.step.outputs}
        return frozenset(itertools.chain.from_iterable(made)) & leaving

    def leaves_loose(self, parts: Parts, config: Attrs) -> Mapping[str, str | None]:
        step = parts.step
        node = step.nodes[0]
        if len(step.nodes) > 1 or step.phase == "refresh":
            return {}
        source = viewed(node)
        if source is None and node.op not in MAKES_ANY_STRIDES:
            return {}
        return {name: source for name, type_ in step.outputs if type_ != HISTORY}

    def reads_loose(self, parts: Parts, config: Attrs) -> frozenset[str]:
        step, demanded = parts.step, self.layouts(parts, config)
        dense = {
            name for node in step.nodes if node.op in READS_ROWS for name in node.inputs
        } | demanded.keys()
        return frozenset(name for name, _ in step.inputs if name not in dense) - step.constants

    def workspace_bytes(self, parts: Parts, config: Attrs) -> int:
        types = parts.step.types
        return sum(aligned(types[name].size_bytes) for name in _planned_inside(parts.step))

    def estimate_us(self, parts: Parts, config: Attrs, arch: Arch) -> float:
        """Each call is a launch, and moves its own inputs and outputs."""
        cost, rows = arch.cost(self.name), config["layout"] == "nchw"
        called = (
            nodes[:1] if nodes[0].op in BIASED[arch.kind] else nodes
            for nodes in calls_in(parts.step)
        )
        nodes = itertools.chain.from_iterable(called)
        return sum(_node_us(parts.step, node, cost, arch, rows) for node in nodes)

    def bind(self, parts: Parts, config: Attrs, frame: Frame) -> Binding:
        step, values = parts.step, frame.values
        start = 0
        for name in _planned_inside(step):
            type_ = step.types[name]
            assert frame.workspace is not None
            values[name] = view_bytes(frame.workspace, start, type_, _made_in(step, name, config))
            start += aligned(type_.size_bytes)
        calls = [call_together(nodes, values, frame.loose) for nodes in calls_in(step)]
        calls += _settled(step, config, values, self.adopts(parts, config) - frame.loose)
        dropped = [name for name in _made_inside(step) if name not in values]

        def launch(stream: int) -> None:
            for call in calls:
                call()
            for name in dropped:
                del values[name]

        return Binding(launch)


def _node_us(step: Step, node: Node, cost: Mapping[str, float], arch: Arch, in_rows: bool) -> float:
    """An op alone on the chip of an arch; in nchw if `in_rows`."""
    inputs, op = [step.types[value] for value in node.inputs], op_named(node.op)
    flops = op.flops(inputs, node.types, node.attrs)
    moved = sum(type_.size_bytes for type_ in (*inputs, *node.types))
    launch_us, bytes_per_us = cost["launch_us"], cost["bytes_per_us"]
    pointwise = (
        cost.get("pointwise_us", launch_us),
        cost.get("pointwise_bytes_per_us", bytes_per_us),
    )
    if isinstance(op, (PointwiseOp, BroadcastOp)):
        launch_us, bytes_per_us = pointwise
    work = flops / cost["flops_per_us"] + moved / bytes_per_us
    if node.op.startswith("conv2d") and "conv_launch_us" in cost:
        launch_us = cost["conv_launch_us"]
        work = max(flops / cost["flops_per_us"], moved / bytes_per_us)
        if _converts(inputs, in_rows):
            launch_us, work = launch_us + cost["converts_us"], work + 2 * moved / bytes_per_us
    if "kernel" in node.attrs and "pool_taps_per_us" in cost:
        taps = max(inputs[0].numel, node.types[0].numel) * _taps_of_each(node)
        work = max(work, taps / cost["pool_taps_per_us"])
    if node.op in PLACES:
        pooled = min(type_.numel for type_ in (*inputs, *node.types))
        each_us = pointwise[0] + 2 * PLACE_BYTES * pooled / pointwise[1]
        work += PLACES[node.op] * each_us
    return launch_us + work * slowdown(flops, moved, (t.dtype for t in node.types), arch)


def _taps_of_each(node: Node) -> float:
    """Of the larger image of a pool or of its gradient: in how many windows each element is."""
    attrs: Any = node.attrs
    (rows, columns), (down, along) = attrs["kernel"], attrs["stride"]
    return float(rows * columns / (down * along))


def _converts(images: Sequence[TensorType], in_rows: bool) -> bool:
    """Whether cuDNN, which multiplies 16 bits in channels_last, brings images there and back."""
    short = any(image.dtype.endswith("float16") for image in images)
    odd = any(image.shape[1] % TOGETHER for image in images if len(image.shape) == 4)
    return short and (in_rows or odd)


def _planned_inside(step: Step) -> list[str]:
    """Internal values that the framework writes into the workspace."""
    written = {n for nodes in calls_in(step) if writes(nodes[0].op) for n in nodes[-1].outputs}
    return [name for name in step.internal if name in written]


def _made_inside(step: Step) -> list[str]:
    """Internal values that there are: what a call adds a bias to is none."""
    made = {name for nodes in calls_in(step) for name in nodes[-1].outputs}
    return [name for name in step.internal if name in made]


def _made_in(step: Step, name: str, config: Attrs) -> str:
    """The layout in which the step makes a value."""
    node = next(node for node in step.nodes if name in node.outputs)
    image = len(step.types[name].shape) == 4 and node.op not in IN_ROWS
    return str(config["layout"]) if image else "nchw"


def _settled(
    step: Step, config: Attrs, values: dict[str, Tensor], adopted: frozenset[str]
) -> list[Runnable]:
    """Calls that bring adopted images into the layout that was promised, if they are not."""

    def settle(name: str, layout: str) -> Runnable:
        def call() -> None:
            values[name] = in_layout(values[name], layout)

        return call

    images = [name for name in sorted(adopted) if len(step.types[name].shape) == 4]
    return [settle(name, _made_in(step, name, config)) for name in images]


FAMILY = Framework()
