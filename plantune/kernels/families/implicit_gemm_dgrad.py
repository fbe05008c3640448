"""Gradients of images as forward convolutions on CUTLASS main loops, for every CUDA arch.

They are kernels of `csrc/cuda/implicit_gemm_conv.h`: each pass turns the filters' channels and taps
around.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from plantune.graph import Node, Step, TensorType
from plantune.kernels.cutlass.implicit_gemm import GemmParts, ImplicitGemm, read_constants
from plantune.kernels.family import Arch, Attrs, Frame, refuse
from plantune.kernels.legality import not_within
from plantune.kernels.patterns.other_step import OtherStep
from plantune.kernels.weights.constants import Arrangement, Constants

ONE = (1, 1)
SUMS_MAX = 64


class ImplicitGemmDgrad(ImplicitGemm):
    """Config: see `ImplicitGemm`. Another gradient may be added."""

    name: ClassVar = "implicit_gemm_dgrad"

    def read(self, step: Step) -> GemmParts:
        return super().read(as_forward(step))

    def why_not_config(self, parts: GemmParts, config: Attrs, arch: Arch) -> str | None:
        loop = parts.loop(config)
        # On sm86 it spilled.
        crowded = loop.stages == 2 and loop.sums > SUMS_MAX
        if crowded:
            return f"{loop.sums} sums of a thread, and tiles on their way through registers"
        return super().why_not_config(parts, config, arch)

    def constants(self, parts: GemmParts, frame: Frame) -> Constants:
        c, o, r, s = parts.step.types[parts.weight].shape
        dtype = parts.conv.types[0].torch_dtype
        return read_constants(parts, frame, Arrangement((c, r, s, o), dtype, turned, packs=True))


def turned(weight: Tensor) -> Tensor:
    """A filter (O, C, R, S) as (C, R, S, O), the last tap first."""
    return weight.flip((2, 3)).permute(1, 2, 3, 0)


def as_forward(step: Step) -> Step:
    """A step that starts with the gradient of an image, as a convolution of the result's gradient;
    raises IllegalCandidate where it is none.
    """
    first = step.nodes[0]
    refuse({f"{first.op} is not the gradient of an image": first.op != "conv2d_dgrad"})
    _, weight = first.inputs
    attrs: Any = first.attrs
    o, c, r, s = step.types[weight].shape
    padding = tuple(size - 1 - pad for size, pad in zip((r, s), attrs["padding"], strict=True))
    refuse(
        {
            f"only gradients of convolutions with stride 1, got {attrs['stride']}": attrs["stride"]
            != ONE,
            "only gradients of convolutions without groups and dilation": attrs["groups"] != 1
            or attrs["dilation"] != ONE,
            **not_within(attrs["padding"], (r, s)),
            f"the weight {weight!r} is not constant between calls": weight not in step.constants,
        }
    )
    geometry = Attrs(stride=ONE, padding=padding, dilation=ONE, groups=1)
    filters = TensorType((c, o, r, s), step.types[weight].dtype)
    conv = Node(first.name, "conv2d", first.inputs, first.types, geometry)
    return OtherStep.of(
        step,
        nodes=(conv, *step.nodes[1:]),
        inputs=tuple((name, filters if name == weight else type_) for name, type_ in step.inputs),
    )


FAMILY = ImplicitGemmDgrad()
