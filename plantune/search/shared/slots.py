"""The environment of a search on several GPUs, which must be of one kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plantune.devices.gpus import Slot, best_arch, device_for
from plantune.devices.machine import Environment, environment_of
from plantune.errors import UnlikeGpus, UnsupportedDevice
from plantune.space.arch import load_arch


def environment_on(slots: Sequence[Slot], arch: str) -> Environment:
    """The environment that all slots have, or this machine's for an arch; for one that is not here
    that of its best. Raises UnlikeGpus if times of one slot say nothing of another.
    """
    if not slots:
        try:
            device = device_for(load_arch(arch))
        except UnsupportedDevice:
            device = device_for(load_arch(best_arch()))
        return environment_of(device.place)
    found = [environment_of(_place(slot)) for slot in slots]
    for slot, environment in zip(slots, found, strict=True):
        for field, (first, here) in found[0].differences(environment).items():
            raise UnlikeGpus(
                f"{slots[0].name} ({found[0].device}) and {slot.name} ({environment.device}) are "
                f"not of one kind: {field} is {first} and {here}; give --gpus those that are"
            )
    return found[0]


def _place(slot: Slot) -> torch.device:
    return torch.device("cpu") if slot.gpu is None else torch.device("cuda", slot.gpu)
