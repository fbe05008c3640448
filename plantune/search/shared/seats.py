"""The environment of a search on several GPUs, which must be of one kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plantune.devices.gpus import Seat, best_arch, device_for
from plantune.devices.machine import Environment, environment_of
from plantune.errors import UnlikeGpus, UnsupportedDevice
from plantune.space.arch import load_arch


def environment_on(seats: Sequence[Seat], arch: str) -> Environment:
    """The environment that all seats have, or this machine's for an arch; for one that is not here
    that of its best. Raises UnlikeGpus if times of one seat say nothing of another.
    """
    if not seats:
        try:
            device = device_for(load_arch(arch))
        except UnsupportedDevice:
            device = device_for(load_arch(best_arch()))
        return environment_of(device.place)
    found = [environment_of(_place(seat)) for seat in seats]
    for seat, environment in zip(seats, found, strict=True):
        for field, (first, here) in found[0].differences(environment).items():
            raise UnlikeGpus(
                f"{seats[0].name} ({found[0].device}) and {seat.name} ({environment.device}) are "
                f"not of one kind: {field} is {first} and {here}; give --gpus those that are"
            )
    return found[0]


def _place(seat: Seat) -> torch.device:
    return torch.device("cpu") if seat.gpu is None else torch.device("cuda", seat.gpu)
