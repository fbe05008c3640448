"""Chains of pointwise ops as one expression, in one pass over memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plantune.graph import Step, TensorType
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, first_reason, refuse
from plantune.kernels.family import Binding, Frame, Parts
from plantune.kernels.patterns import pointwise_chain
from plantune.kernels.rendering import struct
from plantune.kernels.weights.constants import rows_of
from plantune.kernels.weights.pitch import pitch_of

INPUTS_MAX, OUTPUTS_MAX = 8, 4


@dataclass(frozen=True)
class Chain(Parts):
    """What a step computes for each element of the result, whose shape all outputs have."""

    expression: pointwise_chain.Expression

    @property
    def type(self) -> TensorType:
        return self.step.outputs[-1][1]

    def geometry(self, config: Attrs) -> pointwise_chain.Geometry:
        """The addresses of the elements."""
        width = max(vector_kernel.width(type_) for _, type_ in self.step.outputs)
        return pointwise_chain.geometry_of(self.step, self.expression, config["layout"], width)

    def images(self, config: Attrs) -> tuple[str, ...]:
        """What it reads that has the shape of the result, in nhwc."""
        if config["layout"] != "nhwc":
            return ()
        return tuple(
            operand.name
            for operand in self.expression.operands
            if operand.name not in self.step.constants
            and self.step.types[operand.name].shape == self.type.shape
        )


class Pointwise(CudaFamily[Chain]):
    """Config: `layout` of images; a thread of a block takes so many `vectors`."""

    name: ClassVar = "pointwise"
    mixes_types: ClassVar = True

    def read(self, step: Step) -> Chain:
        chain = Chain(step, pointwise_chain.expression_of(step))
        inputs, outputs = len(chain.expression.operands), len(chain.expression.results)
        many = inputs > INPUTS_MAX or outputs > OUTPUTS_MAX
        refuse(
            {
                **pointwise_chain.not_elements(step),
                "there is nothing to compute": chain.type.numel == 0,
                f"it takes {INPUTS_MAX} inputs and {OUTPUTS_MAX} outputs at most": many,
            }
        )
        return chain

    def why_not_config(self, parts: Chain, config: Attrs, arch: Arch) -> str | None:
        if config["layout"] != "nhwc":
            return None
        return first_reason(
            {
                "tensors that are not images have the layout nchw": len(parts.type.shape) != 4,
                "weights are in nchw": parts.step.phase == "refresh",
            }
        )

    def reads_slices(self, parts: Chain, config: Attrs) -> frozenset[str]:
        return frozenset(parts.images(config))

    def source(self, parts: Chain, config: Attrs, arch: Arch) -> str:
        geometry = parts.geometry(config)
        images = parts.images(config)
        chain = struct(
            "Chain",
            pointwise_chain.members(
                parts.expression,
                geometry,
                [parts.step.types[operand.name].dtype for operand in parts.expression.operands],
                [type_.dtype for _, type_ in parts.step.outputs],
            ),
            Index=vector_kernel.index_of(parts.type.numel),
            kWidth=geometry.width,
            kVectors=config["vectors"],
            kThreads=config["threads"],
            # Of images that may be slices of others.
            kChannels=parts.type.shape[1] if images else 1,
            kCut=[operand.name in images for operand in parts.expression.operands],
        )
        return vector_kernel.source(self.name, "Pointwise<Chain>", config["threads"], chain)

    def bind(self, parts: Chain, config: Attrs, frame: Frame) -> Binding:
        values, count = frame.values, parts.type.numel
        names = [operand.name for operand in parts.expression.operands]
        # The source is written for constants in nchw.
        constants = rows_of(parts.step, frame)
        block = parts.geometry(config).width * int(config["threads"]) * int(config["vectors"])
        kernel = vector_kernel.VectorKernel(frame.built, -(-count // block), int(config["threads"]))
        images, width = parts.images(config), parts.geometry(config).width

        def launch(stream: int) -> None:
            read = [constants.tensor(name) for name in names]
            made = [values[name] for name, _ in parts.step.outputs]
            addresses = [tensor.data_ptr() for tensor in (*read, *made)]
            pitches = [
                _cut(tensor) if name in images else 0
                for name, tensor in zip(names, read, strict=True)
            ]
            whole = not any(pitch % width for pitch in pitches)
            arguments = vector_kernel.members(*addresses, count, *pitches)
            kernel.launch(stream, arguments, read, whole=whole)

        return Binding(launch, constants=constants.all)


def _cut(image: Tensor) -> int:
    """How far apart the pixels of a slice of channels are; 0 for a whole image."""
    pitch = pitch_of(image)
    return 0 if pitch == image.shape[1] else pitch


FAMILY = Pointwise()
