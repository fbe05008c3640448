"""Convolutions whose weights stay in shared memory: `csrc/cuda/resident_conv.h`."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from plantune.devices.cuda.structs import fields
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.family import Arch, Attrs, Binding, Frame, refuse
from plantune.kernels.hopper import family as hopper
from plantune.kernels.hopper.launch import beyond_copies, image_map, images_read, placing
from plantune.kernels.hopper.resident import TILE_O, maps_of, put_map, weight_map
from plantune.kernels.hopper.resident_design import (
    MANY_GROUPS,
    ROWS_MAX,
    WARPGROUP,
    ResidentDesign,
)
from plantune.kernels.patterns.epilogue import ConvParts
from plantune.kernels.weights.constants import (
    Constants,
    Parameter,
    channel_values,
    conv_weight,
    floats,
)

STRIDE_MAX = 2  # boxes of pixels for each 64 channels: as many as its square


class ResidentFamily(hopper.ConvFamily[hopper.WarpgroupParts]):
    """Config: the warpgroups of `threads` take turns, with `stages` boxes of pixels each."""

    flips: ClassVar[bool] = False

    def require(self, parts: hopper.WarpgroupParts) -> None:
        """Raises IllegalCandidate if a convolution of that shape has no config."""
        shape, kernel = parts.shape, (parts.shape.r, parts.shape.s)
        apart = any(size <= stride for size, stride in zip(kernel, shape.stride, strict=True))
        refuse(
            {
                **hopper.not_a_warpgroups(parts.step, parts.epilogue, shape),
                "only the taps of a larger kernel read the same pixels": kernel == (1, 1)
                or (apart and shape.stride != (1, 1)),
                f"only strides up to {STRIDE_MAX}, got {shape.stride}": max(shape.stride)
                > STRIDE_MAX,
                "tiles are counted in 31 bits": shape.n * shape.p * shape.q >= 1 << 31,
                "elements of a tile's rows are counted in 31 bits": ROWS_MAX * shape.q * shape.o
                >= 1 << 31,
            }
        )

    def design(self, parts: hopper.WarpgroupParts, config: Attrs) -> ResidentDesign:
        stages, groups = int(config["stages"]), int(config["threads"]) // WARPGROUP
        return ResidentDesign(parts.epilogue, parts.shape, stages, groups, self.flips)

    def source(self, parts: hopper.WarpgroupParts, config: Attrs, arch: Arch) -> str:
        design = self.design(parts, config)
        return design.source(parts.dtype) + design.sums(parts.epilogue.sums).source

    def bind(self, parts: hopper.WarpgroupParts, config: Attrs, frame: Frame) -> Binding:
        design = self.design(parts, config)
        constants = self.constants(parts, design, frame)
        place, words = placing(parts, frame), tuple(parts.epilogue.images)
        room = beyond_copies(parts.step, images_read(parts), frame)
        names = {"y": parts.y, "unshifted": parts.epilogue.unshifted}
        kind = maps_of(design)
        kernel = Launcher(
            frame.built, design.blocks, design.threads, shared_bytes=design.shared_bytes
        )

        def launch(stream: int) -> None:
            x, *others, copied = place(stream)
            read = {word: image.data_ptr() for word, image in zip(words, others, strict=True)}
            arguments = constants.into(_Arguments, names, parts=room, **read)
            pixels = image_map(x, design.shape, design.box, reuse=True)
            maps = kind(x=pixels, w=weight_map(constants.tensor("w")))
            if design.staged:
                made = {word: frame.values[name] for word, name in names.items() if name}
                for what, image in (*made.items(), *zip(words, others, strict=True)):
                    put_map(maps, what, image, design)
            kernel.launch(stream, maps, arguments, programmatic=not copied)

        return design.sums(parts.epilogue.sums).added(launch, frame, room, constants.all)

    def estimate_us(self, parts: hopper.WarpgroupParts, config: Attrs, arch: Arch) -> float:
        """Products of an SM's tiles and its last tile alone, or what the cache does not hold, and
        images that threads read beside it: a warpgroup waits for these. With 2048 images of 64 x 16
        x 16 a gradient with a mask and sums took 75 us, 94 with a residual, too; staged 60 and 74
        (H200, 2026-11-23).
        """
        design, cost = self.design(parts, config), arch.cost(hopper.COSTS)
        shape, box = design.shape, design.box
        tiles = -(-design.tiles * design.tiles_o // design.blocks)
        products = shape.chunks * shape.r * shape.s * 4 * (4 * box.h)
        busy = (tiles * products * 1.25 + 4000) / cost["sm_cycles_per_us"]
        phases = shape.phases != (1, 1)
        if not phases:
            busy += tiles * cost["box_us"] / (design.stages * design.groups)
        if design.groups >= MANY_GROUPS:
            busy *= cost["many_staged"] if design.staged else cost["many_groups"]
        if design.staged:
            busy *= cost["staged"]
        moving = max(parts.step.traffic_bytes - cost["resident_cached_bytes"], 0)
        read = sum(parts.step.types[name].size_bytes for name in parts.epilogue.images.values())
        beside = 0.0 if design.staged else min(read, moving) / cost["bytes_per_us"]
        sums_us = cost["sums_us"] if parts.epilogue.sums else 0.0
        moving_us = moving / cost["bytes_per_us"]
        # A tile with phases holds all channels of its pixels before its first product.
        whole_us = busy + moving_us if phases else max(busy, moving_us)
        return cost["launch_us"] + whole_us + beside + sums_us

    def constants(self, parts: ConvParts, design: ResidentDesign, frame: Frame) -> Constants:
        return read_constants(parts, design, frame)


class _Arguments(ctypes.Structure):
    """ResidentConv::Arguments."""

    _fields_ = fields("scale bias residual saved y unshifted offset:one parts", one=Parameter)


def read_constants(parts: ConvParts, design: ResidentDesign, frame: Frame) -> Constants:
    """The filter as (O, R, S, C), and float32 scales and biases.

    A tile reads whole 16 channels: of a filter without them a copy is padded with zeros.
    """
    epilogue, o, rows = parts.epilogue, parts.outputs, design.tiles_o * TILE_O
    whole = o % 16 == 0
    weight = conv_weight(parts.step.types[parts.weight], 0 if whole else rows)
    offset = channel_values(parts.step.types[epilogue.offset or parts.weight], 1)
    return Constants(
        frame,
        {
            "w": (parts.weight, weight),
            "scale": (epilogue.scale, floats(o, rows)),
            "bias": (epilogue.bias, floats(o, rows)),
            "offset": (epilogue.offset, offset),
        },
    )
