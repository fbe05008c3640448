"""Gradients of float32 weights on Hopper's tensor cores: `csrc/cuda/hopper_float_wgrad.h`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from plantune.kernels.family import Arch, Attrs
from plantune.kernels.hopper.float_products import why_not_math
from plantune.kernels.hopper.float_weight_gradient import FloatWgradDesign
from plantune.kernels.hopper.weight_family import WgradFamily, WgradParts
from plantune.kernels.hopper.weight_gradient import Cut

# By `math`, the planes that a float becomes: products read tf32 along the reduction alone, so two
# planes of bfloat16 stand for it, which have more digits.
PLANES = {"tf32": 2, "planes": 3}


class HopperFloatWgrad(WgradFamily):
    """Config: see `WgradFamily`, and `math` as `FloatProducts` has it."""

    name: ClassVar = "hopper_float_wgrad"
    mixes_types: ClassVar = False
    multiplies: ClassVar = ("float32",)

    def why_not_config(self, parts: WgradParts, config: Attrs, arch: Arch) -> str | None:
        return why_not_math(parts.step, config) or super().why_not_config(parts, config, arch)

    def can_be_guessed(self, parts: WgradParts, config: Attrs) -> bool:
        """Not yet: we have no times beside cuDNN's."""
        return False

    def uncut(self, cut: Cut, axes: Mapping[str, int], config: Attrs) -> FloatWgradDesign:
        return FloatWgradDesign(cut, **axes, split_k=1, planes=PLANES[str(config["math"])])


FAMILY = HopperFloatWgrad()
