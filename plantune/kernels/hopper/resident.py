"""Tensor maps of convolutions whose weights stay in shared memory: `csrc/cuda/resident_conv.h`."""

from __future__ import annotations

import ctypes
import itertools
from functools import cache
from typing import Any, ClassVar, Protocol

from torch import Tensor

from plantune.devices.cuda.tensor_map import TensorMap, tensor_map
from plantune.kernels.hopper.launch import tile_map, word
from plantune.kernels.hopper.tiles import Box, ConvShape, PoolGather
from plantune.kernels.patterns.epilogue import ConvEpilogue

TILE_O = 64


class Tiles(Protocol):
    """A design, as far as it says how a kernel cuts images."""

    @property
    def epilogue(self) -> ConvEpilogue: ...
    @property
    def shape(self) -> ConvShape: ...
    @property
    def box(self) -> Box: ...
    @property
    def staged(self) -> int: ...


class Maps(ctypes.Structure):
    """plantune::ResidentMaps."""

    _fields_: ClassVar[Any] = (("x", TensorMap), ("w", TensorMap))


class StagedMaps(Maps):
    """plantune::ResidentStagedMaps."""

    _fields_: ClassVar[Any] = tuple(
        (name, TensorMap) for name in ("y", "unshifted", "residual", "saved")
    )


@cache
def _phases_maps(phases: int) -> type[Maps]:
    """plantune::ResidentPhasesMaps."""
    fields: Any = (("windows", TensorMap), *((name, TensorMap * phases) for name in ("y", "saved")))
    return type("PhasesMaps", (Maps,), {"_fields_": fields})


def maps_of(design: Tiles) -> type[Maps]:
    """What the kernel takes."""
    rows, columns = design.shape.phases
    if not design.staged:
        return Maps
    return StagedMaps if rows * columns == 1 else _phases_maps(rows * columns)


def put_map(maps: Maps, what: str, image: Tensor, design: Tiles) -> None:
    """Says how tiles of an image are copied that the epilogue reads or writes."""
    phases, pool = design.shape.phases, design.epilogue.pool
    if what == "residual" and pool is not None:
        sides = Box(*PoolGather.of(pool).sides(design.box), 1)  # with a margin
        maps.windows = tile_map(image, image.shape, sides, TILE_O)
    elif phases == (1, 1):
        setattr(maps, what, tile_map(image, image.shape, design.box, TILE_O))
    else:
        down, across = map(range, phases)
        for i, place in enumerate(itertools.product(down, across)):
            made = tile_map(image, image.shape, design.box, TILE_O, phases, place)
            getattr(maps, what)[i] = made


def weight_map(weight: Tensor) -> TensorMap:
    """Rows by sixteens, of these the even ones before the odd ones: the order of the products."""
    o, r, s, c = weight.shape
    row = c * r * s * weight.element_size()
    return tensor_map(
        word(weight),
        weight.data_ptr(),
        (c, r * s, 8, 2, -(-o // 16)),
        (c * weight.element_size(), 2 * row, row, 16 * row),
        (64, 1, 8, 2, TILE_O // 16),
    )
