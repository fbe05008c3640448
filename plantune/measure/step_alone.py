"""A step bound as in a program, but alone: to be checked, or ready to be timed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from plantune.devices.device import Device, Runnable
from plantune.devices.gpus import device_for
from plantune.devices.machine import arch_of
from plantune.graph.layouts import view_bytes
from plantune.kernels.build import build
from plantune.kernels.family import Values
from plantune.kernels.resolved import ResolvedStep
from plantune.kernels.weights.preparation import Preparation
from plantune.measure.inputs import draw_inputs
from plantune.runtime.program.binding import bind, fresh, made_for
from plantune.runtime.program.schedule import ScheduledStep
from plantune.space.arch import Arch, load_arch

# A replayed graph takes some 2 us to start; one this long hides it.
GRAPH_US = 150.0
FEW_LAUNCHES, MOST_LAUNCHES = 4, 100
WARM_UP_LAUNCHES = 2
# What a kernel needs of weights is filled in one launch for the whole network. Less than this takes
# no longer there than the launch itself, so it is not counted again for each step.
SMALL_BYTES = 1 << 18


class StepAlone(ABC):
    """A candidate in memory that `_take` gives, with what a pass computes for it from weights.

    If it is `portable`, a device of a later arch runs it.
    """

    def __init__(
        self,
        chosen: ResolvedStep,
        arch: Arch,
        device: Device,
        *,
        portable: bool = False,
    ) -> None:
        self.chosen, self.step, self.device = chosen, chosen.step, device
        launch = ScheduledStep(chosen)
        self._layouts, self._aliases = launch.layouts, launch.aliases
        self._adopts, self._workspace = launch.adopts, launch.workspace
        self.values = made_for(launch, self._take)
        if portable:
            built = chosen.family.build_portable(chosen.parts, chosen.config, arch)
        else:
            built = build(chosen, arch)
        # A captured graph reads what the kernel prepared, so the binding stays.
        self._binding = bind(launch, self.values, built, device.place)
        own = load_arch(arch_of(device.place)) if device.captures else arch
        self._preparation = Preparation(self._binding.constants, self.values, {}, own, device.place)

    @abstractmethod
    def _take(self, name: str, size_bytes: int) -> tuple[Tensor, int]:
        """Memory for what the kernel writes; see `Take`."""

    def _put(self, name: str, data: Tensor, free: str, memory: Tensor, start: int = 0) -> None:
        """Places an input there; images in the layout `free` if the kernel demands none."""
        type_ = self.step.types[name]
        layout = self._layouts.get(name, free if len(type_.shape) == 4 else "nchw")
        self.values[name] = view_bytes(memory, start, type_, layout).copy_(data)

    def _run(self) -> None:
        """A launch as a pass makes it: on a GPU with what it computes from weights."""
        self._preparation.launch(self.device.stream)
        self._binding.launch(self.device.stream)


class TimedStep(StepAlone):
    """One candidate with prepared weights and memory of its own, on `data` or random inputs.

    An image that the kernel takes in any layout comes in the one that it makes: a plan that mixes
    layouts pays for its conversions in the whole program.
    """

    def __init__(self, chosen: ResolvedStep, arch: Arch, data: Values | None = None) -> None:
        super().__init__(chosen, arch, device_for(arch))
        step = self.step
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

    def repeated(self, time_us: Callable[[Runnable], float]) -> tuple[Runnable, int]:
        """A call for the clock and how many launches it makes; `time_us` times a call.

        If the device has graphs, it replays one with several launches in a row.
        """
        if not self.device.captures:
            return self.launch, 1
        for _ in range(WARM_UP_LAUNCHES):  # libraries choose algorithms and take memory
            self.launch()
        few = self._graph(FEW_LAUNCHES)
        once_us = time_us(few) / FEW_LAUNCHES
        count = min(math.ceil(GRAPH_US / max(once_us, 0.1)), MOST_LAUNCHES)
        return (few, FEW_LAUNCHES) if count <= FEW_LAUNCHES else (self._graph(count), count)

    def _graph(self, launches: int) -> Runnable:
        def all_launches() -> None:
            for _ in range(launches):
                self.launch()

        return self.device.captured(all_launches)
