"""A binding's launch as a pass makes it: on a GPU with what it computes from weights."""

from __future__ import annotations

from plantune.device import Call, Device
from plantune.kernels.family import Binding, Values
from plantune.kernels.preparation import Preparation
from plantune.machine import arch_of
from plantune.space.arch import Arch, load_arch


def preparation_of(binding: Binding, values: Values, arch: Arch, device: Device) -> Preparation:
    """What a pass fills for one kernel; on a GPU that is later than `arch`, by its own code."""
    own = load_arch(arch_of(device.place)) if device.captures else arch
    return Preparation(binding.constants, values, {}, own, device.place)


def one_pass(binding: Binding, preparation: Preparation, device: Device) -> Call:
    """Fills and launches, on the current stream."""

    def call() -> None:
        preparation.launch(device.stream)
        binding.launch(device.stream)

    return call
