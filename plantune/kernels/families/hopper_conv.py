"""Convolutions on Hopper's tensor copies and warpgroup products: `csrc/cuda/hopper_conv.h`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame, images
from plantune.kernels.hopper.design import ELEMENTS, SM_SHARED_BYTES, Design
from plantune.kernels.hopper.launch import Launch, packed_weight, placing_bytes
from plantune.kernels.hopper.tiles import (
    CHUNK,
    ROW_BYTES,
    ConvShape,
    conv_shape,
    dense_box,
    reused_box,
)
from plantune.kernels.patterns.epilogue import ConvEpilogue, conv_epilogue
from plantune.space.arch import Arch
from plantune.values import Attrs

SMS, SM_BYTES_PER_US, SM_CYCLES_PER_US = 132, 80e3, 1800
INCLUDE = '#include "cuda/hopper_conv.h"\n'


class Scalars(ctypes.Structure):
    """plantune::ConvScalars."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("scale", "bias", "offset"))


class HopperConv(CudaFamily):
    """Config: `tile_m` pixels by `tile_n` channels, `stages` of weights (and of images) in flight,
    `split_k` blocks of a cluster share a tile, `reuse` loads a pixel once for all taps, at most
    `blocks_per_sm` share an SM. Where a kernel follows at once, the blocks of a small grid are
    placed unevenly if more than one fits: 64 -> 128 channels, stride 2, 128 images took 5.0 us with
    one, 5.6 with two, 6.4 with three (H200, 2026-11-20).
    """

    name: ClassVar = "hopper_conv"

    def why_not_arch(self, arch: Arch) -> str | None:
        return super().why_not_arch(arch) or why_not_hopper(arch)

    def why_not_step(self, step: Step) -> str | None:
        try:
            return why_not_conv(step, conv_epilogue(step, unshifted=True))
        except IllegalCandidate as reason:
            return str(reason)

    def why_not_config(self, step: Step, config: Attrs, arch: Arch) -> str | None:
        shape = conv_shape(step, conv_epilogue(step, unshifted=True))
        if config["reuse"] and (reason := why_not_reuse(shape, int(config["tile_m"]))):
            return reason
        return _design(step, config).why_not() or super().why_not_config(step, config, arch)

    def threads(self, step: Step, config: Attrs) -> int:
        return _design(step, config).threads

    def shared_bytes(self, step: Step, config: Attrs) -> int:
        return _design(step, config).shared_bytes

    def layouts(self, step: Step, config: Attrs) -> Mapping[str, str]:
        return images(step, "nhwc")

    def workspace_bytes(self, step: Step, config: Attrs) -> int:
        return placing_bytes(step, conv_epilogue(step, unshifted=True))

    def source(self, step: Step, config: Attrs, arch: Arch) -> str:
        epilogue, design = conv_epilogue(step, unshifted=True), _design(step, config)
        constants = design.constants(step.types[epilogue.conv.name].dtype, epilogue)
        return INCLUDE + constants + design.kernel("HopperConv", "ConvScalars")

    def bind(self, step: Step, config: Attrs, frame: Frame) -> Binding:
        epilogue, design = conv_epilogue(step, unshifted=True), _design(step, config)
        prepared = Prepared(step, epilogue, frame)
        launch = Launch(step, epilogue, design, frame, prepared.weight, prepared.scalars)
        return Binding(launch.bound(), prepared.refresh)

    def estimate_us(self, step: Step, config: Attrs) -> float:
        return estimate_us(_design(step, config))


