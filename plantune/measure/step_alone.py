"""A step bound as in a program, but alone, to be checked or timed."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from plantune.device import Device
from plantune.graph.step import Step
from plantune.kernels.build import build
from plantune.kernels.family import Candidate
from plantune.kernels.preparation import Preparation
from plantune.layouts import view_bytes
from plantune.machine import arch_of
from plantune.runtime.binding import bind, made_for
from plantune.runtime.schedule import Launch
from plantune.space.arch import Arch, load_arch


class StepAlone(ABC):
    """A candidate in memory that `_take` gives, with what a pass computes for it from weights.

    If it is `portable`, a device of a later arch runs it.
    """

    def __init__(
        self,
        step: Step,
        candidate: Candidate,
        arch: Arch,
        device: Device,
        *,
        portable: bool = False,
    ) -> None:
        self.step, self.candidate, self.device = step, candidate, device
        launch = Launch(step, candidate, ())
        self._layouts, self._aliases = launch.layouts, launch.aliases
        self._adopts, self._workspace = launch.adopts, launch.workspace
        self.values = made_for(launch, self._take)
        if portable:
            built = launch.family.build_portable(launch.parts, candidate.config, arch)
        else:
            built = build(step, candidate, arch)
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
