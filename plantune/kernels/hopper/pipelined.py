"""Convolutions whose images and weights stream through shared memory: `csrc/cuda/hopper_conv.h`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar

from plantune.errors import IllegalCandidate
from plantune.kernels.chips import measured_chip
from plantune.kernels.family import Arch, Attrs, Binding, Frame, Step, refuse
from plantune.kernels.hopper import family as hopper
from plantune.kernels.hopper.design import Design
from plantune.kernels.hopper.elements import Elements, size_of
from plantune.kernels.hopper.launch import HopperLaunch
from plantune.kernels.hopper.products import ELEMENTS, FACTORS
from plantune.kernels.hopper.tiles import PoolGather, dense_box, reused_box
from plantune.kernels.patterns.epilogue import conv_epilogue
from plantune.kernels.patterns.other_step import as_convolution
from plantune.kernels.weights.constants import Constants

INCLUDE = '#include "cuda/{}.h"\n'
# From so many tiles of a multiprocessor on, blocks stay that have one alone.
PERSISTENT_FROM = 1.5
AXES = ("tile_m", "tile_n", "stages", "split_k", "reuse", "blocks_per_sm")
# By whether they stay.
KERNELS = {
    False: ("hopper_conv", "HopperConv"),
    True: ("hopper_conv_persistent", "HopperConvPersistent"),
}


class PipelinedConv(hopper.HopperFamily[hopper.WarpgroupParts]):
    """Config: `tile_m` pixels by `tile_n` channels, `stages` of weights (and of images) in flight,
    `split_k` blocks of a cluster share a tile, `reuse` loads a pixel once for all taps, at most
    `blocks_per_sm` share an SM. Where a kernel follows at once, the blocks of a small grid are
    placed unevenly if more than one fits: 64 -> 128 channels, stride 2, 128 images took 5.0 us with
    one, 5.6 with two, 6.4 with three (H200, 2026-11-20).
    """

    mixes_types: ClassVar = True
    # Whether it reads filters from the last tap to the first, and along their other axis.
    reverses: ClassVar[bool] = False
    # What it multiplies.
    multiplies: ClassVar[Collection[str]] = ELEMENTS

    def read(self, step: Step) -> hopper.WarpgroupParts:
        step = as_convolution(step)
        parts = hopper.WarpgroupParts(step, conv_epilogue(step, unshifted=True, twice=True))
        self.require_types(parts)
        refuse(hopper.not_copied(step, parts.epilogue))
        return parts

    def require_types(self, parts: hopper.WarpgroupParts) -> None:
        """Raises IllegalCandidate for element types that its kernels do not have."""
        types, epilogue = parts.step.types, parts.epilogue
        x, factor = types[parts.x].dtype, parts.conv.types[0].dtype
        named = (parts.x, parts.y, epilogue.unshifted, *epilogue.images.values())
        images = {types[name].dtype for name in named if name is not None}
        sums = {types[added.name].dtype for added in epilogue.sums}
        refuse(
            {
                **hopper.not_multiplied(factor, self.multiplies),
                f"x of {x} as factors of {factor}": x != factor,
                f"images of {' and '.join(sorted(images))}": images - FACTORS.keys(),
                f"sums of {' and '.join(sorted(sums))}": sums not in (set(), {x}, {"float32"}),
            }
        )

    def elements(self, parts: hopper.WarpgroupParts, config: Attrs) -> Elements:
        """The elements of its operands."""
        return Elements.of(parts, parts.conv.types[0].dtype)

    def why_not_config(self, parts: hopper.WarpgroupParts, config: Attrs, arch: Arch) -> str | None:
        if config["reuse"] and (reason := hopper.why_not_reuse(parts.shape, int(config["tile_m"]))):
            return reason
        return super().why_not_config(parts, config, arch)

    def design(self, parts: hopper.WarpgroupParts, config: Attrs) -> Design:
        shape, tile_m = parts.shape, int(config["tile_m"])
        epilogue, node = parts.epilogue, parts.epilogue.pool
        pool = None if node is None else PoolGather.of(node)
        margin = None if pool is None else pool.margin
        box = reused_box(shape, tile_m) if config["reuse"] else dense_box(shape, tile_m, margin)
        if box is None:
            raise IllegalCandidate(f"no box of {tile_m} pixels by 8x8 can be copied at once")
        axes: dict[str, Any] = {word: config[word] for word in AXES}
        elements = self.elements(parts, config)
        transposed = self.reverses and not elements.planes and size_of(elements.x) == 2
        axes.update(pool=pool, elements=elements, tile_bytes=elements.tile_bytes(epilogue))
        axes.update(transposed=transposed, reversed=self.reverses)
        design = Design(shape, box, **axes)
        alone = design.split_k == design.blocks_per_sm == 1
        if alone and design.blocks >= PERSISTENT_FROM * measured_chip().multiprocessors:
            design = replace(design, persistent=True)
        added = design.sum_bytes(parts.epilogue.sums)
        return replace(design, extra=((4, added),)) if added else design

    def source(self, parts: hopper.WarpgroupParts, config: Attrs, arch: Arch) -> str:
        design = self.design(parts, config)
        header, name = KERNELS[design.persistent]
        sums = {parts.step.types[added.name].dtype for added in parts.epilogue.sums}
        floats = bool(sums - {design.elements.x})
        constants = INCLUDE.format(header)
        constants += design.constants(parts.epilogue, float_sums=floats)
        kernel = design.kernel(name, "ConvScalars")
        return constants + kernel + design.sums(parts.epilogue.sums).source

    def bind(self, parts: hopper.WarpgroupParts, config: Attrs, frame: Frame) -> Binding:
        design = self.design(parts, config)
        constants = Constants(frame, hopper.constants_of(parts, design))
        return HopperLaunch(parts, design, frame, constants).bound()

    def estimate_us(self, parts: hopper.WarpgroupParts, config: Attrs, arch: Arch) -> float:
        conv_us = hopper.estimate_us(self.design(parts, config), parts.step.traffic_bytes, arch)
        return conv_us + (arch.cost(hopper.COSTS)["sums_us"] if parts.epilogue.sums else 0.0)
