"""Group norms with what follows them: `csrc/cuda/group_norm.h`."""

from __future__ import annotations

import math
from typing import ClassVar

from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, Step
from plantune.kernels.patterns.expression import expression, functors
from plantune.kernels.patterns.sample_norm import GroupsOfNorm, NormParts, norm_parts
from plantune.kernels.rendering import struct

# Sums of a block's threads, each of 12 bytes.
SUMS_MAX = 3 << 10


class GroupNormParts(NormParts, GroupsOfNorm):
    """A norm of groups."""


class GroupNorm(CudaFamily[GroupNormParts]):
    """Config: `layout` of images; a block of so many `threads` has so many `groups`."""

    name: ClassVar = "group_norm"
    mixes_types: ClassVar = True

    def read(self, step: Step) -> GroupNormParts:
        return norm_parts(GroupNormParts, step, self.name)

    def why_not_config(self, parts: GroupNormParts, config: Attrs, arch: Arch) -> str | None:
        return parts.why_not(config, _vector(parts, config))

    def estimate_us(self, parts: GroupNormParts, config: Attrs, arch: Arch) -> float:
        cost = arch.cost(self.name)
        moving_us = parts.moving_us(parts.step.traffic_bytes, config, cost)
        return cost["launch_us"] + moving_us * self.slowdown(parts, arch)

    def source(self, parts: GroupNormParts, config: Attrs, arch: Arch) -> str:
        norm = struct(
            "Norm",
            Expression=expression(parts.chain),
            kChannels=parts.type.shape[1],
            kPixels=parts.pixels,
            kOfGroup=parts.of_group,
            kVector=_vector(parts, config),
            kGroups=config["groups"],
            kThreads=config["threads"],
            kEps=float(parts.norm.attrs["eps"]),
            kNhwc=config["layout"] == "nhwc",
            **parts.affine,
            **parts.types,
        )
        before, threads = functors(parts.chain) + norm, config["threads"]
        return vector_kernel.source(self.name, "GroupNorm<Norm>", threads, before)

    def bind(self, parts: GroupNormParts, config: Attrs, frame: Frame) -> Binding:
        return parts.bind(frame, parts.blocks(config), int(config["threads"]))


def _vector(parts: GroupNormParts, config: Attrs) -> int:
    """Neighbours in memory that are read at once: in nchw of one channel, in nhwc of a part of a
    group or of whole ones, whose sums fit into shared memory.
    """
    if config["layout"] != "nhwc":
        return math.gcd(parts.pixels, parts.width)
    channels = parts.of_group
    vector = math.gcd(int(config["groups"]) * channels, parts.width)
    while (channels % vector and vector % channels) or (
        vector // channels * int(config["threads"]) > SUMS_MAX
    ):
        vector //= 2
    return vector


FAMILY = GroupNorm()
