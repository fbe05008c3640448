"""The state of the machine while something is timed: who else runs on its cores, how fast it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plantune.devices.cuda.nvml import is_slowed, users
from plantune.devices.gpus import device_for
from plantune.errors import UnsupportedDevice
from plantune.space.arch import load_arch

# Others on less than this part of a core, and a host that takes less, disturb little.
BUSY_CORES = 0.25
STOLEN_CORES = 0.1
# A loop that takes so much longer than at its best was in a slow spell.
SLOW = 1.3
# A loop of this length takes a fraction of a millisecond.
PULSE_SIZE, PULSES = 20_000, 20
NAMED = 3
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class State:
    """What disturbed a stretch of time: `others` and `stolen` count cores, `slowdown` is the time
    of a fixed loop as a multiple of its best; 1 if nothing tells.
    """

    cores: int
    others: float = 0.0
    stolen: float = 0.0
    names: tuple[str, ...] = ()
    slowdown: float = 1.0
    gpu: str = ""

    @property
    def reason(self) -> str:
        """What disturbed, in words; "" if nothing did."""
        said = []
        if self.others >= BUSY_CORES:
            named = f" ({', '.join(self.names)})" if self.names else ""
            said.append(f"other processes took {self.others:.1f} of {self.cores} cores{named}")
        if self.stolen >= STOLEN_CORES:
            said.append(f"the host took {self.stolen:.1f} of {self.cores} cores away")
        if self.slowdown >= SLOW:
            said.append(f"the machine was {self.slowdown:.1f} times slower than at its best")
        return "; ".join([*said, *filter(None, [self.gpu])])

    @property
    def word(self) -> str:
        """For a plan's evidence: quiet, busy or slow."""
        if not self.reason:
            return "quiet"
        return "busy" if self.others >= BUSY_CORES or self.gpu else "slow"


@dataclass(frozen=True)
class _Ticks:
    at: float
    busy: int
    stolen: int
    own: int
    others: Mapping[int, tuple[str, int]]


class Machine:
    """Reads the machine now and again; each reading covers the time since the one before."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
        pulse_us: Callable[[], float] | None = None,
        gpu: Callable[[], str] = str,
        cores: frozenset[str] | None = None,
    ) -> None:
        self._proc = proc
        self._clock = clock
        self._pulse_us = pulse_us
        self._gpu = gpu
        self._cores = _own_cores() if cores is None else cores
        self._best_us = float("inf")
        self._ticks = self._read()

    def look(self) -> State:
        """The state since the last reading."""
        before, self._ticks = self._ticks, self._read()
        now, slowdown, gpu = self._ticks, self.slowdown(), self._gpu()
        if before is None or now is None or now.at <= before.at:
            return State(len(self._cores), slowdown=slowdown, gpu=gpu)
        ticks = (now.at - before.at) * TICKS_PER_S
        others = max((now.busy - before.busy) - (now.own - before.own), 0) / ticks
        stolen = (now.stolen - before.stolen) / ticks
        names = _largest(before, now, ticks)
        return State(len(self._cores), others, stolen, names, slowdown, gpu)

    def slowdown(self) -> float:
        """How much longer than at its best a fixed loop takes now."""
        if self._pulse_us is None:
            return 1.0
        now_us = self._pulse_us()
        self._best_us = min(self._best_us, now_us)
        return now_us / self._best_us

    def _read(self) -> _Ticks | None:
        """What Linux has counted so far; None if it does not say."""
        with suppress(OSError, ValueError, IndexError):
            busy = stolen = 0
            for line in (self._proc / "stat").read_text().splitlines():
                name, *numbers = line.split()
                if name in self._cores:
                    user, nice, system, _, _, interrupts, soft, steal = map(int, numbers[:8])
                    busy += user + nice + system + interrupts + soft
                    stolen += steal
            own, others = self._processes()
            return _Ticks(self._clock(), busy, stolen, own, others)
        return None

    def _processes(self) -> tuple[int, dict[int, tuple[str, int]]]:
        """The ticks of this process and its children, and those of each other process."""
        rows: dict[int, tuple[int, str, int, int]] = {}
        for entry in self._proc.iterdir():
            if entry.name.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    head, _, tail = (entry / "stat").read_text().rpartition(")")
                    fields = tail.split()
                    self_ticks, reaped = (sum(map(int, fields[i : i + 2])) for i in (11, 13))
                    name = head.partition("(")[2]
                    rows[int(entry.name)] = (int(fields[1]), name, self_ticks, reaped)
        own = {os.getpid()}
        while more := {pid for pid, row in rows.items() if row[0] in own} - own:
            own |= more
        ticks = sum(rows[pid][2] + rows[pid][3] for pid in own if pid in rows)
        return ticks, {pid: (row[1], row[2]) for pid, row in rows.items() if pid not in own}


def gpu_watcher(arch: str, gpu: int | None = None) -> Callable[[], str]:
    """Says what slows the GPU of an arch down, or torch's of that number, "" if nothing does or it
    is a CPU.

    Of other processes it tells only those that ran before this one's workers.
    """
    try:
        device = device_for(load_arch(arch))
    except UnsupportedDevice:
        return str
    if not device.captures:
        return str
    index = device.place.index if gpu is None else gpu
    before = users(index)

    def look() -> str:
        said = [f"{before} other processes used the GPU"] if before else []
        return "; ".join([*said, *(["heat or power slowed the GPU"] if is_slowed(index) else [])])

    return look


def machine_for(kind: str, gpu: Callable[[], str] = str) -> Machine:
    """The machine as it concerns a kind of processor: a loop on its cores tells for them."""
    return Machine(pulse_us=pulse_us if kind == "cpu" else None, gpu=gpu)


def pulse_us() -> float:
    """The time of a fixed loop on one core, the least of a few.

    It is so short that one of them has the core to itself though others run: they are recognised by
    their own time, and a worker discards samples that they disturbed. A product on all threads took
    50 times as long beside them, and kernels that were corrected by that 3 times too little.
    """
    times = []
    for _ in range(PULSES):
        start = time.perf_counter_ns()
        sum(range(PULSE_SIZE))
        times.append((time.perf_counter_ns() - start) / 1e3)
    return min(times)


def _own_cores() -> frozenset[str]:
    """The cores that this process may use, as /proc/stat names them."""
    return frozenset(f"cpu{core}" for core in os.sched_getaffinity(0))


def _largest(before: _Ticks, now: _Ticks, ticks: float) -> tuple[str, ...]:
    """The names of the processes that took the most, if they took anything to speak of."""
    grown = [
        (count - before.others.get(pid, (name, 0))[1], name)
        for pid, (name, count) in now.others.items()
    ]
    shown = sorted((pair for pair in grown if pair[0] >= 0.1 * ticks), reverse=True)[:NAMED]
    return tuple(name for _, name in shown)
