"""Which calls golden files are about: networks and small modules, by modes, dtypes and archs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from entry import Graph, Workload, network_names
from modules import INPUTS

FILE = Path(__file__).with_name("modules.py")
ON_GPUS = ("sm80", "sm90")  # layers differ there: sm90 has recurrent kernels of ours
# On CPUs, and on GPUs: dtypes of networks, and of small modules.
DTYPES = {"cpu": ("float32",), "gpu": ("float16", "float32")}
SMALL_DTYPES = {"cpu": ("float32", "bfloat16"), "gpu": ("float16", "bfloat16", "float32")}
BATCHES = {"infer": (1, 32), "train": (32,)}
Subject = tuple[str, Workload]


def _kind(arch: str) -> str:
    return "cpu" if arch == "cpu" else "gpu"


def networks(archs: tuple[str, ...]) -> Iterator[Subject]:
    for arch in archs:
        for name in network_names():
            for mode, batches in BATCHES.items():
                for batch in batches:
                    for dtype in DTYPES[_kind(arch)]:
                        yield _named(Workload(name, batch, 3, mode, dtype, arch))


def small(archs: tuple[str, ...]) -> Iterator[Subject]:
    for arch in archs:
        for name, inputs in INPUTS.items():
            for mode in BATCHES:
                for dtype in SMALL_DTYPES[_kind(arch)]:
                    yield _named(_small(name, inputs, mode, dtype, arch))


def _small(name: str, inputs: tuple[str, ...], mode: str, dtype: str, arch: str) -> Workload:
    batch = int(inputs[0].partition("x")[0])
    return Workload(f"{FILE}:{name}", batch, 3, mode, dtype, arch, inputs=inputs)


def _named(workload: Workload) -> Subject:
    network = workload.network.rpartition(":")[2]
    parts = (network, f"batch {workload.batch}", workload.mode, workload.dtype, workload.arch)
    return ", ".join(parts), workload


@cache
def graph_of(workload: Workload) -> Graph:
    """Read once: archs whose layers are alike share it."""
    return workload.graph


def alike(arch: str) -> str:
    """An arch with the same layers."""
    return "cpu" if arch == "cpu" else "sm90" if arch == "sm90" else "sm80"
