"""Sums in the epilogue of a convolution on Hopper: `csrc/cuda/hopper_sums.h`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

from plantune.kernels.constants import Constant
from plantune.kernels.family import Binding, Frame
from plantune.kernels.launcher import Launcher
from plantune.kernels.patterns.epilogue import Sum
from plantune.kernels.patterns.expression import expression
from plantune.kernels.rendering import cxx_bool

THREADS, AT_ONCE = 512, 8
SOURCE = """extern "C" __global__ void __launch_bounds__({threads})
    add(const float* parts, Kernel::Parts::Results results) {{
  static_assert(Kernel::Parts::kThreads == {threads}, "what is launched is what was planned");
  Kernel::Parts::add(parts, results);
}}
"""


@dataclass(frozen=True)
class EpilogueSums:
    """The sums of a kernel whose blocks leave parts of them: `tiles` of each channel's, each in
    `tile_parts` parts of all.
    """

    sums: tuple[Sum, ...]
    tiles: int
    tile_parts: int
    channels: int

    @property
    def source(self) -> str:
        """What adds the parts, to put after the kernel."""
        return SOURCE.format(threads=THREADS) if self.sums else ""

    @property
    def part_bytes(self) -> int:
        return (
            4
            * self.tiles
            * sum(self.channels if added.of_channels else self.tile_parts for added in self.sums)
        )

    def added(
        self,
        first: Callable[[int], None],
        frame: Frame,
        parts: int,
        constants: tuple[Constant, ...],
    ) -> Binding:
        """A kernel, and what then adds the parts at that address."""
        if not self.sums:
            return Binding(first, constants=constants)
        return Binding.in_halves(first, self._adder(frame, parts), constants)

    def _adder(self, frame: Frame, parts: int) -> Callable[[int], None]:
        most = max(self.channels if added.of_channels else 1 for added in self.sums)
        blocks = (math.ceil(most / AT_ONCE), len(self.sums))
        add = Launcher(frame.built, blocks, THREADS, name="add")
        results = ctypes.c_void_p * (len(self.sums) + 1)

        def launch(stream: int) -> None:
            addresses = [frame.values[added.name].data_ptr() for added in self.sums]
            add.launch(stream, ctypes.c_void_p(parts), results(*addresses))

        return launch


def sums_type(sums: tuple[Sum, ...]) -> str:
    """The type of `csrc/cuda/hopper_sums.h`."""
    types = (f"plantune::SumOf<{expression(s.chain)}, {cxx_bool(s.of_channels)}>" for s in sums)
    return f"plantune::SumsOf<{', '.join(types)}>"
