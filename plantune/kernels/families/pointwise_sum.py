"""Chains of pointwise ops and a sum of what they make, in one pass over memory: the gradients of
scalars and biases, beside the gradients that they are sums of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from plantune.graph import Node, Step, TensorType
from plantune.kernels.chips import measured_chip
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, Parts, refuse
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.patterns import pointwise_chain
from plantune.kernels.patterns.sums import SUMS, kept_axes
from plantune.kernels.rendering import Long, struct

INPUTS_MAX, OUTPUTS_MAX = 6, 4
ADDED = 32  # results of a block of the second kernel
ADD = """
extern "C" __global__ __launch_bounds__({threads}) void add(Kernel::Arguments arguments) {{
  Kernel::add(arguments);
}}
"""


@dataclass(frozen=True)
class SumParts(Parts):
    """`head` makes what leaves as it is, and last what is added: to one value, or one of each
    channel, of all images or of each.
    """

    head: Step
    expression: pointwise_chain.Expression
    node: Node
    kept: tuple[int, ...]

    @property
    def type(self) -> TensorType:
        return self.head.outputs[-1][1]

    @property
    def channels(self) -> int:
        return self.type.shape[1]

    @property
    def rows(self) -> int:
        return self.type.numel // self.channels

    @property
    def made(self) -> tuple[str, ...]:
        """What leaves: what the head stores, then the sum."""
        return (*(name for name, _ in self.head.outputs[:-1]), self.node.name)

    @property
    def of_images(self) -> bool:
        return self.kept == (0, 1)

    @property
    def width(self) -> int:
        """Of what is stored, else of what is read of its shape."""
        types = [type_ for _, type_ in self.head.outputs[:-1]]
        read = (self.step.types[operand.name] for operand in self.expression.operands)
        types = types or [type_ for type_ in read if type_.shape == self.type.shape]
        return max((vector_kernel.width(type_) for type_ in types), default=4)

    @property
    def results(self) -> int:
        return self.channels if self.kept else 1

    def rows_of_block(self, config: Attrs) -> int:
        if self.of_images:
            return self.rows // self.type.shape[0]
        lanes = int(config["threads"]) // (self.channels // self.width)
        return max(-(-self.rows // int(config["blocks"])), lanes)

    def blocks(self, config: Attrs) -> int:
        return -(-self.rows // self.rows_of_block(config))

    def in_one_pass(self, config: Attrs) -> bool:
        return self.of_images or self.blocks(config) == 1


class PointwiseSum(CudaFamily[SumParts]):
    """Config: `blocks` of so many `threads` add parts, where a result has many rows; a thread reads
    so many `vectors` at once.
    """

    name: ClassVar = "pointwise_sum"
    image_layout = "nhwc"
    mixes_types: ClassVar = True

    def read(self, step: Step) -> SumParts:
        node = _sum_of(step)
        head = _head(step, node)
        parts = SumParts(
            step, head, pointwise_chain.expression_of(head), node, kept_axes(step, node)
        )
        type_, expression = parts.type, parts.expression
        shaped = len(type_.shape) in (2, 4)
        refuse({f"only images and matrices, got {type_.shape}": not shaped})
        images = len(type_.shape) == 4
        added = parts.kept in ((), (1,)) or (images and parts.of_images)
        many = len(expression.operands) > INPUTS_MAX or len(expression.results) > OUTPUTS_MAX
        refuse(
            {
                **pointwise_chain.not_elements(step),
                "there is nothing to add": type_.numel == 0,
                "the sum is not that of all, of channels, or of an image's channels": not added,
                f"rows of {type_.shape} are not whole vectors": parts.channels % parts.width,
                f"it takes {INPUTS_MAX} inputs and {OUTPUTS_MAX} outputs at most": many,
                "weights are in nchw": step.phase == "refresh",
                "the sum leaves alone": parts.node.name not in dict(step.outputs),
            }
        )
        return parts

    def why_not_config(self, parts: SumParts, config: Attrs, arch: Arch) -> str | None:
        if parts.channels // parts.width > int(config["threads"]):
            return f"{config['threads']} threads do not read {parts.channels} channels at once"
        return super().why_not_config(parts, config, arch)

    def workspace_bytes(self, parts: SumParts, config: Attrs) -> int:
        if parts.in_one_pass(config):
            return 0
        return 4 * parts.blocks(config) * parts.results

    def source(self, parts: SumParts, config: Attrs, arch: Arch) -> str:
        expression = parts.expression
        layout = "nhwc" if len(parts.type.shape) == 4 else "nchw"
        geometry = pointwise_chain.geometry_of(parts.head, expression, layout, parts.width)
        added = parts.type.numel // parts.step.types[parts.node.name].numel
        chain = struct(
            "Chain",
            pointwise_chain.members(
                expression,
                geometry,
                [parts.step.types[operand.name].dtype for operand in expression.operands],
                [parts.step.types[name].dtype for name in parts.made],
            ),
            Index=vector_kernel.index_of(parts.type.numel),
            kWidth=geometry.width,
            kVectors=config["vectors"],
            kThreads=config["threads"],
            kChannels=parts.channels,
            kRows=Long(parts.rows),
            kRowsOfBlock=Long(parts.rows_of_block(config)),
            kAll=not parts.kept,
            kImages=parts.of_images,
            kScale=1 / added if parts.node.op == "mean" else 1.0,
        )
        threads, entries = config["threads"], vector_kernel.ENTRIES + ADD
        return vector_kernel.source(self.name, "PointwiseSum<Chain>", threads, chain, entries)

    def bind(self, parts: SumParts, config: Attrs, frame: Frame) -> Binding:
        blocks, threads = parts.blocks(config), int(config["threads"])
        names = [operand.name for operand in parts.expression.operands]
        kernel, add = vector_kernel.VectorKernel(frame.built, blocks, threads), None
        if not parts.in_one_pass(config):
            add = Launcher(frame.built, math.ceil(parts.results / ADDED), threads, name="add")
        # The source is written for constants in nchw.
        return vector_kernel.bound(
            [kernel], parts.step, frame, (*names, *parts.made, frame.scratch), names, last=add
        )

    def estimate_us(self, parts: SumParts, config: Attrs, arch: Arch) -> float:
        """As long as memory takes, or as the rounds of a block, which is slower where few blocks
        read all; then as the second kernel.
        """
        cost, sms = arch.cost(self.name), (arch.chip or measured_chip()).multiprocessors
        blocks, threads = parts.blocks(config), int(config["threads"])
        rows = threads // (parts.channels // parts.width) * int(config["vectors"])
        rounds = math.ceil(parts.rows_of_block(config) / rows)
        waves = math.ceil(blocks * threads / (sms * cost["sm_threads"]))
        moved = parts.step.traffic_bytes / (min(blocks, sms) * cost["sm_bytes_per_us"])
        alone = cost["launch_us"] + max(waves * rounds * cost["round_us"], moved)
        first = max(super().estimate_us(parts, config, arch), alone)
        if parts.in_one_pass(config):
            return first
        read = 4 * blocks * min(parts.results, ADDED)
        return first + cost["launch_us"] + read / cost["block_bytes_per_us"]


def _sum_of(step: Step) -> Node:
    """The sum at the end; casts of what is stored may come after it."""
    ends = [node for node in step.nodes if node.op != "cast"]
    node = (ends or step.nodes)[-1]
    refuse({f"the step ends with {node.op}, not with a sum": node.op not in SUMS})
    read = any(node.name in other.inputs for other in step.nodes)
    refuse({"the sum is read inside of it": read})
    return node


def _head(step: Step, last: Node) -> Step:
    """Everything but the sum, as a step whose last output is what the sum adds."""
    nodes = [node for node in step.nodes if node.name != last.name]
    leaving = (name for name, _ in step.outputs if name != last.name)
    return step.part(nodes, (*leaving, last.inputs[0]))


FAMILY = PointwiseSum()
