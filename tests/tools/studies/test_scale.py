"""tools/studies/scale computes what follows from its costs, and replays what was recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "studies" / "scale"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOL))
    yield __import__("simulate"), __import__("replay")
    for name in ("simulate", "replay"):
        sys.modules.pop(name, None)


def jobs_of(replay, count, seconds=1.0):
    return [replay.Job(seconds, 10.0 + number, False) for number in range(count)]


def test_without_a_database_equal_jobs_keep_all_slots_busy(study):
    simulate, replay = study
    found = simulate.simulate(jobs_of(replay, 64), 16, simulate.FREE)
    assert found.efficiency == pytest.approx(1.0)
    assert found.seconds == pytest.approx(4.0)
    assert found.best_s == pytest.approx(1.0)


def test_the_lock_of_the_study_limits_how_many_are_claimed(study):
    """However many workers there are, where each claims a batch of one size."""
    simulate, replay = study
    simulate.MOST = 0
    costs = simulate.Costs(0.1, 0.0, 0.0, 0.0)
    found = [simulate.simulate(jobs_of(replay, 6400), workers, costs) for workers in (512, 1024)]
    assert [run.claims_per_s for run in found] == pytest.approx([10.0, 10.0], rel=0.05)
    assert all(run.locked == pytest.approx(1.0, abs=0.05) for run in found)


def test_a_host_claims_a_part_of_its_share_so_that_the_lock_is_asked_for_less(study):
    simulate, replay = study
    costs = simulate.Costs(0.1, 0.0, 0.0, 0.0)
    more = simulate.simulate(jobs_of(replay, 6400), 512, costs)
    simulate.MOST = 0
    assert more.seconds < simulate.simulate(jobs_of(replay, 6400), 512, costs).seconds


def test_a_host_tells_and_claims_one_after_the_other(study):
    simulate, replay = study
    simulate.MOST = 0
    costs = simulate.Costs(0.0, 0.25, 0.25, 0.0)
    alone = simulate.simulate(jobs_of(replay, 100), 1, costs, slots=1)
    assert alone.claims_per_s == pytest.approx(1 / (4 * 1.25 + 0.25), rel=0.02)
    eight = simulate.simulate(jobs_of(replay, 800), 8, costs)
    assert eight.claims_per_s == pytest.approx(1 / (16 * 0.25 + 0.25), rel=0.25)


def test_what_was_recorded_is_replayed_with_crashes_and_stragglers(study):
    _, replay = study
    recorded = json.loads(replay.RECORDED.read_text())
    seconds = {pair[0] for pair in recorded["outcomes"]}
    jobs = replay.Recording(2000, slower=2.0, crashes=0.1, stragglers=0.05).jobs()
    assert jobs == replay.Recording(2000, slower=2.0, crashes=0.1, stragglers=0.05).jobs()
    plain = [job for job in jobs if round(job.seconds / 2.0, 6) in seconds]
    assert 0.03 < 1 - len(plain) / len(jobs) < 0.07
    assert 0.08 < sum(job.crashes for job in jobs) / len(jobs) < 0.12
    assert all(job.busy_s == job.seconds + 3.0 * job.crashes for job in jobs)
