"""oneDNN convolution into given memory, as torch offers it.

The operator adds to its destination, so it needs no memory of its own: the destination holds zeros
or a residual before it. It runs float32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from plantune.kernels.cpu.folded import Folded
from plantune.kernels.cpu.huge_pages import in_huge_pages
from plantune.kernels.family import Arch, Attrs, Binding, Frame, KernelFamily
from plantune.kernels.patterns.epilogue import ConvParts

DTYPES = ("float32", "bfloat16")
C = TypeVar("C", bound=ConvParts)


@dataclass(frozen=True)
class Geometry:
    """What the operator asks for beside its tensors."""

    padding: tuple[int, ...] = (0, 0)
    stride: tuple[int, ...] = (1, 1)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    @staticmethod
    def of(attrs: Attrs) -> Geometry:
        """The geometry of a conv2d node."""
        return Geometry(attrs["padding"], attrs["stride"], attrs["dilation"], attrs["groups"])

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (list(self.padding), list(self.stride), list(self.dilation), self.groups)


class OneDnnFamily(KernelFamily[C]):
    """A family whose convolutions are those of oneDNN."""

    arch_kinds = frozenset(("cpu",))

    def why_not_arch(self, arch: Arch) -> str | None:
        if not is_there():
            return "this torch was built without oneDNN"
        return super().why_not_arch(arch)

    def why_not_config(self, parts: C, config: Attrs, arch: Arch) -> str | None:
        return why_not_dtype(parts.dtype)


def is_there() -> bool:
    """Whether this torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())


def runs_bfloat16() -> bool:
    """Whether this CPU has the instructions that oneDNN needs for it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def why_not_dtype(dtype: str) -> str | None:
    """Why convolutions of a dtype do not run on this CPU, or None if they do."""
    if dtype not in DTYPES:
        return f"oneDNN runs {' and '.join(DTYPES)}, not {dtype}"
    if dtype == "bfloat16" and not runs_bfloat16():
        return "oneDNN runs bfloat16 on CPUs with AVX-512 or AVX-NE-CONVERT alone"
    return None


def pack(weight: Tensor, geometry: Geometry, image_shape: Sequence[int]) -> Tensor:
    """The weight in oneDNN's own layout for images of that shape."""
    reorder = torch.ops.mkldnn._reorder_convolution_weight
    return in_huge_pages(reorder(weight, *geometry.arguments, list(image_shape)))


def add_convolution(
    target: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> None:
    """target += conv(x, weight) + bias."""
    run = torch.ops.mkldnn._convolution_pointwise_.binary
    run(target, x, weight, bias, *geometry.arguments, "add", 1.0, None, [], None)


def bound(
    parts: ConvParts, frame: Frame, geometry: Geometry, pack: Callable[[Tensor], Tensor]
) -> Binding:
    """A convolution with its epilogue, whose weight is given as `pack` makes it.

    ReLU is applied in place after the convolution, because oneDNN's own turns NaN into 0 (seen
    with 3.12) and would hide a diverging network.
    """
    values, folded = frame.values, Folded(parts.epilogue, frame.values, pack)
    x, residual, y = parts.x, parts.epilogue.residual, values[parts.y]

    def launch(stream: int) -> None:
        if residual is None:
            y.zero_()
        else:
            y.copy_(values[residual])
        add_convolution(y, values[x], folded.weight, folded.bias, geometry)
        folded.finish(y)

    return Binding(launch, folded.refresh)
