"""The gradients of group norms: `csrc/cuda/group_norm_grad.h`."""

from __future__ import annotations

import math
from typing import ClassVar

from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, Step, refuse
from plantune.kernels.patterns.sample_norm import GradientOfNorm, GroupsOfNorm
from plantune.kernels.rendering import struct

# In nchw a block has two sums of each channel of a group.
OF_GROUP_MAX = 4 << 10


class GroupNormGradParts(GradientOfNorm, GroupsOfNorm):
    """The gradients of a norm of groups."""

    def vector(self, config: Attrs) -> int:
        """Neighbours in memory that are read at once."""
        nhwc = config["layout"] == "nhwc"
        neighbours = int(config["groups"]) * self.of_group if nhwc else self.pixels
        return math.gcd(neighbours, self.width)


class GroupNormGrad(CudaFamily[GroupNormGradParts]):
    """Config: `layout` of images; a block of so many `threads` has so many `groups`."""

    name: ClassVar = "group_norm_grad"
    mixes_types: ClassVar = True

    def read(self, step: Step) -> GroupNormGradParts:
        norm = step.nodes[0]
        refuse({f"only a group norm's gradient, got {step.ops}": step.ops != ("group_norm_grad",)})
        parts = GroupNormGradParts(step, norm)
        parts.require_alone()
        refuse(
            {
                f"groups of {parts.of_group} channels are too wide": parts.of_group > OF_GROUP_MAX,
            }
        )
        return parts

    def why_not_config(self, parts: GroupNormGradParts, config: Attrs, arch: Arch) -> str | None:
        return parts.why_not(config, parts.vector(config))

    def workspace_bytes(self, parts: GroupNormGradParts, config: Attrs) -> int:
        return 4 * parts.type.shape[0] * parts.sums * parts.channels

    def estimate_us(self, parts: GroupNormGradParts, config: Attrs, arch: Arch) -> float:
        """Like the norm, whose cost table it shares; second reads come from the cache."""
        cost, launches = arch.cost("group_norm"), 2 if parts.sums else 1
        moved = parts.step.traffic_bytes + parts.type.size_bytes
        work = parts.moving_us(moved, config, cost)
        return launches * cost["launch_us"] + work * self.slowdown(parts, arch)

    def source(self, parts: GroupNormGradParts, config: Attrs, arch: Arch) -> str:
        norm = struct(
            "Norm",
            kChannels=parts.channels,
            kPixels=parts.pixels,
            kOfGroup=parts.of_group,
            kVector=parts.vector(config),
            kGroups=config["groups"],
            kThreads=config["threads"],
            kSums=parts.sums,
            kNhwc=config["layout"] == "nhwc",
            **parts.types,
        )
        kernel, threads = "GroupNormGrad<Norm>", config["threads"]
        return vector_kernel.source(self.name, kernel, threads, norm, parts.entries)

    def bind(self, parts: GroupNormGradParts, config: Attrs, frame: Frame) -> Binding:
        blocks, threads = parts.blocks(config), int(config["threads"])
        return parts.bind(frame, blocks, threads, parts.channels, (parts.type.shape[0],))


FAMILY = GroupNormGrad()
