"""How kernels of `csrc/cuda/channel_slices.h` divide an image's channels and pixels among blocks.

Config: a block of so many `threads` reads so many `columns` of vectors of one of `slices` of the
rows; in one of the `launches` its slices are the blocks of a cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from plantune.devices.cuda.build import Binary
from plantune.graph import Attrs, TensorType
from plantune.kernels.chips import measured_chip
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.rendering import Long, struct
from plantune.space import Arch

MANY_WORDS = 16
# Before it the assembler spills for a second block.
AMPERE = (8, 0)
CLUSTER_MAX = 8  # blocks that every chip with clusters can run together


@dataclass(frozen=True)
class Slices:
    """One division of an image in channels_last, or of a matrix. A thread of 256 holds its words of
    each of its `images` if it has no more than `held`, and fewer of more threads.
    """

    type: TensorType
    config: Attrs
    held: int
    images: int

    def number(self, word: str) -> int:
        """What the config says."""
        return int(self.config[word])

    @property
    def channels(self) -> int:
        return self.type.shape[1]

    @property
    def rows(self) -> int:
        return self.type.numel // self.channels

    @property
    def vector(self) -> int:
        """Neighbouring channels that are read at once."""
        return math.gcd(self.channels, vector_kernel.VECTOR_BYTES // self.type.torch_dtype.itemsize)

    @property
    def together(self) -> bool:
        return self.number("launches") == 1

    @property
    def blocks(self) -> int:
        return self.channels // (self.vector * self.number("columns")) * self.number("slices")

    @property
    def rows_of_slice(self) -> int:
        return -(-self.rows // self.number("slices"))

    @property
    def words(self) -> int:
        """The most words that a thread takes."""
        return -(-self.rows_of_slice // (self.number("threads") // self.number("columns")))

    @property
    def holds(self) -> bool:
        return self.together and self.words <= self.held_words

    @property
    def held_words(self) -> int:
        """All threads of a multiprocessor share its registers."""
        return max(self.held * 256 // self.number("threads"), 1)

    def asked_words(self, arch: Arch) -> int:
        """What a thread asks for before it uses any: more if it has many, of one image."""
        many = self.words >= MANY_WORDS and self.images == 1
        most = 2048 if many and _has_room(arch) else 1024
        return max(most // self.number("threads"), 1)

    def why_not(self, arch: Arch) -> dict[str, bool]:
        """The reasons that there is no kernel for the config, and whether each holds."""
        columns, slices = self.number("columns"), self.number("slices")
        apart = self.together and slices > 1
        vectors = self.channels // self.vector
        few = self.rows_of_slice * columns < self.number("threads") // 2
        return {
            f"{columns} columns do not divide {vectors} vectors": vectors % columns != 0,
            f"{arch.name} has no clusters": apart and "clusters" not in arch.gpu.features,
            f"a cluster has {CLUSTER_MAX} blocks at most": self.together and slices > CLUSTER_MAX,
            "one slice needs one launch": not self.together and slices == 1,
            f"{slices} slices leave most threads nothing to do": few and slices > 1,
        }

    def source(
        self, header: str, kernel: str, parameter: str, before: str, arch: Arch, **own: Any
    ) -> str:
        """The source of a kernel with a struct Norm, weights of a dtype, and members of its own."""
        norm = struct(
            "Norm",
            T=vector_kernel.ELEMENTS[self.type.dtype],
            P=vector_kernel.ELEMENTS[parameter],
            kVector=self.vector,
            kColumns=self.number("columns"),
            kThreads=self.number("threads"),
            kSlices=self.number("slices"),
            kChannels=self.channels,
            kHeld=self.held_words,
            kAsked=self.asked_words(arch),
            kAbreast=not self.together and _has_room(arch),
            kRows=Long(self.rows),
            kTogether=self.together,
            **own,
        )
        entries = vector_kernel.ENTRIES + ("" if self.together else vector_kernel.COLLECT)
        threads = self.number("threads")
        return vector_kernel.source(header, f"{kernel}<Norm>", threads, before + norm, entries)

    def part_bytes(self, entry_bytes: int) -> int:
        """What all slices leave between two launches."""
        return 0 if self.together else self.number("slices") * self.channels * entry_bytes

    def estimate_us(self, arch: Arch, cost: Any, written: int) -> float:
        """Of the blocks, in waves where not all run at once, and of all memory; `written` images
        leave, or are added on the way.
        """
        sms, slices = (arch.chip or measured_chip()).multiprocessors, self.number("slices")
        row_bytes = self.vector * self.number("columns") * self.type.torch_dtype.itemsize
        near = self.type.size_bytes * self.images <= cost["near_bytes"]
        # Of large images a block's part of a row is what memory opens a page for.
        used = 1.0 if near else row_bytes / (row_bytes + cost["page_bytes"])
        again = 0.0 if self.holds else cost["again"] if near else 1.0
        passes = self.images * (1 + again) + written
        # Sectors of 32 bytes are read as a whole.
        block_bytes = self.rows_of_slice * max(row_bytes, cost["sector_bytes"]) * passes
        meeting, waves = 0.0, max(self.blocks / sms, 1.0)
        if self.together and slices > 1:
            meeting = cost["cluster_us"] + slices * cost["rank_us"]
            # Larger clusters do not fill the chip.
            waves = math.ceil(self.blocks / (sms if slices == 2 else sms * cost["filled"]))
        moved = max(
            waves * block_bytes / cost["sm_bytes_per_us"],
            self.type.size_bytes * passes / (cost["bytes_per_us"] * used),
        )
        # In the second launch each block reads what all slices left.
        merged = 0.0 if self.together else slices**2 * self.channels / cost["merged_per_us"]
        started = (
            merged + self.number("launches") * cost["launch_us"] + self.blocks * cost["block_us"]
        )
        return float(started + meeting + moved)


def _has_room(arch: Arch) -> bool:
    return arch.gpu.compute_capability >= AMPERE


def slices_kernels(binary: Binary, slices: Slices) -> list[vector_kernel.VectorKernel]:
    """The launches of one division."""
    threads, together = slices.number("threads"), slices.together
    cluster = slices.number("slices") if together else 1
    return [
        vector_kernel.VectorKernel(binary, slices.blocks, threads, name=name, cluster=cluster)
        for name in (("run",) if together else ("collect", "run"))
    ]
