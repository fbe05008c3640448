"""Layer norms with what follows them: `csrc/cuda/layer_norm.h`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from plantune.kernels import vector_kernel
from plantune.kernels.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason
from plantune.kernels.family import Binding, Frame, images
from plantune.kernels.patterns.expression import expression, functors
from plantune.kernels.patterns.sample_norm import NormParts, norm_parts
from plantune.kernels.rendering import struct

# Elements of a row that a thread holds: more do not fit into its registers.
HELD_MAX = 64


class LayerNorm(CudaFamily[NormParts]):
    """Config: a row stays with so many `lanes` of a block's `threads`."""

    name: ClassVar = "layer_norm"

    def read(self, step: Step) -> NormParts:
        return norm_parts(step, "layer_norm")

    def layouts(self, parts: NormParts, config: Attrs) -> Mapping[str, str]:
        """A row is contiguous."""
        return images(parts.step, "nchw")

    def why_not_config(self, parts: NormParts, config: Attrs, arch: Arch) -> str | None:
        lanes, threads = int(config["lanes"]), int(config["threads"])
        held = _held(parts, lanes)
        return first_reason(
            {
                f"a block of {threads} threads has no {lanes} for a row": lanes > threads,
                f"a thread would hold {held} elements, {HELD_MAX} fit": held > HELD_MAX,
                f"{lanes} lanes are more than a row has vectors": _idle(parts, lanes),
            }
        )

    def estimate_us(self, parts: NormParts, config: Attrs, arch: Arch) -> float:
        """The lanes that have nothing to do in the last of their vectors wait, too; what a thread
        holds it reads and adds one after the other.
        """
        cost, lanes = arch.cost(self.name), int(config["lanes"])
        held = _held(parts, lanes)
        moved = parts.step.traffic_bytes / cost["bytes_per_us"] / (_size(parts) / (held * lanes))
        work = moved + held * cost["element_us"]
        return cost["launch_us"] + work * self.slowdown(parts, arch)

    def source(self, parts: NormParts, config: Attrs, arch: Arch) -> str:
        norm = struct(
            "Norm",
            T=vector_kernel.ELEMENTS[parts.type.dtype],
            Expression=expression(parts.chain),
            kSize=_size(parts),
            kVector=_vector(parts),
            kLanes=config["lanes"],
            kThreads=config["threads"],
            kEps=float(parts.norm.attrs["eps"]),
            **parts.affine,
        )
        before, threads = functors(parts.chain) + norm, config["threads"]
        return vector_kernel.source(self.name, "LayerNorm<Norm>", threads, before)

    def bind(self, parts: NormParts, config: Attrs, frame: Frame) -> Binding:
        rows, threads = parts.type.numel // _size(parts), int(config["threads"])
        blocks = -(-rows // (threads // int(config["lanes"])))
        return parts.bind(frame, blocks, threads, rows)


def _size(parts: NormParts) -> int:
    """Elements of a row."""
    return math.prod(parts.type.shape[-parts.norm.attrs["axes"] :])


def _vector(parts: NormParts) -> int:
    return math.gcd(_size(parts), vector_kernel.width(parts.type))


def _held(parts: NormParts, lanes: int) -> int:
    """Elements that a thread holds."""
    vector = _vector(parts)
    return -(-_size(parts) // vector // lanes) * vector


def _idle(parts: NormParts, lanes: int) -> bool:
    """Whether half of the lanes would do as well."""
    return lanes > 4 and _held(parts, lanes) == _held(parts, lanes // 2)


FAMILY = LayerNorm()
