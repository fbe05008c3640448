"""A step's kernel bound to memory as a program would give it, ready to be timed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from plantune.device import Call, Device
from plantune.gpus import device_for
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.build import build
from plantune.kernels.family import Candidate, Frame, Values
from plantune.kernels.preparation import Preparation
from plantune.kernels.registry import family_named
from plantune.layouts import view_bytes
from plantune.measure.inputs import draw_inputs
from plantune.measure.launching import one_pass, preparation_of
from plantune.space.arch import Arch

# A replayed graph takes some 2 us to start; one this long hides it.
GRAPH_US = 150.0
FEW_LAUNCHES, MOST_LAUNCHES = 4, 100
WARM_UP_LAUNCHES = 2
# What a kernel needs of weights is filled in one launch for the whole network. Less than this takes
# no longer there than the launch itself, so it is not counted again for each step.
SMALL_BYTES = 1 << 18


class BoundStep:
    """One candidate with prepared weights and memory of its own, on `data` or random inputs.

    An image that the kernel takes in any layout comes in the one that it makes: a plan that mixes
    layouts pays for its conversions in the whole program.
    """

    def __init__(
        self, step: Step, candidate: Candidate, arch: Arch, data: Values | None = None
    ) -> None:
        self._device = device = device_for(arch)
        family, config = family_named(candidate.family), candidate.config
        layouts = family.layouts(step, config)
        elsewhere = {*family.aliases(step, config), *family.adopts(step, config)}
        made = [layouts.get(name, "nchw") for name, t in step.outputs if len(t.shape) == 4]
        self._made_anew = tuple(elsewhere)
        self._values: Values = {
            name: self._empty(type_, layouts.get(name, "nchw"))
            for name, type_ in step.outputs
            if name not in elsewhere
        }
        for name, drawn in (data or draw_inputs(step, device.generator(0))).items():
            image = len(step.types[name].shape) == 4
            free = _weight_layout(device) if name in step.constants else made[0] if made else "nchw"
            layout = layouts.get(name, free if image else "nchw")
            self._values[name] = self._empty(step.types[name], layout).copy_(drawn)
        size = family.workspace_bytes(step, config)
        workspace = self._bytes(size) if size else None
        frame = Frame(self._values, workspace, build(step, candidate, arch), device.place)
        binding = family.bind(step, config, frame)
        if binding.refresh is not None:
            binding.refresh()
        preparation = preparation_of(binding, self._values, arch, device)
        preparation.place()
        preparation.launch(device.stream)
        if preparation.moved_bytes < SMALL_BYTES:
            preparation = Preparation((), {}, {}, arch, device.place)
        self._pass = one_pass(binding, preparation, device)

    def launch(self) -> None:
        """Runs the step once; what it made in fresh memory is dropped, as in a program."""
        self._pass()
        for name in self._made_anew:
            del self._values[name]

    def repeated(self, time_us: Callable[[Call], float]) -> tuple[Call, int]:
        """A call for the clock and how many launches it makes; `time_us` times a call.

        Where the device has graphs it replays one with launches behind each other.
        """
        if not self._device.captures:
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

        return self._device.captured(all_launches)

    def _empty(self, type_: TensorType, layout: str) -> Tensor:
        return view_bytes(self._bytes(type_.size_bytes), 0, type_, layout)

    def _bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device.place)


def _weight_layout(device: Device) -> str:
    """A network that runs on a GPU has its filters in channels_last, as load_model makes it."""
    return "nhwc" if device.captures else "nchw"
