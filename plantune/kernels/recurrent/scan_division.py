"""How the kernels of recurrent layers divide a layer among blocks: `csrc/cuda/recurrence.h`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from plantune.graph import Step, TensorType
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.family import Parts
from plantune.space.arch import Arch

THREADS, WARPS = 256, 8
# Registers of a thread: those of weights, and these with words on their way, sums and what each
# further result of a gradient takes.
WEIGHTS_MAX, HELD_MAX = 128, 200
WORDS_AT_ONCE, OF_RESULT = 16, 48


@dataclass(frozen=True)
class Sequence(Parts):
    """A step over a sequence: its names by what they are, and its sizes."""

    names: Mapping[str, str] = field(hash=False)
    gates: int
    steps: int
    samples: int
    hidden: int
    dtype: str

    @property
    def per(self) -> int:
        """Values in a register."""
        return 4 // TensorType((), self.dtype).torch_dtype.itemsize

    def why_not(self) -> dict[str, object]:
        """Why no kernel of this kind runs it, each with whether it holds."""
        known = self.dtype in vector_kernel.ELEMENTS
        width = 8 * WARPS * self.per if known else 1
        return {
            **vector_kernel.not_an_element(self.dtype),
            f"warps divide hidden units by {width}, got {self.hidden}": self.hidden % width,
        }


@dataclass(frozen=True)
class Division:
    """Each block has some units of some samples. `of_gradient`: it keeps columns of the weights,
    and reads rows of all gates.
    """

    sequence: Sequence
    units: int
    samples: int
    of_gradient: bool

    @property
    def groups(self) -> int:
        """The number of groups of samples. Only the blocks of one group wait for each other."""
        return math.ceil(self.sequence.samples / self.samples)

    @property
    def of_group(self) -> int:
        """Blocks, which have the units of a group's samples."""
        return self.sequence.hidden // self.units

    def launches(self, room: int) -> tuple[int, ...]:
        """The groups of each launch, where so many blocks run at once; none if one does not fit."""
        at_once = room // self.of_group if self.waits else self.groups
        if not at_once:
            return ()
        full, rest = divmod(self.groups, at_once)
        return (at_once,) * full + (rest,) * bool(rest)

    @property
    def waits(self) -> bool:
        """Whether blocks wait for each other: not for a single step, which begins from memory."""
        return self.of_gradient or self.sequence.steps > 1

    @property
    def rows(self) -> int:
        """The rows of the block's sums."""
        return self.units * (1 if self.of_gradient else self.sequence.gates)

    @property
    def shared_bytes(self) -> int:
        """plantune::Scan::kSharedBytes, plantune::ScanGrad::kSharedBytes."""
        return 2 * WARPS * self.rows * (self.samples + 32 // self.units) * 4

    @property
    def words(self) -> int:
        """Words of 16 bytes that blocks exchange in two steps."""
        lanes = self.sequence.hidden // (2 * self.sequence.per) * self.samples
        return 2 * self.groups * lanes * self.words_of_column

    @property
    def words_of_column(self) -> int:
        if not self.of_gradient:
            return 1
        return 2 if self.sequence.gates == 3 else 4

    def why_not(self, arch: Arch) -> dict[str, object]:
        room = arch.chip.multiprocessors if arch.chip else self.of_group
        hidden = self.sequence.hidden
        weights, held = self._registers()
        return {
            f"{self.of_group} blocks must run at once on {room} multiprocessors": not self.launches(
                room
            ),
            f"{hidden} units do not divide by {self.units}": hidden % self.units,
            "tiles have 16 rows": self.rows % 16,
            "a thread owns no whole result": self.units * self.samples % THREADS,
            f"weights take {weights} registers": weights > WEIGHTS_MAX,
            f"weights, words and results take {held} registers": held > HELD_MAX,
        }

    def _registers(self) -> tuple[int, int]:
        """Registers for the weights, and for words and sums too."""
        products, columns = (
            self.sequence.hidden // (8 * self.sequence.per * WARPS),
            self.samples // 8,
        )
        weights = 4 * self.sequence.gates * self.units * products // 16
        of_product = columns * self.words_of_column
        words = 4 * of_product * min(products, max(1, WORDS_AT_ONCE // of_product))
        results = self.units * self.samples // THREADS - 1 if self.of_gradient else 0
        sums = 4 * self.rows * columns // 16
        return weights, weights + words + sums + OF_RESULT * results


def sequence_of(step: Step, names: Mapping[str, str]) -> Sequence:
    """By the names of `gates` (T, N, gates x H) and `state` (N, H)."""
    gates, state = step.types[names["gates"]], step.types[names["state"]]
    steps, samples, width = gates.shape
    hidden = state.shape[1]
    return Sequence(step, names, width // hidden, steps, samples, hidden, gates.dtype)
