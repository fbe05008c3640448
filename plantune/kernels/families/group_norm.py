"""Group norms with what follows them: `csrc/cuda/group_norm.h`."""

from __future__ import annotations

import math
from typing import ClassVar

from plantune.kernels import vector_kernel
from plantune.kernels.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, Step, first_reason
from plantune.kernels.patterns.expression import expression, functors
from plantune.kernels.patterns.sample_norm import NormParts, norm_parts
from plantune.kernels.rendering import struct

# Sums of a block's threads, each of 12 bytes.
SUMS_MAX = 3 << 10


class GroupNorm(CudaFamily[NormParts]):
    """Config: `layout` of images; a block of so many `threads` has so many `groups`."""

    name: ClassVar = "group_norm"

    def read(self, step: Step) -> NormParts:
        return norm_parts(step, "group_norm")

    def why_not_config(self, parts: NormParts, config: Attrs, arch: Arch) -> str | None:
        groups, nhwc = int(config["groups"]), config["layout"] == "nhwc"
        columns = groups * _of_group(parts) // _vector(parts, config)
        return first_reason(
            {
                "only images have the layout nhwc": nhwc and len(parts.type.shape) != 4,
                "groups are apart in nchw": not nhwc and groups > 1,
                f"{groups} do not divide the groups": parts.norm.attrs["groups"] % groups,
                f"{columns} vectors of a pixel are too many": nhwc
                and columns > int(config["threads"]),
            }
        )

    def estimate_us(self, parts: NormParts, config: Attrs, arch: Arch) -> float:
        """Memory, of which short rows use a part, and which few blocks do not keep busy."""
        cost, shortest = arch.cost(self.name), arch.cost(self.name)["row_bytes"]
        row_bytes = shortest
        if config["layout"] == "nhwc":
            row_bytes = _of_group(parts) * config["groups"] * parts.type.torch_dtype.itemsize
        used = min(1.0, row_bytes / shortest) ** 0.6
        filled = min(1.0, _blocks(parts, config) / cost["blocks"]) ** 0.5
        moved = float(parts.step.traffic_bytes / cost["bytes_per_us"] / used / filled)
        return cost["launch_us"] + moved * self.slowdown(parts, arch)

    def source(self, parts: NormParts, config: Attrs, arch: Arch) -> str:
        norm = struct(
            "Norm",
            T=vector_kernel.ELEMENTS[parts.type.dtype],
            Expression=expression(parts.chain),
            kChannels=parts.type.shape[1],
            kPixels=_pixels(parts),
            kOfGroup=_of_group(parts),
            kVector=_vector(parts, config),
            kGroups=config["groups"],
            kThreads=config["threads"],
            kEps=float(parts.norm.attrs["eps"]),
            kNhwc=config["layout"] == "nhwc",
            **parts.affine,
        )
        before, threads = functors(parts.chain) + norm, config["threads"]
        return vector_kernel.source(self.name, "GroupNorm<Norm>", threads, before)

    def bind(self, parts: NormParts, config: Attrs, frame: Frame) -> Binding:
        return parts.bind(frame, _blocks(parts, config), int(config["threads"]))


def _of_group(parts: NormParts) -> int:
    """Channels of a group."""
    return int(parts.type.shape[1] // parts.norm.attrs["groups"])


def _blocks(parts: NormParts, config: Attrs) -> int:
    return int(parts.type.shape[0] * parts.norm.attrs["groups"] // config["groups"])


def _pixels(parts: NormParts) -> int:
    return math.prod(parts.type.shape[2:])


def _vector(parts: NormParts, config: Attrs) -> int:
    """Neighbours in memory that are read at once: in nchw of one channel, in nhwc of a part of a
    group or of whole ones, whose sums fit into shared memory.
    """
    if config["layout"] != "nhwc":
        return math.gcd(_pixels(parts), vector_kernel.width(parts.type))
    channels = _of_group(parts)
    vector = math.gcd(int(config["groups"]) * channels, vector_kernel.width(parts.type))
    while (channels % vector and vector % channels) or (
        vector // channels * int(config["threads"]) > SUMS_MAX
    ):
        vector //= 2
    return vector


FAMILY = GroupNorm()
