"""The GPUs of this machine, and which device serves an arch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plantune.devices.device import CPU, Device, Gpu
from plantune.errors import UnlikeGpus, UnsupportedDevice
from plantune.space.arch import ARCH_NAMES, Arch

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class LocalGpu:
    """A GPU that torch sees."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int

    @property
    def arch(self) -> str:
        """The name of its arch, known or not."""
        return "sm{}{}".format(*self.capability)

    def __str__(self) -> str:
        return f"{self.name} ({self.arch})"


@dataclass(frozen=True)
class Slot:
    """Where one measuring worker works: its name for people, and torch's number of its GPU, None
    for the one that serves an arch anyway.
    """

    name: str
    gpu: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a process sees beside this one's variables, so that it has this GPU alone."""
        if self.gpu is None:
            return {}
        visible = [part.strip() for part in os.environ.get(VISIBLE, "").split(",") if part.strip()]
        return {VISIBLE: visible[self.gpu] if visible else str(self.gpu)}


def slots_of(arch: Arch, wanted: Sequence[int] | None) -> tuple[Slot, ...]:
    """A slot on each of these GPUs, on all of the arch without numbers.

    Raises UnlikeGpus for one of another arch, and UnsupportedDevice for one that is not here.
    """
    here = {gpu.index: gpu for gpu in gpus_here()}
    if wanted is None:
        wanted = sorted(gpu.index for gpu in here.values() if gpu.arch == arch.name)
    if missing := [index for index in wanted if index not in here]:
        named = ", ".join(f"{index} {here[index]}" for index in sorted(here)) or "none"
        raise UnsupportedDevice(f"GPU {missing[0]} is not here; torch sees {named}")
    if not wanted:
        device_for(arch)  # says what is here instead
    for index in wanted:
        if here[index].arch != arch.name:
            raise UnlikeGpus(f"GPU {index} is a {here[index]}, and the search is for {arch.name}")
    return tuple(Slot(f"GPU {index}", index) for index in wanted)


def gpus_here() -> tuple[LocalGpu, ...]:
    """The GPUs that torch sees, the current one first."""
    if not torch.cuda.is_available():
        return ()
    current = torch.cuda.current_device()
    indices = sorted(range(torch.cuda.device_count()), key=lambda index: index != current)
    return tuple(map(_gpu, indices))


def _gpu(index: int) -> LocalGpu:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return LocalGpu(index, properties.name, capability, properties.total_memory)


def device_for(arch: Arch) -> Device:
    """The processor of this machine that is of an arch; raises UnsupportedDevice without one.

    A GPU must be exactly of the arch: a plan for another arch is refused.
    """
    if arch.cuda is None:
        return CPU
    here = gpus_here()
    for gpu in here:
        if gpu.capability == arch.cuda.compute_capability:
            return Gpu(gpu.index)
    seen = f"here is {' and '.join(map(str, here))}" if here else "torch sees no CUDA GPU here"
    raise UnsupportedDevice(
        f"{arch.name} needs a GPU of compute capability "
        f"{'{}.{}'.format(*arch.cuda.compute_capability)}; {seen}"
    )


def later_gpu(arch: Arch) -> Gpu | None:
    """The first GPU here that is later than an arch: it runs that arch's PTX. None without one."""
    if arch.cuda is None:
        return None
    wanted = arch.cuda.compute_capability
    return next((Gpu(gpu.index) for gpu in gpus_here() if gpu.capability > wanted), None)


def best_arch() -> str:
    """The arch that a user of this machine expects: that of its first known GPU, else the CPU."""
    known = (gpu.arch for gpu in gpus_here() if gpu.arch in ARCH_NAMES)
    return next(known, "cpu")
