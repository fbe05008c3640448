"""A step alone, in memory as a program would give it, ready to be timed."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from plantune.device import Call
from plantune.gpus import device_for
from plantune.graph.step import Step
from plantune.kernels.family import Candidate, Values
from plantune.kernels.preparation import Preparation
from plantune.measure.inputs import draw_inputs
from plantune.measure.step_alone import StepAlone
from plantune.runtime.binding import fresh
from plantune.space.arch import Arch

# A replayed graph takes some 2 us to start; one this long hides it.
GRAPH_US = 150.0
FEW_LAUNCHES, MOST_LAUNCHES = 4, 100
WARM_UP_LAUNCHES = 2
# What a kernel needs of weights is filled in one launch for the whole network. Less than this takes
# no longer there than the launch itself, so it is not counted again for each step.
SMALL_BYTES = 1 << 18


class TimedStep(StepAlone):
    """One candidate with prepared weights and memory of its own, on `data` or random inputs.

    An image that the kernel takes in any layout comes in the one that it makes: a plan that mixes
    layouts pays for its conversions in the whole program.
    """

    def __init__(
        self, step: Step, candidate: Candidate, arch: Arch, data: Values | None = None
    ) -> None:
        super().__init__(step, candidate, arch, device_for(arch))
        images = [name for name, type_ in step.outputs if len(type_.shape) == 4]
        made = self._layouts.get(images[0], "nchw") if images else "nchw"
        # A network that runs on a GPU has its filters in channels_last, as load_model makes it.
        filters = "nhwc" if self.device.captures else "nchw"
        for name, drawn in (data or draw_inputs(step, self.device.generator(0))).items():
            memory, start = self._take(name, step.types[name].size_bytes)
            self._put(name, drawn, filters if name in step.constants else made, memory, start)
        if self._binding.refresh is not None:
            self._binding.refresh()
        self._preparation.place()
        self._preparation.launch(self.device.stream)
        if self._preparation.moved_bytes < SMALL_BYTES:
            self._preparation = Preparation((), {}, {}, arch, self.device.place)

    def _take(self, name: str, size_bytes: int) -> tuple[Tensor, int]:
        return fresh(size_bytes, self.device.place), 0

    def launch(self) -> None:
        """Runs the step once; what it made in fresh memory is dropped, as in a program."""
        self._run()
        for name in (*self._adopts, *self._aliases):
            del self.values[name]

    def repeated(self, time_us: Callable[[Call], float]) -> tuple[Call, int]:
        """A call for the clock and how many launches it makes; `time_us` times a call.

        Where the device has graphs it replays one with launches behind each other.
        """
        if not self.device.captures:
            return self.launch, 1
        for _ in range(WARM_UP_LAUNCHES):  # libraries choose algorithms and take memory
            self.launch()
        few = self._graph(FEW_LAUNCHES)
        once_us = time_us(few) / FEW_LAUNCHES
        count = min(math.ceil(GRAPH_US / max(once_us, 0.1)), MOST_LAUNCHES)
        return (few, FEW_LAUNCHES) if count <= FEW_LAUNCHES else (self._graph(count), count)

    def _graph(self, launches: int) -> Call:
        def all_launches() -> None:
            for _ in range(launches):
                self.launch()

        return self.device.captured(all_launches)