class Prepared:
    """What follows from weights alone, packed when they change."""

    def __init__(self, step: Step, epilogue: ConvEpilogue, frame: Frame) -> None:
        self._epilogue, self._values = epilogue, frame.values
        self.weight = packed_weight(step, epilogue, frame.device)
        channels = self.weight.shape[0]
        self._scalars = {
            part: torch.empty(1 if part == "offset" else channels, device=frame.device)
            for part in ("scale", "bias", "offset")
            if getattr(epilogue, part) is not None
        }

    def refresh(self) -> None:
        self.weight.copy_(self._values[self._epilogue.conv.inputs[1]].permute(0, 2, 3, 1))
        for part, scalars in self._scalars.items():
            scalars.copy_(self._values[getattr(self._epilogue, part)].flatten())

    def addresses(self) -> dict[str, int]:
        return {part: scalars.data_ptr() for part, scalars in self._scalars.items()}

    def scalars(self) -> Scalars:
        return Scalars(**self.addresses())


def why_not_hopper(arch: Arch) -> str | None:
    """Why an arch lacks what these kernels are made of."""
    if arch.cuda is not None and "wgmma" not in arch.cuda.features:
        return f"{arch.name} has no warpgroup products (wgmma)"
    return None


def why_not_conv(step: Step, epilogue: ConvEpilogue) -> str | None:
    """Why no config computes this convolution, or None where some may."""
    attrs, dtype = epilogue.conv.attrs, step.types[epilogue.conv.inputs[0]].dtype
    shape = conv_shape(step, epilogue)
    reasons = {
        f"a warpgroup multiplies float16 or bfloat16, got {dtype}": dtype not in ELEMENTS,
        "only convolutions without groups and dilation": attrs["groups"] != 1
        or attrs["dilation"] != (1, 1),
        "there is nothing to compute": min(shape.n, shape.c) == 0,
        f"pixels of {shape.c} and {shape.o} channels do not start at 16 bytes": shape.c % 8
        or shape.o % 8,
        f"a tensor copy steps over at most 8 pixels, got stride {shape.stride}": max(shape.stride)
        > 8,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_not_reuse(shape: ConvShape, tile_m: int) -> str | None:
    """Why taps cannot share what was loaded, or None where they can."""
    if shape.r * shape.s == 1 or shape.stride != (1, 1):
        return "only the taps of a larger kernel with stride 1 read the same pixels"
    if reused_box(shape, tile_m) is None:
        return f"no box of {tile_m} pixels by 8x8 can be copied at once"
    return None


def estimate_us(design: Design) -> float:
    """Rounds of blocks over the chip, each step bound by products or by what it loads."""
    share = 1 / design.shape.taps(design.box)[0] if design.reuse else 1.0
    loaded = design.image_bytes * share + design.tile_n * ROW_BYTES
    # Products of 64 columns read shared memory as fast as it goes, beside the copies.
    slower = 1.35 if design.tile_n == 64 else 1.1
    products = design.tile_m / CHUNK * design.tile_n * 2 * slower / SM_CYCLES_PER_US
    step_us = max(loaded / SM_BYTES_PER_US, products)
    ends_us = 1.8 + design.tile_m * design.own * 2e-5 + 0.5 / design.stages
    if design.split_k > 1:
        ends_us += 0.35 * design.split_k
    resident = min(SM_SHARED_BYTES // (design.shared_bytes + 1024), 2048 // design.threads)
    # Clusters of more than two do not fill the chip: 30 of four, 15 of eight (H200, 2026-11-20).
    waves = -(-design.blocks // (SMS if design.split_k <= 2 else 120))
    return waves * design.steps_of_block * step_us + -(-waves // max(resident, 1)) * ends_us


def _design(step: Step, config: Attrs) -> Design:
    epilogue = conv_epilogue(step, unshifted=True)
    shape, tile_m = conv_shape(step, epilogue), int(config["tile_m"])
    box = reused_box(shape, tile_m) if config["reuse"] else dense_box(shape, tile_m)
    if box is None:
        raise IllegalCandidate(f"no box of {tile_m} pixels by 8x8 can be copied at once")
    axes: dict[str, Any] = dict(config)
    return Design(shape, box, **axes, outputs=1 if epilogue.unshifted is None else 2)


FAMILY = HopperConv()
