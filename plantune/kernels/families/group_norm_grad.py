"""The gradients of group norms: `csrc/cuda/group_norm_grad.h`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from plantune.graph import Node, Step, TensorType
from plantune.kernels import vector_kernel
from plantune.kernels.constants import rows_of
from plantune.kernels.cuda_family import Arch, Attrs, CudaFamily, first_reason, refuse
from plantune.kernels.family import Binding, Frame, Parts
from plantune.kernels.rendering import cxx_bool

# In nchw a block has two sums of each channel of a group.
OF_GROUP_MAX = 4 << 10
COLLECTED = 32  # elements of weight and bias that a block collects
SOURCE = (
    """#include "cuda/group_norm_grad.h"
struct Norm {{
  using T = {element};
  static constexpr int kChannels = {channels}, kPixels = {pixels}, kOfGroup = {of_group};
  static constexpr int kVector = {vector}, kGroups = {groups}, kThreads = {threads};
  static constexpr int kSums = {sums};
  static constexpr bool kNhwc = {nhwc};
}};
using Kernel = plantune::GroupNormGrad<Norm>;"""
    + vector_kernel.ENTRIES
)


@dataclass(frozen=True)
class GroupNormGradParts(Parts):
    """The gradients of x, and of the first `sums` of weight and bias."""

    @property
    def norm(self) -> Node:
        return self.step.nodes[0]

    @property
    def type(self) -> TensorType:
        return self.norm.types[0]

    @property
    def sums(self) -> int:
        return int(self.norm.attrs["affine"])

    @property
    def images(self) -> int:
        return self.type.shape[0]

    @property
    def channels(self) -> int:
        return self.type.shape[1]

    @property
    def pixels(self) -> int:
        return math.prod(self.type.shape[2:])

    @property
    def of_group(self) -> int:
        """Channels of a group."""
        return int(self.channels // self.norm.attrs["groups"])

    def vector(self, config: Attrs) -> int:
        """Neighbours in memory that are read at once."""
        nhwc = config["layout"] == "nhwc"
        neighbours = int(config["groups"]) * self.of_group if nhwc else self.pixels
        return math.gcd(neighbours, vector_kernel.width(self.type))

    def blocks(self, config: Attrs) -> int:
        return int(self.images * self.norm.attrs["groups"] // config["groups"])


class GroupNormGrad(CudaFamily[GroupNormGradParts]):
    """Config: `layout` of images; a block of so many `threads` has so many `groups`."""

    name: ClassVar = "group_norm_grad"

    def read(self, step: Step) -> GroupNormGradParts:
        norm = step.nodes[0]
        refuse({f"only a group norm's gradient, got {step.ops}": step.ops != ("group_norm_grad",)})
        parts = GroupNormGradParts(step)
        dtypes = {step.types[name].dtype for name in norm.inputs}
        refuse(
            {
                **vector_kernel.not_an_element(parts.type.dtype),
                f"it takes one dtype, got {sorted(dtypes)}": len(dtypes) > 1,
                "there is nothing to normalise": parts.type.numel == 0,
                f"groups of {parts.of_group} channels are too wide": parts.of_group > OF_GROUP_MAX,
                "weights are in nchw": step.phase == "refresh"
                or not step.constants.isdisjoint(norm.inputs[:4]),
            }
        )
        return parts

    def why_not_config(self, parts: GroupNormGradParts, config: Attrs, arch: Arch) -> str | None:
        groups, nhwc = int(config["groups"]), config["layout"] == "nhwc"
        columns = groups * parts.of_group // parts.vector(config)
        return first_reason(
            {
                "only images have the layout nhwc": nhwc and len(parts.type.shape) != 4,
                "groups are apart in nchw": not nhwc and groups > 1,
                f"{groups} do not divide the groups": parts.norm.attrs["groups"] % groups,
                f"{columns} vectors of a pixel are too many": nhwc
                and columns > int(config["threads"]),
            }
        )

    def workspace_bytes(self, parts: GroupNormGradParts, config: Attrs) -> int:
        return 4 * parts.images * parts.sums * parts.channels

    def estimate_us(self, parts: GroupNormGradParts, config: Attrs, arch: Arch) -> float:
        """As of the norm itself, whose costs these are; what is read again comes from the cache."""
        cost, shortest = arch.cost("group_norm"), arch.cost("group_norm")["row_bytes"]
        row_bytes = shortest
        if config["layout"] == "nhwc":
            row_bytes = parts.of_group * config["groups"] * parts.type.torch_dtype.itemsize
        used = min(1.0, row_bytes / shortest) ** 0.6
        filled = min(1.0, parts.blocks(config) / cost["blocks"]) ** 0.5
        moved = parts.step.traffic_bytes + parts.type.size_bytes
        launches = 2 if parts.sums else 1
        work = float(moved / cost["bytes_per_us"] / used / filled)
        return launches * cost["launch_us"] + work * self.slowdown(parts, arch)

    def source(self, parts: GroupNormGradParts, config: Attrs, arch: Arch) -> str:
        text = SOURCE + (vector_kernel.COLLECT if parts.sums else "")
        return text.format(
            element=vector_kernel.ELEMENTS[parts.type.dtype],
            channels=parts.channels,
            pixels=parts.pixels,
            of_group=parts.of_group,
            vector=parts.vector(config),
            groups=config["groups"],
            threads=config["threads"],
            sums=parts.sums,
            nhwc=cxx_bool(config["layout"] == "nhwc"),
        )

    def bind(self, parts: GroupNormGradParts, config: Attrs, frame: Frame) -> Binding:
        constants, values = rows_of(parts.step, frame), frame.values
        threads, built = int(config["threads"]), frame.built
        kernels = [vector_kernel.VectorKernel(built, parts.blocks(config), threads)]
        if parts.sums:
            columns = -(-parts.sums * parts.channels // COLLECTED)
            kernels.append(vector_kernel.VectorKernel(built, columns, threads, name="collect"))
        leaving = dict(parts.step.outputs)
        sums = 0 if frame.workspace is None else frame.workspace.data_ptr()

        def launch(stream: int) -> None:
            read = [constants.tensor(name) for name in parts.norm.inputs]
            given = [tensor.data_ptr() for tensor in read] + [0] * (5 - len(read))
            made = [values[n].data_ptr() if n in leaving else 0 for n in parts.norm.outputs]
            made += [0] * (3 - len(made))
            arguments = vector_kernel.members(*given, *made, sums, parts.images)
            for kernel in kernels:
                kernel.launch(stream, arguments, read[:2])

        return Binding(launch, constants=constants.all)


FAMILY = GroupNormGrad()
