"""The gradients of batch norms in training: `csrc/cuda/batch_norm_grad.h`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from plantune.canonical import Attrs
from plantune.graph.graph import Node
from plantune.graph.step import Step
from plantune.kernels import vector_kernel
from plantune.kernels.channel_slices import Slices, SlicesKernel
from plantune.kernels.constants import rows_of
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame, Parts, images
from plantune.kernels.legality import first_reason, refuse
from plantune.space.arch import Arch

HELD = 8  # words of a thread, of each of two images
ENTRY_BYTES = 8  # plantune::Sums
SOURCE = """#include "cuda/batch_norm_grad.h"
struct Norm {{
{shape}}};
using Kernel = plantune::BatchNormGrad<Norm>;"""


@dataclass(frozen=True)
class BatchNormGradParts(Parts):
    norm: Node

    def slices(self, config: Attrs) -> Slices:
        return Slices(self.norm.types[0], config, HELD, images=2)


class BatchNormGrad(CudaFamily[BatchNormGradParts]):
    """Config: see `plantune.kernels.channel_slices`."""

    name: ClassVar = "batch_norm_grad"

    def read(self, step: Step) -> BatchNormGradParts:
        norm = step.nodes[0]
        refuse({"not the gradients of one batch norm": step.ops != ("batch_norm_grad",)})
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
                "weights are in nchw": step.phase == "refresh"
                or not step.constants.isdisjoint(norm.inputs[:2]),
            }
        )
        return BatchNormGradParts(step, norm)

    def layouts(self, parts: BatchNormGradParts, config: Attrs) -> Mapping[str, str]:
        return images(parts.step, "nhwc")

    def why_not_config(self, parts: BatchNormGradParts, config: Attrs, arch: Arch) -> str | None:
        return first_reason(parts.slices(config).why_not(arch))

    def workspace_bytes(self, parts: BatchNormGradParts, config: Attrs) -> int:
        return parts.slices(config).part_bytes(ENTRY_BYTES)

    def estimate_us(self, parts: BatchNormGradParts, config: Attrs, arch: Arch) -> float:
        us = parts.slices(config).estimate_us(arch, arch.cost("batch_norm"), 1)
        return us * self.slowdown(parts, arch)

    def source(self, parts: BatchNormGradParts, config: Attrs, arch: Arch) -> str:
        slices = parts.slices(config)
        shape = slices.shape(parts.step.types[parts.norm.inputs[2]].dtype)
        return SOURCE.format(shape=shape) + slices.entries()

    def bind(self, parts: BatchNormGradParts, config: Attrs, frame: Frame) -> Binding:
        constants, values = rows_of(parts.step, frame), frame.values
        kernel = SlicesKernel(frame.built, parts.slices(config))
        leaving = dict(parts.step.outputs)
        sums = 0 if frame.workspace is None else frame.workspace.data_ptr()

        def launch(stream: int) -> None:
            read = [constants.tensor(name) for name in parts.norm.inputs]
            made = (values[n].data_ptr() if n in leaving else 0 for n in parts.norm.outputs)
            addresses = [tensor.data_ptr() for tensor in read]
            kernel.launch(stream, vector_kernel.members(*addresses, *made, sums), read[:2])

        return Binding(launch, constants=constants.all)


FAMILY = BatchNormGrad()
