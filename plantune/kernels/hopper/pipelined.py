"""Convolutions whose images and weights stream through shared memory: `csrc/cuda/hopper_conv.h`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from plantune.errors import IllegalCandidate
from plantune.kernels.chips import measured_chip
from plantune.kernels.family import Arch, Attrs, Binding, Frame
from plantune.kernels.hopper import family as hopper
from plantune.kernels.hopper.design import Design
from plantune.kernels.hopper.launch import Launch
from plantune.kernels.hopper.tiles import PoolGather, dense_box, reused_box
from plantune.kernels.weights.constants import Constants

INCLUDE = '#include "cuda/{}.h"\n'
# From so many tiles of a multiprocessor on, blocks stay that have one alone.
PERSISTENT_FROM = 1.5
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

    transposed: ClassVar[bool] = False

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
        axes: dict[str, Any] = dict(config)
        two = epilogue.unshifted or (len(epilogue.images) == 2 and pool is None)
        axes.update(pool=pool, outputs=2 if two else 1, transposed=self.transposed)
        design = Design(shape, box, **axes)
        alone = design.split_k == design.blocks_per_sm == 1
        if alone and design.blocks >= PERSISTENT_FROM * measured_chip().multiprocessors:
            design = replace(design, persistent=True)
        added = design.sum_bytes(parts.epilogue.sums)
        return replace(design, extra=((4, added),)) if added else design

    def source(self, parts: hopper.WarpgroupParts, config: Attrs, arch: Arch) -> str:
        design = self.design(parts, config)
        header, name = KERNELS[design.persistent]
        constants = INCLUDE.format(header) + design.constants(parts.dtype, parts.epilogue)
        kernel = design.kernel(name, "ConvScalars")
        return constants + kernel + design.sums(parts.epilogue.sums).source

    def bind(self, parts: hopper.WarpgroupParts, config: Attrs, frame: Frame) -> Binding:
        constants = Constants(frame, hopper.filter_and_scalars(parts.step, parts.epilogue))
        return Launch(parts, self.design(parts, config), frame, constants).bound()

    def estimate_us(self, parts: hopper.WarpgroupParts, config: Attrs, arch: Arch) -> float:
        conv_us = hopper.estimate_us(self.design(parts, config), parts.step.traffic_bytes, arch)
        return conv_us + (arch.cost(hopper.COSTS)["sums_us"] if parts.epilogue.sums else 0.0)
