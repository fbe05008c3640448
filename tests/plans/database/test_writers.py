"""Many writers and sudden deaths: a reader sees what was before or what is after."""

from __future__ import annotations

import os
import random
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from plantune.base.outcome import Measured
from plantune.devices.machine import Environment
from plantune.plans.database.plan_database import PlanDatabase

Start = Callable[..., "subprocess.Popen[str]"]
WRITERS, ROUNDS = 4, 25

# Each writes values that belong together, so that a mix of two writers would show.
WRITE = """
writer, rounds = int(sys.argv[2]), int(sys.argv[3])
with PlanDatabase.open(path) as database:
    for number in range(rounds):
        mark = float(writer * 10_000 + number)
        trial = Measured(mark, mark, mark, int(mark), mark, mark, True)
        database.put_trial("step", NHWC, HERE, trial)
        database.put_trial("step", Candidate(f"f{writer}", Attrs(n=number)), HERE, trial)
        evidence = Attrs(median_ms=mark, baseline=f"{mark}", baseline_ms=mark, ratio=mark)
        database.put_plan(replace(PLAN, evidence=evidence), HERE)
        print(number, flush=True)
"""


def numbers_in(outcome: Measured) -> set[float]:
    return {outcome.median_us, outcome.low_us, outcome.high_us, outcome.error, outcome.bound}


def check(database: PlanDatabase, here: Environment) -> int:
    """Everything that is there is whole; returns how many plans there are."""
    plans = database.plans()
    for stored in plans:
        values = dict(stored.plan.evidence)
        assert values["median_ms"] == values["ratio"] == float(values["baseline"])
    for outcome in database.trials("step", here).values():
        assert isinstance(outcome, Measured)
        assert numbers_in(outcome) == {float(outcome.samples)}
    return len(plans)


def test_four_writers_and_a_reader_never_see_a_mix(
    path: Path, start: Start, here: Environment
) -> None:
    # The file does not exist yet: the writers also race for making it.
    writers = [start(WRITE, path, number, ROUNDS) for number in range(WRITERS)]
    while not path.exists():
        time.sleep(0.01)
    seen = [0]
    with PlanDatabase.open(path) as database:
        while any(writer.poll() is None for writer in writers):
            seen.append(check(database, here))
            time.sleep(0.02)
        assert [writer.wait() for writer in writers] == [0] * WRITERS
        assert check(database, here) == WRITERS * ROUNDS
        assert len(database.trials("step", here)) == WRITERS * ROUNDS + 1
        assert {stored.id for stored in database.plans()} == set(range(1, WRITERS * ROUNDS + 1))
    assert seen == sorted(seen)
    assert not list(path.parent.glob("*.damaged-*"))


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_kill_loses_nothing_that_was_committed(
    path: Path, start: Start, here: Environment, kills: int
) -> None:
    choice = random.Random(17)
    committed = 0
    for _ in range(kills):
        writer = start(WRITE, path, 0, 1_000_000)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(choice.uniform(0, 0.1))
        os.kill(writer.pid, 9)
        committed += 1 + len(writer.stdout.readlines())
        with PlanDatabase.open(path) as database:
            there = check(database, here)
        # What was said to be done is there; one more may be, which nobody heard of.
        assert committed <= there <= committed + 1
        committed = there


def test_a_killed_writer_leaves_files_that_open_without_a_warning(
    path: Path, start: Start, here: Environment
) -> None:
    writer = start(WRITE, path, 0, 1_000_000)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.kill()
    writer.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with PlanDatabase.open(path, read_only=True) as database:
            assert check(database, here) > 0
        with PlanDatabase.open(path) as database:
            assert check(database, here) > 0
