"""The gradients of batch norms in training, with what makes the gradient that comes to them:
`csrc/cuda/batch_norm_grad.h`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plantune.graph.graph import Node
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.channel_slices import Slices, slices_kernels
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.family import Binding, Frame, Parts
from plantune.kernels.patterns.pointwise_chain import (
    Expression,
    evaluate,
    expression_of,
)
from plantune.kernels.rendering import struct

INPUTS_MAX, OUTPUTS_MAX = 3, 3
HELD = {1: 8, 2: 4, 3: 4}  # words of a thread, by the images that dy follows from
ENTRY_BYTES = 8  # plantune::Sums
AGAIN = "batch_norm_again"


@dataclass(frozen=True)
class BatchNormGradParts(Parts):
    """`expression` makes what leaves before the norm's own results, and last their dy; the norm's
    result, which it may read, is made `again` in the kernel.
    """

    norm: Node
    expression: Expression
    again: Node | None

    @property
    def operands(self) -> list[str]:
        """The values from which dy is computed."""
        return [operand.name for operand in self.expression.operands]

    @property
    def inputs(self) -> list[str]:
        """The images among them that are read."""
        return [name for name in self.operands if self.again is None or name != self.again.name]

    @property
    def stored(self) -> list[str]:
        return [name for name, _ in self.step.outputs if name not in self.norm.outputs]

    def slices(self, config: Attrs) -> Slices:
        inputs = len(self.inputs)
        return Slices(self.norm.types[0], config, HELD[inputs], images=inputs + 1)


class BatchNormGrad(CudaFamily[BatchNormGradParts]):
    """Config: see `plantune.kernels.cuda.channel_slices`."""

    name: ClassVar = "batch_norm_grad"
    image_layout = "nhwc"

    def read(self, step: Step) -> BatchNormGradParts:
        norm = step.nodes[-1]
        refuse({f"the step ends with {norm.op}": norm.op != "batch_norm_grad"})
        dy, x, weight, *statistics = (step.types[name] for name in norm.inputs)
        refuse(
            {
                **vector_kernel.not_an_element(x.dtype),
                **vector_kernel.not_an_element(weight.dtype),
                "dy and x have two dtypes": dy.dtype != x.dtype,
                "the batch's statistics are not float32": any(
                    found.dtype != "float32" for found in statistics
                ),
                f"only images and matrices, got {x.shape}": len(x.shape) not in (2, 4),
                "the gradient of x is not asked for": norm.name not in dict(step.outputs),
                "there is nothing to normalise": x.numel == 0,
            }
        )
        again = next((node for node in step.nodes if node.op == AGAIN), None)
        parts = BatchNormGradParts(step, norm, _result(step, again), again)
        images = {*parts.inputs, norm.inputs[1]}
        many = len(parts.operands) > INPUTS_MAX or len(parts.stored) >= OUTPUTS_MAX
        refuse(
            {
                "weights are in nchw": step.phase == "refresh"
                or not step.constants.isdisjoint(images),
                "the norm's statistics depend on what is made here": not {*norm.inputs[1:]}
                <= {name for name, _ in step.inputs},
                "dy follows from other things than images of its type": any(
                    step.types[name] != x for name in images
                ),
                f"dy follows from {INPUTS_MAX} images at most": many,
                "dy follows from no image": not parts.inputs,
                "another norm's result is made again": again is not None
                and not (_is_of(again, norm) and step.types[again.inputs[2]] == weight),
            }
        )
        return parts

    def why_not_config(self, parts: BatchNormGradParts, config: Attrs, arch: Arch) -> str | None:
        return first_reason(parts.slices(config).why_not(arch))

    def workspace_bytes(self, parts: BatchNormGradParts, config: Attrs) -> int:
        return parts.slices(config).part_bytes(ENTRY_BYTES)

    def estimate_us(self, parts: BatchNormGradParts, config: Attrs, arch: Arch) -> float:
        passes = 1 + len(parts.stored)
        us = parts.slices(config).estimate_us(arch, arch.cost("batch_norm"), passes)
        return us * self.slowdown(parts, arch)

    def source(self, parts: BatchNormGradParts, config: Attrs, arch: Arch) -> str:
        expression, weight = parts.expression, parts.step.types[parts.norm.inputs[2]]
        counts = {"kInputs": len(expression.operands), "kOutputs": len(expression.results)}
        head = struct("Result", evaluate(expression), **counts)
        again = parts.operands.index(parts.again.name) if parts.again is not None else -1
        slices = parts.slices(config)
        return slices.source(
            self.name, "BatchNormGrad", weight.dtype, head, arch, Head="Result", kAgain=again
        )

    def bind(self, parts: BatchNormGradParts, config: Attrs, frame: Frame) -> Binding:
        norm, inputs = parts.norm, parts.inputs
        bias = None if parts.again is None else parts.again.inputs[2]
        operands = (name if name in inputs else None for name in parts.operands)
        ends = (*operands, *parts.stored, 0)
        arguments = (*norm.inputs[1:], bias, *norm.outputs, frame.scratch, *ends)
        kernels = slices_kernels(frame.built, parts.slices(config))
        return vector_kernel.bound(kernels, parts.step, frame, arguments, [norm.inputs[1], *inputs])


def _is_of(again: Node, norm: Node) -> bool:
    """Whether that result is the one whose gradient the norm's is."""
    x, weight, _, mean, invstd = again.inputs
    return norm.inputs[1:] == (x, weight, mean, invstd)


def _result(step: Step, again: Node | None) -> Expression:
    """How dy is computed, which may be an input as it is."""
    *nodes, norm = (node for node in step.nodes if node is not again)
    leaving = (name for name, _ in step.outputs if name not in norm.outputs)
    return expression_of(step.part(nodes, (*leaving, norm.inputs[0])))


FAMILY = BatchNormGrad()
