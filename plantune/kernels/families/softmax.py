"""Softmaxes of rows, with the pointwise ops before them: `csrc/cuda/softmax.h`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

from plantune.graph import Step, TensorType
from plantune.graph.ops.overload import ARGUMENTS, SOFTMAX
from plantune.graph.ops.overload_backward import WANTED
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, first_reason, refuse
from plantune.kernels.family import Binding, Frame, Parts
from plantune.kernels.legality import not_the_end_alone
from plantune.kernels.patterns import pointwise_chain
from plantune.kernels.patterns.pointwise_chain import Expression, expression_of
from plantune.kernels.patterns.sample_norm import row_work_us
from plantune.kernels.rendering import struct

# Elements of a row that a thread holds, with what they are computed from.
HELD_MAX, INPUTS_MAX = 32, 4


@dataclass(frozen=True)
class SoftmaxParts(Parts):
    """y = softmax of `expression`, along the last axis; `before` makes what it is of."""

    expression: Expression
    before: Step

    @property
    def type(self) -> TensorType:
        return self.step.nodes[-1].types[0]

    @property
    def size(self) -> int:
        """Elements of a row."""
        return self.type.shape[-1]

    def held(self, lanes: int) -> int:
        """Elements that a thread holds."""
        return -(-self.size // lanes)


class Softmax(CudaFamily[SoftmaxParts]):
    """Config: a row stays with so many `lanes` of a block's `threads`."""

    name: ClassVar = "softmax"
    mixes_types: ClassVar = True
    image_layout = "nchw"  # a row is contiguous

    def read(self, step: Step) -> SoftmaxParts:
        *before, last = step.nodes
        refuse({f"the step ends with {last.op}, not with a softmax": last.op != SOFTMAX})
        given, rank = json.loads(last.attrs[ARGUMENTS]), len(last.types[0].shape)
        refuse(
            {
                **pointwise_chain.not_elements(step),
                "only along the last axis": rank == 0 or given["dim"] % rank != rank - 1,
                "there is nothing to compute": last.types[0].numel == 0,
                "it rounds what it is of": given.get("dtype") and last.types[0].dtype != "float32",
                "autograd is to remember it": WANTED in last.attrs,
                **not_the_end_alone(step),
                "weights are in nchw": step.phase == "refresh",
            }
        )
        part = step.part(before, last.inputs)  # of no nodes it is an input as it is
        expression = expression_of(part)
        many = len(expression.operands) > INPUTS_MAX
        refuse({f"it takes {INPUTS_MAX} inputs at most": many})
        return SoftmaxParts(step, expression, part)

    def why_not_config(self, parts: SoftmaxParts, config: Attrs, arch: Arch) -> str | None:
        lanes = int(config["lanes"])
        held = parts.held(lanes)
        return first_reason(
            {
                f"a thread would hold {held} elements, {HELD_MAX} fit": held > HELD_MAX,
                f"{lanes} lanes are more than a row has elements": lanes > 4
                and lanes >= 2 * parts.size,
            }
        )

    def estimate_us(self, parts: SoftmaxParts, config: Attrs, arch: Arch) -> float:
        """Like a norm of rows, whose cost table it shares: lanes without an element wait."""
        cost, lanes = arch.cost("layer_norm"), int(config["lanes"])
        moved, held = parts.step.traffic_bytes, parts.held(lanes)
        work = row_work_us(cost, moved, parts.size, held, lanes)
        return cost["launch_us"] + work * self.slowdown(parts, arch)

    def source(self, parts: SoftmaxParts, config: Attrs, arch: Arch) -> str:
        geometry = pointwise_chain.geometry_of(parts.before, parts.expression, "nchw", 1)
        chain = struct(
            "Chain",
            pointwise_chain.members(
                parts.expression,
                geometry,
                [parts.before.types[operand.name].dtype for operand in parts.expression.operands],
                [type_.dtype for _, type_ in parts.step.outputs],
            ),
            Index=vector_kernel.index_of(parts.type.numel),
            kSize=parts.size,
            kLanes=config["lanes"],
            kThreads=config["threads"],
        )
        return vector_kernel.source(self.name, "Softmax<Chain>", config["threads"], chain)

    def bind(self, parts: SoftmaxParts, config: Attrs, frame: Frame) -> Binding:
        names = [operand.name for operand in parts.expression.operands]
        rows, threads = parts.type.numel // parts.size, int(config["threads"])
        blocks = -(-rows // (threads // int(config["lanes"])))
        kernel = vector_kernel.VectorKernel(frame.built, blocks, threads)
        return vector_kernel.bound(
            [kernel], parts.step, frame, (*names, parts.step.nodes[-1].name, rows), names
        )


FAMILY = Softmax()
