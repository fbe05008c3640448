"""Gradients of weights on Hopper: `csrc/cuda/hopper_wgrad.h`."""

from __future__ import annotations

from typing import ClassVar

from plantune.kernels.hopper.weight_family import WgradFamily


class HopperWgrad(WgradFamily):
    """Config: see `WgradFamily`."""

    name: ClassVar = "hopper_wgrad"


FAMILY = HopperWgrad()
