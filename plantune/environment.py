"""What a measurement depends on besides the problem: machine, libraries, versions."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from plantune.env import cpu_identity, cxx_compiler
from plantune.errors import InvalidPlan
from plantune.values import digest

# Where these differ, a plan is for another chip: it is refused.
DEFINING = ("arch",)


@dataclass(frozen=True)
class Environment:
    """The machine and the versions under which a plan was made."""

    arch: str
    device: str
    device_digest: str
    threads: int
    torch: str
    plantune: str
    compiler: str
    system: str

    @property
    def key(self) -> str:
        """Equal for environments in which timings can be compared."""
        return digest(asdict(self))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Environment:
        """The environment of `to_json`; raises InvalidPlan for other data."""
        wanted = {
            field.name: int if field.name == "threads" else str for field in fields(Environment)
        }
        if set(data) != set(wanted):
            raise InvalidPlan(f"environment: needs the fields {', '.join(wanted)}, got {set(data)}")
        for name, type_ in wanted.items():
            if type(data[name]) is not type_:
                raise InvalidPlan(f"environment.{name}: must be {type_.__name__}")
        return Environment(**data)

    def match(self, other: Environment) -> str:
        """How a plan made in `other` may be used here: exact, compatible or foreign."""
        if self == other:
            return "exact"
        same = all(getattr(self, name) == getattr(other, name) for name in DEFINING)
        return "compatible" if same else "foreign"

    def differences(self, other: Environment) -> dict[str, tuple[Any, Any]]:
        """The fields that differ: (here, there)."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@cache
def cpu_environment() -> Environment:
    """This process's environment for arch `cpu`."""
    import torch

    return Environment(
        arch="cpu",
        device=_cpu_name(),
        device_digest=digest(cpu_identity())[:16],
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        plantune=_own_version(),
        compiler=cxx_compiler() or "none",
        system=f"{platform.system()} {platform.machine()}",
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _own_version() -> str:
    try:
        return version("plantune")
    except PackageNotFoundError:
        return "unknown"
