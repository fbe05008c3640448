"""Images in another layout, nchw to nhwc or back, by `csrc/cuda/image_layout.h`, whose elements may
become those of another dtype.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.devices.cuda.build import Binary, compile_cuda
from plantune.devices.cuda.structs import fields
from plantune.graph.layouts import MEMORY_FORMATS
from plantune.kernels.cuda import vector_kernel
from plantune.space.arch import Arch

THREADS, WARP = 256, 32
WORD_BYTES = 16
# Elements that keep their dtype are moved as bits.
BITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
# A run of neighbours that memory takes at its full speed.
SECTOR_BYTES, LINE_BYTES = 32, 128
# What a block has of an image in shared memory: larger ones are turned in registers.
TILE_BYTES, SIDE_MAX = 16 << 10, 256
# Tiles of rows of so many elements would have all columns in one bank.
BANKED = 8
COUNT_MAX = (1 << 31) - 1


class Turn(ctypes.Structure):
    """plantune::Turn."""

    _fields_ = fields("out in_ images:uint rows:uint columns:uint pieces:uint")


@dataclass(frozen=True)
class Elements:
    """What a kernel reads and what it writes, in C++ and in bytes."""

    names: tuple[str, str]
    in_bytes: int
    out_bytes: int

    @staticmethod
    def moved(size_bytes: int) -> Elements:
        """Those that stay what they are. Raises KeyError if there are none of this size."""
        return Elements((BITS[size_bytes],) * 2, size_bytes, size_bytes)

    @staticmethod
    def cast(source: str, result: str) -> Elements:
        """Those of one dtype as those of another one."""
        sizes = (getattr(torch, name).itemsize for name in (source, result))
        return Elements((SOURCES[source], vector_kernel.ELEMENTS[result]), *sizes)

    @property
    def template(self) -> str:
        return ", ".join(self.names)

    @property
    def in_word(self) -> int:
        """How many of them a word has that is read, and one that is written."""
        return WORD_BYTES // self.in_bytes

    @property
    def out_word(self) -> int:
        return WORD_BYTES // self.out_bytes

    @property
    def waiting_bytes(self) -> int:
        """Of one in shared memory."""
        return min(self.in_bytes, self.out_bytes)


# What can be cast, as csrc/cuda/vector.h names it.
SOURCES = {**vector_kernel.ELEMENTS, "uint8": BITS[1]}


@dataclass(frozen=True)
class Design:
    """A kernel that turns (rows, columns) of each image, and in how many pieces."""

    kernel: str
    rows: int
    columns: int
    pieces: int
    warps: bool  # a warp has a piece, not a block

    @property
    def is_odd(self) -> bool:
        """Whether large images enter or leave as single elements."""
        words = self.kernel.rstrip(">").split(", ")[2:4]
        return self.warps and "1" in words

    @property
    def source(self) -> str:
        return vector_kernel.source("image_layout", self.kernel, THREADS)

    def blocks(self, images: int) -> int:
        pieces = images * self.pieces
        return -(-pieces // (THREADS // WARP)) if self.warps else pieces

    def turn(self, images: int, out: Tensor, source: Tensor) -> Turn:
        """The arguments of a launch."""
        return Turn(out.data_ptr(), source.data_ptr(), images, self.rows, self.columns, self.pieces)


def design_of(rows: int, columns: int, elements: Elements) -> Design | None:
    """How to turn images of so many rows and columns of elements; None if by torch."""
    inward, outward = math.gcd(columns, elements.in_word), math.gcd(rows, elements.out_word)
    in_run, out_run = SECTOR_BYTES // elements.in_bytes, SECTOR_BYTES // elements.out_bytes
    # Half words enter registers as fast as whole ones. What leaves them does at each row's start:
    # within a sector, if rows are odd. Single elements enter or leave tiles only if these are thin.
    short = inward * elements.in_bytes < WORD_BYTES // 2
    gathers = short and columns <= SIDE_MAX and rows >= 2 * out_run
    if gathers and (outward == elements.out_word or columns < in_run):
        return _gathering(rows, columns, elements, outward)
    scatters = (outward < elements.out_word or rows % BANKED) and rows <= SIDE_MAX
    if scatters and (inward == elements.in_word or rows < out_run):
        return _scattering(rows, columns, elements, inward)
    if inward == outward == 1:
        return None
    lanes = _lanes(rows, inward, outward, elements)
    # A warp's threads write side by side: words apart would be parts of sectors.
    inward = 1 if lanes == 1 and rows * elements.out_bytes < SECTOR_BYTES else inward
    kernel = f"TurnInRegisters<{elements.template}, {inward}, {outward}, {lanes}>"
    bands = -(-rows // (lanes * outward))
    pieces = bands * -(-columns // (WARP // lanes * inward))
    return Design(kernel, rows, columns, pieces, warps=True)


def _gathering(rows: int, columns: int, elements: Elements, outward: int) -> Design:
    """A block has whole rows, as they lie."""
    room = _power(columns)
    side = _side(elements, room)
    inward = math.gcd(rows * columns, elements.in_word)
    kernel = f"GatherRows<{elements.template}, {inward}, {outward}, {side}, {room}>"
    return Design(kernel, rows, columns, -(-rows // side), warps=False)


def _scattering(rows: int, columns: int, elements: Elements, inward: int) -> Design:
    """A block has whole columns, and writes them as they come to lie."""
    room = _power(rows)
    side = _side(elements, room)
    outward = math.gcd(rows * math.gcd(columns, side), elements.out_word)
    kernel = f"ScatterColumns<{elements.template}, {inward}, {outward}, {room}, {side}>"
    return Design(kernel, rows, columns, -(-columns // side), warps=False)


def _lanes(rows: int, inward: int, outward: int, elements: Elements) -> int:
    """Threads of a warp along the rows: the shorter of the runs that it reads and writes is as long
    as can be, and of single elements rather that which it writes.
    """
    fitting = [lanes for lanes in (1, 2, 4, 8, 16) if lanes == 1 or lanes * outward < 2 * rows]
    runs = {
        lanes: min(
            WARP // lanes * inward * elements.in_bytes,
            min(lanes * outward, rows) * elements.out_bytes,
        )
        for lanes in fitting
    }
    return max(fitting, key=lambda lanes: (runs[lanes], lanes if outward == 1 else -lanes))


def _side(elements: Elements, room: int) -> int:
    """How much of the long side a block has, beside all of the short one."""
    size_bytes = elements.waiting_bytes
    return max(LINE_BYTES // size_bytes, min(TILE_BYTES // (size_bytes * room), 8 * THREADS))


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(number - 1, 0).bit_length()


def sides(shape: tuple[int, ...], layout: str) -> tuple[int, int]:
    """Rows and columns of an image that is brought into `layout` from the other one."""
    _, channels, height, width = shape
    pixels = height * width
    return (channels, pixels) if layout == "nhwc" else (pixels, channels)


class LayoutChange:
    """Copies images of one shape into another layout, on one device."""

    def __init__(self, design: Design, images: int, layout: str, binary: Binary) -> None:
        rows, pixels = MEMORY_FORMATS["nchw"], MEMORY_FORMATS["nhwc"]
        self._formats = (rows, pixels) if layout == "nhwc" else (pixels, rows)
        self._kernel = vector_kernel.VectorKernel(binary, design.blocks(images), THREADS)
        self._design, self._images = design, images

    def turns(self, source: Tensor, out: Tensor) -> bool:
        """Whether these are such images, in the one layout and in the other, and words begin where
        it writes.
        """
        before, after = self._formats
        dense = source.is_contiguous(memory_format=before) and out.is_contiguous(
            memory_format=after
        )
        return dense and not out.data_ptr() % WORD_BYTES

    def launch(self, stream: int, out: Tensor, source: Tensor) -> None:
        self._kernel.launch(stream, self._design.turn(self._images, out, source), [source])


def layout_change(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, arch: Arch
) -> LayoutChange | None:
    """What copies dense images into `layout` from the other one; None if torch is to do it."""
    design = change_design(shape, dtype, layout)
    if design is None:
        return None
    return LayoutChange(design, shape[0], layout, compile_cuda(design.source, arch))


def change_design(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Design | None:
    """How images come into `layout` from the other one; None if by torch."""
    if len(shape) != 4 or not 0 < math.prod(shape) <= COUNT_MAX or dtype.itemsize not in BITS:
        return None
    return design_of(*sides(shape, layout), Elements.moved(dtype.itemsize))
