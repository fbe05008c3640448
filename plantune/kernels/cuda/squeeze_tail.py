"""What the kernel of a squeeze-and-excite tail takes: its operands' types, how blocks divide it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from plantune.base.canonical import Attrs
from plantune.graph import Node
from plantune.graph.types import DTYPES
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.small_matrix import shared_bytes_at_most
from plantune.kernels.patterns.squeeze_excite import Head, TailParts
from plantune.kernels.rendering import struct

FLOAT_BYTES = 4


@dataclass(frozen=True)
class SeTailParts(TailParts):
    """A tail as threads divide it, with what comes before its mean."""

    head: Head
    pool: Node | None = None  # of the result, which leaves, too
    also: str | None = None  # the result in one more type

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """The element types of all operands, and of what is made of them."""
        return vector_kernel.dtypes_of(self.step)

    @property
    def mixed(self) -> bool:
        return len(self.dtypes) > 1

    @property
    def weight(self) -> str:
        """The element type of both matrices."""
        return self.step.types[self.tail.squeeze.weight].dtype

    @property
    def width(self) -> int:
        """Channels that a thread takes at once: a whole word of the largest element."""
        images = (name for name in (*self.read, *self.stored) if name is not None)
        sizes = (DTYPES[self.step.types[name].dtype].itemsize for name in images)
        return vector_kernel.VECTOR_BYTES // max(sizes)

    @property
    def read(self) -> tuple[str | None, ...]:
        return (self.head.image, self.tail.residual)

    @property
    def stored(self) -> tuple[str | None, ...]:
        pooled = None if self.pool is None else self.pool.name
        return (self.tail.result, self.tail.unshifted, pooled, self.also)

    @property
    def pooled_type(self) -> str:
        """What the kernel calls the pool's windows."""
        if self.pool is None:
            return "plantune::NoPool"
        _, _, height, width = self.image.shape
        sizes = (self.pool.attrs[key][0] for key in ("kernel", "stride", "padding"))
        return f"plantune::TailPool<{', '.join(map(str, (*sizes, height, width)))}>"

    def shared_bytes_at_most(self, config: Attrs) -> int:
        """What plantune::SeTail declares: the sums of each group of pixels, and for both layers."""
        _, channels, height, width = self.image.shape
        images, threads, hidden = config["images"], config["threads"], self.tail.squeeze.width
        # Pixels of an image that its threads take at once.
        vectors = channels // self.width
        groups = min(threads // images // vectors, height * width)
        # Rows are padded so that threads that read several at once meet other banks.
        sums = images * groups * (channels + 16) * 4
        if self.pool is not None and not self.mixed:
            sums += images * self.image.size_bytes // self.image.shape[0]
        squeeze = shared_bytes_at_most(hidden, channels, images, threads)
        return int(sums + squeeze + shared_bytes_at_most(channels, hidden, images, threads))

    def shared_bytes_at_launch(self, config: Attrs) -> int:
        """Of results as float, which the pool reads: those of operands of one type are as they are
        stored, in what is declared.
        """
        if self.pool is None or not self.mixed:
            return 0
        elements = self.image.numel // self.image.shape[0]
        return int(config["images"]) * elements * FLOAT_BYTES

    def operands(self) -> str:
        """The types of plantune::SeTailOf, where operands have several."""
        y, unshifted, pooled, also = map(self._element, self.stored)
        tail = self.tail
        return struct(
            "Operands",
            Image=self._element(self.head.image),
            Residual=self._element(tail.residual),
            Weight=vector_kernel.ELEMENTS[self.weight],
            Number="float",
            **{"Y": y, "Unshifted": unshifted, "Pooled": pooled, "Also": also},
            Hidden=self._element(tail.hidden),
            Means=self._pair(tail.means),
            Gates=self._pair(tail.gates),
            Kept="float",
            kVector=self.width,
            kAlso=self.also is not None,
            kSharedAtLaunch=self.pool is not None,
        )

    def _element(self, name: str | None) -> str:
        """A value's type in C++; any will do for what is not there."""
        return "float" if name is None else vector_kernel.ELEMENTS[self.step.types[name].dtype]

    def _pair(self, names: Sequence[str]) -> str:
        first, second = (*map(self._element, names), "float", "float")[:2]
        return f"plantune::Types<{first}, {second}>"
