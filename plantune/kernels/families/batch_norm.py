"""Batch norms in training, with what follows them: `csrc/cuda/batch_norm.h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plantune.graph.graph import Node
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.channel_slices import Slices, slices_kernels
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.family import Binding, Frame, Parts
from plantune.kernels.patterns.expression import Chain, expression, functors
from plantune.kernels.patterns.sample_norm import what_follows

HELD = 16  # words of a thread
ENTRY_BYTES = 12  # plantune::Moments


@dataclass(frozen=True)
class BatchNormParts(Parts):
    """y = chain of (x - mean) * invstd * weight + bias."""

    norm: Node
    chain: Chain
    residual: str | None

    def slices(self, config: Attrs) -> Slices:
        return Slices(self.norm.types[0], config, HELD, images=1)


class BatchNorm(CudaFamily[BatchNormParts]):
    """Config: see `plantune.kernels.cuda.channel_slices`."""

    name: ClassVar = "batch_norm"
    image_layout = "nhwc"

    def read(self, step: Step) -> BatchNormParts:
        norm = step.nodes[0]
        refuse({f"the step starts with {norm.op}, not with a batch_norm": norm.op != "batch_norm"})
        chain, residual = what_follows(step)
        x, *channels = (step.types[name] for name in norm.inputs)
        parameter = channels[0].dtype
        refuse(
            {
                **vector_kernel.not_an_element(parameter),
                "weights and statistics have several dtypes": len({c.dtype for c in channels}) > 1,
                "the batch's statistics are not float32": norm.types[1].dtype != "float32",
                f"only images and matrices, got {x.shape}": len(x.shape) not in (2, 4),
            }
        )
        return BatchNormParts(step, norm, chain, residual)

    def why_not_config(self, parts: BatchNormParts, config: Attrs, arch: Arch) -> str | None:
        return first_reason(parts.slices(config).why_not(arch))

    def workspace_bytes(self, parts: BatchNormParts, config: Attrs) -> int:
        return parts.slices(config).part_bytes(ENTRY_BYTES)

    def estimate_us(self, parts: BatchNormParts, config: Attrs, arch: Arch) -> float:
        passes = 1 if parts.residual is None else 2
        us = parts.slices(config).estimate_us(arch, arch.cost(self.name), passes)
        return us * self.slowdown(parts, arch)

    def source(self, parts: BatchNormParts, config: Attrs, arch: Arch) -> str:
        chain, attrs = parts.chain, parts.norm.attrs
        return parts.slices(config).source(
            self.name,
            "BatchNorm",
            parts.step.types[parts.norm.inputs[1]].dtype,
            functors(chain),
            arch,
            Expression=expression(chain),
            kEps=float(attrs["eps"]),
            kMomentum=float(attrs["momentum"]),
        )

    def bind(self, parts: BatchNormParts, config: Attrs, frame: Frame) -> Binding:
        x, weight, bias, *running = parts.norm.inputs
        made = (parts.step.nodes[-1].name, *parts.norm.outputs[1:])
        arguments = (x, made[0], weight, bias, parts.residual, *running, *made[1:], frame.scratch)
        read = [name for name in (x, parts.residual) if name is not None]
        kernels = slices_kernels(frame.built, parts.slices(config))
        return vector_kernel.bound(kernels, parts.step, frame, arguments, read)


FAMILY = BatchNorm()
