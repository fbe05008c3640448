"""Images in another layout, nchw to nhwc or back, by `csrc/cuda/image_layout.h`."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.devices.cuda.build import Binary, compile_cuda
from plantune.devices.cuda.structs import fields
from plantune.graph.layouts import MEMORY_FORMATS
from plantune.kernels.cuda.launcher import Launcher
from plantune.space.arch import Arch

THREADS, WARP = 256, 32
WORD_BYTES = 16
# Elements are moved as bits.
ELEMENTS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
# A run of neighbours that memory takes at its full speed.
SECTOR_BYTES, LINE_BYTES = 32, 128
# What a block has of an image in shared memory: larger ones are turned in registers.
TILE_BYTES, SIDE_MAX = 16 << 10, 256
# Tiles of rows of so many elements would have all columns in one bank.
BANKED = 8
COUNT_MAX = (1 << 31) - 1
SOURCE = """#include "cuda/image_layout.h"
using Kernel = plantune::{kernel};
extern "C" __global__ void __launch_bounds__(plantune::kTurnThreads)
    run(const plantune::Turn turn) {{
  Kernel::run(turn);
}}
"""


class Turn(ctypes.Structure):
    """plantune::Turn."""

    _fields_ = fields("out in_ images:uint rows:uint columns:uint pieces:uint")


@dataclass(frozen=True)
class Design:
    """A kernel that turns (rows, columns) of each image, and in how many pieces."""

    kernel: str
    rows: int
    columns: int
    pieces: int
    warps: bool  # a warp has a piece, not a block

    @property
    def source(self) -> str:
        return SOURCE.format(kernel=self.kernel)

    def blocks(self, images: int) -> int:
        pieces = images * self.pieces
        return -(-pieces // (THREADS // WARP)) if self.warps else pieces


def design_of(rows: int, columns: int, size_bytes: int) -> Design | None:
    """How to turn images of so many rows and columns of such elements; None if by torch."""
    if size_bytes not in ELEMENTS:
        return None
    most = WORD_BYTES // size_bytes
    inward, outward = math.gcd(columns, most), math.gcd(rows, most)
    narrow = SECTOR_BYTES // size_bytes
    # Half words enter registers as fast as whole ones. What leaves them does at each row's start:
    # within a sector, if rows are odd. Single elements enter or leave tiles only if these are thin.
    gathers = inward * size_bytes < WORD_BYTES // 2 and columns <= SIDE_MAX and rows >= 2 * narrow
    if gathers and (outward == most or columns < narrow):
        return _gathering(rows, columns, size_bytes, outward)
    scatters = (outward < most or rows % BANKED) and rows <= SIDE_MAX
    if scatters and (inward == most or rows < narrow):
        return _scattering(rows, columns, size_bytes, inward)
    if inward == outward == 1:
        return None
    lanes = _lanes(rows, inward, outward, size_bytes)
    kernel = f"TurnInRegisters<{ELEMENTS[size_bytes]}, {inward}, {outward}, {lanes}>"
    bands = -(-rows // (lanes * outward))
    pieces = bands * -(-columns // (WARP // lanes * inward))
    return Design(kernel, rows, columns, pieces, warps=True)


def _gathering(rows: int, columns: int, size_bytes: int, outward: int) -> Design:
    """A block has whole rows, as they lie."""
    room = _power(columns)
    side = _side(size_bytes, room)
    inward = math.gcd(rows * columns, WORD_BYTES // size_bytes)
    kernel = f"GatherRows<{ELEMENTS[size_bytes]}, {inward}, {outward}, {side}, {room}>"
    return Design(kernel, rows, columns, -(-rows // side), warps=False)


def _scattering(rows: int, columns: int, size_bytes: int, inward: int) -> Design:
    """A block has whole columns, and writes them as they come to lie."""
    room = _power(rows)
    side = _side(size_bytes, room)
    outward = math.gcd(rows * math.gcd(columns, side), WORD_BYTES // size_bytes)
    kernel = f"ScatterColumns<{ELEMENTS[size_bytes]}, {inward}, {outward}, {room}, {side}>"
    return Design(kernel, rows, columns, -(-columns // side), warps=False)


def _lanes(rows: int, inward: int, outward: int, size_bytes: int) -> int:
    """Threads of a warp along the rows: the shorter of the runs that it reads and writes is as long
    as can be, and of single elements rather that which it writes.
    """
    fitting = [lanes for lanes in (1, 2, 4, 8, 16) if lanes == 1 or lanes * outward < 2 * rows]
    runs = {
        lanes: min(WARP // lanes * inward, lanes * outward, rows) * size_bytes for lanes in fitting
    }
    return max(fitting, key=lambda lanes: (runs[lanes], lanes if outward == 1 else -lanes))


def _side(size_bytes: int, room: int) -> int:
    """How much of the long side a block has, beside all of the short one."""
    return max(LINE_BYTES // size_bytes, min(TILE_BYTES // (size_bytes * room), 8 * THREADS))


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


class LayoutChange:
    """Copies images of one shape into another layout, on one device."""

    def __init__(self, design: Design, images: int, layout: str, binary: Binary) -> None:
        rows, pixels = MEMORY_FORMATS["nchw"], MEMORY_FORMATS["nhwc"]
        self._formats = (rows, pixels) if layout == "nhwc" else (pixels, rows)
        self._launcher = Launcher(binary, design.blocks(images), THREADS)
        self._sizes = {
            "images": images,
            "rows": design.rows,
            "columns": design.columns,
            "pieces": design.pieces,
        }

    def turns(self, source: Tensor, out: Tensor) -> bool:
        """Whether these are such images, in the one layout and in the other, where words begin."""
        before, after = self._formats
        dense = source.is_contiguous(memory_format=before) and out.is_contiguous(
            memory_format=after
        )
        return dense and not (out.data_ptr() | source.data_ptr()) % WORD_BYTES

    def launch(self, stream: int, out: Tensor, source: Tensor) -> None:
        turn = Turn(out=out.data_ptr(), in_=source.data_ptr(), **self._sizes)
        self._launcher.launch(stream, turn)


def layout_change(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, arch: Arch
) -> LayoutChange | None:
    """What copies dense images into `layout` from the other one; None if torch is to do it."""
    if len(shape) != 4 or not 0 < math.prod(shape) <= COUNT_MAX:
        return None
    images, channels, height, width = shape
    pixels = height * width
    sides = (channels, pixels) if layout == "nhwc" else (pixels, channels)
    design = design_of(*sides, dtype.itemsize)
    if design is None:
        return None
    return LayoutChange(design, images, layout, compile_cuda(design.source, arch))
