"""Which elements a convolution's operands have in memory, and what its products multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plantune.kernels.hopper.products import FACTORS
from plantune.kernels.hopper.tiles import ROW_BYTES
from plantune.kernels.patterns.epilogue import ConvEpilogue, ConvParts


@dataclass(frozen=True)
class Elements:
    """The dtypes of operands in memory. Products multiply `factor`; with `planes` each float of x
    becomes so many of them on the way, otherwise they are what x has.
    """

    x: str
    factor: str
    planes: int
    y: str
    unshifted: str
    residual: str
    saved: str

    @staticmethod
    def single(dtype: str) -> Elements:
        """All operands have it."""
        return Elements(dtype, dtype, 0, dtype, dtype, dtype, dtype)

    @staticmethod
    def of(parts: ConvParts, factor: str, planes: int = 0) -> Elements:
        types, epilogue = parts.step.types, parts.epilogue
        y = types[parts.y].dtype
        named = {"unshifted": epilogue.unshifted, **epilogue.images}
        others = dict.fromkeys(("unshifted", "residual", "saved"), y)
        others |= {word: types[name].dtype for word, name in named.items() if name is not None}
        return Elements(types[parts.x].dtype, factor, planes, y, **others)

    @property
    def out(self) -> tuple[str, ...]:
        return self.y, self.residual, self.unshifted, self.saved

    @property
    def chunk(self) -> int:
        """Channels of one step of the reduction: of 128 bytes in memory."""
        return ROW_BYTES // size_of(self.x)

    @property
    def filter_row_bytes(self) -> int:
        """What a step reads of one filter."""
        return self.chunk * size_of(self.factor) * max(self.planes, 1)

    @property
    def rate(self) -> float:
        """How long products of a step take, as a part of those of 64 channels in 16 bits."""
        if self.planes:
            return self.planes * (self.planes + 1) / 2 * self.chunk / 64
        return 1.0

    def tile_bytes(self, epilogue: ConvEpilogue) -> int:
        """What a tile has of each pixel's channel in shared memory: where sizes are equal, images
        that are read and those that are written share it.
        """
        kept = epilogue.residual is not None and epilogue.pool is None
        there = {
            "unshifted": epilogue.unshifted is not None,
            "residual": kept,
            "saved": epilogue.saved is not None,
        }
        if len({*map(size_of, self.out)}) == 1:
            two = there["unshifted"] or (there["saved"] and kept)
            return size_of(self.y) * (2 if two else 1)
        others = (getattr(self, word) for word, holds in there.items() if holds)
        return size_of(self.y) + sum(map(size_of, others))

    @property
    def members(self) -> dict[str, str | int]:
        """What headers ask of them."""
        out = ", ".join(FACTORS[dtype] for dtype in self.out)
        return {
            "T": FACTORS[self.x],
            "Factor": FACTORS[self.factor],
            "Out": f"plantune::OutElements<{out}>",
            "kPlanes": self.planes,
        }


def size_of(dtype: str) -> int:
    """Bytes of an element."""
    return int(getattr(torch, dtype).itemsize)
