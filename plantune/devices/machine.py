"""What a measurement depends on besides the problem: machine, libraries, versions."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plantune.base.canonical import Attrs, digest
from plantune.devices.host import cpu_identity, cpu_name, cxx_compiler
from plantune.errors import InvalidPlan, UnknownArch, UnsupportedDevice

if TYPE_CHECKING:
    import torch

# Where these differ, a plan is for another chip: it is refused.
DEFINING = ("arch",)


@dataclass(frozen=True)
class Environment:
    """The machine and the versions under which a plan was made; `gpu` holds what a GPU adds."""

    arch: str
    device: str
    device_digest: str
    threads: int
    torch: str
    plantune: str
    compiler: str
    system: str
    gpu: Attrs = field(default_factory=lambda: Attrs({}))

    @property
    def key(self) -> str:
        """Equal for environments in which timings can be compared."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """One flat object: what a GPU adds stands beside the rest."""
        return {**{name: getattr(self, name) for name in ALWAYS}, **self.gpu}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Environment:
        """The environment of `to_json`; raises InvalidPlan for other data."""
        known = {**ALWAYS, **GPU}
        if not set(ALWAYS) <= set(data) <= set(known):
            raise InvalidPlan(f"environment: needs the fields {', '.join(ALWAYS)}, got {set(data)}")
        for name, value in data.items():
            if type(value) is not known[name]:
                raise InvalidPlan(f"environment.{name}: must be {known[name].__name__}")
        gpu = Attrs({name: data[name] for name in data if name in GPU})
        return Environment(**{name: data[name] for name in ALWAYS}, gpu=gpu)

    def match(self, other: Environment) -> str:
        """How a plan made in `other` may be used here: exact, compatible or foreign."""
        if self == other:
            return "exact"
        same = all(getattr(self, name) == getattr(other, name) for name in DEFINING)
        return "compatible" if same else "foreign"

    def differences(self, other: Environment) -> dict[str, tuple[Any, Any]]:
        """The fields that differ: (here, there)."""
        here, there = self.to_json(), other.to_json()
        pairs = {name: (here.get(name), there.get(name)) for name in {**here, **there}}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# The fields that every environment has, and those that only one with a GPU has.
ALWAYS: Mapping[str, type] = {
    f.name: int if f.name == "threads" else str for f in fields(Environment) if f.name != "gpu"
}
GPU: Mapping[str, type] = {
    **dict.fromkeys(("sm_count", "memory_mib", "l2_kib"), int),
    **dict.fromkeys(("mig", "driver", "cuda", "cudnn", "cutlass"), str),
}


def arch_of(device: torch.device) -> str:
    """The arch of a torch device; raises UnknownArch for a GPU that plantune does not know, and
    UnsupportedDevice for anything else.
    """
    import torch

    from plantune.space.arch import ARCH_NAMES

    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda" and torch.cuda.is_available():
        name = "sm{}{}".format(*torch.cuda.get_device_capability(device))
        if name in ARCH_NAMES:
            return name
        raise UnknownArch(f"{device} is {name}; plantune knows {', '.join(ARCH_NAMES)}")
    raise UnsupportedDevice(f"no plan runs on device {device}: not a CPU or usable GPU")


def why_no_plans(device: torch.device) -> str | None:
    """Why no plan can run on a GPU of this machine, None if one can."""
    try:
        arch_of(device)
    except UnknownArch as error:
        return str(error)
    return None


def environment_of(device: torch.device) -> Environment:
    """This process's environment for plans that run on a torch device."""
    if device.type == "cpu":
        return cpu_environment()
    import torch

    return _gpu_environment(torch.cuda.current_device() if device.index is None else device.index)


def cpu_environment() -> Environment:
    """This process's environment for arch `cpu`, with the number of threads of now."""
    import torch

    return _cpu_environment(torch.get_num_threads())


@cache
def _cpu_environment(threads: int) -> Environment:
    return _of_torch("cpu", cpu_name(), cpu_identity(), cxx_compiler() or "none", threads)


@cache
def predicted_environment(arch: str) -> Environment:
    """The environment of a plan that was made for an arch without measuring; no machine has it."""
    from plantune.devices.cuda.choice import nvrtc_for
    from plantune.devices.cuda.toolchain import cutlass_version
    from plantune.space.arch import load_arch

    target = load_arch(arch)
    name = f"predicted for {arch}" + (f" ({target.chip.name})" if target.chip else "")
    gpu = Attrs({"cutlass": cutlass_version()})
    return _of_torch(arch, name, ["predicted", name], str(nvrtc_for(target)), gpu=gpu)


@cache
def _gpu_environment(index: int) -> Environment:
    import torch

    from plantune.devices.cuda.driver import driver_version
    from plantune.devices.cuda.nvml import driver_release
    from plantune.devices.cuda.toolchain import all_nvrtc, cutlass_version

    properties = torch.cuda.get_device_properties(index)
    silicon = {
        "sm_count": properties.multi_processor_count,
        "memory_mib": properties.total_memory >> 20,
        "l2_kib": properties.L2_cache_size >> 10,
        "mig": "MIG" if "MIG" in properties.name else "none",
    }
    of_gpu = {
        **silicon,
        # Its own version: a release of CUDA has many drivers.
        "driver": driver_release() or "for CUDA {}.{}".format(*driver_version()),
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version()),
        "cutlass": cutlass_version(),
    }
    arch, name = arch_of(torch.device("cuda", index)), properties.name
    compiler = ", ".join(dict.fromkeys(map(str, all_nvrtc()))) or "none"
    return _of_torch(arch, name, [name, silicon], compiler, gpu=Attrs(of_gpu))


def _of_torch(
    arch: str, device: str, identity: Any, compiler: str, threads: int = 0, gpu: Attrs | None = None
) -> Environment:
    """With the torch, the plantune and the system of this process."""
    import torch

    return Environment(
        arch=arch,
        device=device,
        device_digest=digest(identity)[:16],
        threads=threads,
        torch=str(torch.__version__),
        plantune=_own_version(),
        compiler=compiler,
        system=f"{platform.system()} {platform.machine()}",
        gpu=gpu or Attrs(),
    )


def _own_version() -> str:
    try:
        return version("plantune")
    except PackageNotFoundError:  # run from a checkout without an installation
        project = Path(__file__).parents[2] / "pyproject.toml"
        with suppress(OSError, LookupError, ValueError):
            return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
        return "unknown"
