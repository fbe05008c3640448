"""What is said of a machine that is a few files: who ran on its cores, and for how long."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from plantune.measure import machine_state
from plantune.measure.machine_state import TICKS_PER_S, Machine, State

OWN, WORKER, OTHER = os.getpid(), 900001, 900002


class Proc:
    """/proc with two cores; `run` lets time pass in which processes compute."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 0.0
        self.busy = self.stolen = 0
        self.ticks = {OWN: 0, WORKER: 0, OTHER: 0}
        self.parents = {OWN: 1, WORKER: OWN, OTHER: 1}
        self.run(0.0)

    def run(self, seconds: float, stolen: float = 0.0, **cores: float) -> None:
        self.now += seconds
        for name, part in cores.items():
            ticks = round(part * seconds * TICKS_PER_S)
            self.busy += ticks
            self.ticks[{"own": OWN, "worker": WORKER, "other": OTHER}[name]] += ticks
        self.stolen += round(stolen * seconds * TICKS_PER_S)
        self.folder.mkdir(exist_ok=True)
        core = f"cpu0 {self.busy} 0 0 5 5 0 0 {self.stolen} 0 0\ncpu7 99999 0 0 0 0 0 0 0 0 0"
        (self.folder / "stat").write_text(f"cpu 1 1\n{core}\nintr 5\n")
        for pid, ticks in self.ticks.items():
            (self.folder / str(pid)).mkdir(exist_ok=True)
            fields = ["R", self.parents[pid], *[0] * 9, ticks, 0, 0, 0]
            text = f"{pid} (a (name) {pid}) {' '.join(map(str, fields))}"
            (self.folder / str(pid) / "stat").write_text(text)

    def machine(self, **known: Any) -> Machine:
        """One of two cores that reads this."""
        cores = frozenset(("cpu0", "cpu1"))
        return Machine(self.folder, lambda: self.now, cores=cores, **known)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path / "proc")


def test_its_own_workers_are_not_others(proc: Proc) -> None:
    looked = proc.machine()
    proc.run(2.0, own=0.5, worker=1.0)
    state = looked.look()
    assert (state.others, state.names, state.reason, state.word) == (0.0, (), "", "quiet")


def test_others_are_counted_and_named(proc: Proc) -> None:
    looked = proc.machine()
    proc.run(4.0, worker=0.5, other=1.5)
    state = looked.look()
    assert state.others == pytest.approx(1.5)
    named = f"a (name) {OTHER}"
    assert state.reason == f"other processes took 1.5 of 2 cores ({named})"
    assert state.word == "busy"
    proc.run(4.0, worker=1.0)
    assert looked.look().reason == ""  # each look tells of its own time


def test_what_the_host_takes_away_is_said(proc: Proc) -> None:
    looked = proc.machine()
    proc.run(1.0, stolen=0.4)
    state = looked.look()
    assert state.reason == "the host took 0.4 of 2 cores away"
    assert state.word == "slow"


def test_a_slow_phase_is_one_against_the_best(proc: Proc) -> None:
    pulses = iter([200.0, 100.0, 250.0, 110.0])
    looked = proc.machine(pulse_us=lambda: next(pulses))
    assert [looked.slowdown() for _ in range(2)] == [1.0, 1.0]
    proc.run(1.0)
    state = looked.look()
    assert state.reason == "the machine was 2.5 times slower than at its best"
    assert state.word == "slow"
    assert looked.slowdown() == pytest.approx(1.1)


def test_where_nothing_tells_it_counts_as_quiet(tmp_path: Path) -> None:
    assert Machine(tmp_path / "none").look().word == "quiet"


def test_a_gpu_that_others_use_is_busy(proc: Proc) -> None:
    state = proc.machine(gpu=lambda: "2 other processes").look()
    assert (state.reason, state.word) == ("2 other processes", "busy")


def test_this_machine_is_read() -> None:
    looked = Machine()
    sum(range(10**6))
    state = looked.look()
    assert isinstance(state, State)
    assert state.cores >= 1
    assert machine_state.pulse_us() > 0
