"""Whether there is room for a network: what measuring it takes at least, and what is free here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from plantune.devices.device import Device
from plantune.devices.gpus import device_for
from plantune.errors import NotEnoughMemory
from plantune.graph.graph import Graph
from plantune.plans.problem import Problem
from plantune.space.arch import load_arch

# The copies of weights in a race: the module, the plan's and those of the routes that run beside
# it.
COPIES = 6
# Headroom for workspaces, and for images in other layouts.
SLACK = 1.25
EXACT_BYTES = 8  # of a float64, in which the reference is computed


def needed_bytes(graph: Graph) -> int:
    """What a race takes at least: the exact reference, later a plan's memory beside that of another
    route.
    """
    weights = sum(type_.size_bytes for _, type_ in (*graph.parameters, *graph.buffers))
    values, exact = _most_alive(graph)
    return COPIES * weights + int(SLACK * max(exact, 2 * values))


def _most_alive(graph: Graph) -> tuple[int, int]:
    """The bytes of all values that are alive at once, at the worst, and as floats of 8 bytes."""
    constants = {name for name, _ in (*graph.parameters, *graph.buffers)}
    last = {value: place for place, node in enumerate(graph.nodes) for value in node.inputs}
    last |= dict.fromkeys(graph.results, len(graph.nodes))
    alive = {name for name, _ in graph.sources} - constants
    most, most_exact = 0, 0
    for place, node in enumerate(graph.nodes):
        alive |= set(node.outputs) - graph.constants
        types = [graph.types[name] for name in alive]
        most = max(most, sum(type_.size_bytes for type_ in types))
        exact = sum(t.numel * EXACT_BYTES if t.is_float else t.size_bytes for t in types)
        most_exact = max(most_exact, exact)
        alive -= {name for name in alive if last.get(name, -1) <= place}
    return most, most_exact


def free_bytes(device: Device) -> int | None:
    """What can be allocated now; None if nothing tells."""
    if device.captures:
        return int(torch.cuda.mem_get_info(device.place)[0])
    known = [*_free_in_system(Path("/proc/meminfo")), *_free_in_group(Path("/"))]
    return min(known, default=None)


def require_room(graph: Graph, problem: Problem) -> int:
    """The bytes that measuring a problem takes; raises NotEnoughMemory if they are not free."""
    needed = needed_bytes(graph)
    free = free_bytes(device_for(load_arch(problem.arch)))
    if free is not None and needed > free:
        batch = max(int(problem.batch * free / needed), 1)
        raise NotEnoughMemory(
            f"{problem.network} at batch {problem.batch} needs about {_gib(needed)} of memory, "
            f"and {_gib(free)} are free here; batch {_rounded(batch)} has room",
            needed,
            free,
        )
    return needed


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _rounded(batch: int) -> int:
    """Down to a power of two."""
    return 1 << (batch.bit_length() - 1)


def _free_in_system(meminfo: Path) -> Iterator[int]:
    with suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10


def _free_in_group(root: Path) -> Iterator[int]:
    """What the control groups of this process leave it, the outer ones too."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                yield from _left(root / "sys/fs/cgroup/memory", path, OLD_NAMES)
            elif not controllers:
                yield from _left(root / "sys/fs/cgroup", path, NEW_NAMES)


# The files of both versions: the limit, what is used, and in memory.stat what can be dropped.
OLD_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
NEW_NAMES = ("memory.max", "memory.current", "inactive_file")


def _left(top: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    limit, used, droppable = names
    folder = top / path.strip("/")
    while True:
        with suppress(OSError, ValueError):  # no limit is called max
            most = int((folder / limit).read_text())
            taken = int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield most - taken + int(stat.get(droppable, 0))
        if folder == top:
            return
        folder = folder.parent
