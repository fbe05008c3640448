"""Which stored trials a search takes as known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plantune.base.outcome import Measured, Rejected
from plantune.devices.machine import Environment
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.planner.candidates import step_candidates
from plantune.search.measuring import StoredTrials

COLD = Measured(10.0, 9.0, 11.0, 9, 0.0, 1.0, True, cache="cold")


@pytest.mark.parametrize(
    ("outcome", "known"),
    [
        (COLD, True),
        (replace(COLD, cache="warm"), False),
        (Rejected("numerics", "it is wrong"), True),
        (Rejected("noisy", "others ran"), False),
    ],
)
def test_on_a_cpu_what_was_timed_with_warm_caches_is_measured_again(graph, space, outcome, known):
    candidate = next(iter(step_candidates(graph, space)))
    environment = Environment("cpu", "a CPU", "digest", 2, "2.13", "0.1.0", "none", "Linux")
    with PlanDatabase.in_memory() as database:
        trials = StoredTrials(database, environment, fresh=False)
        trials.keep(candidate.step, candidate.candidate, outcome)
        assert (candidate.candidate in trials.known(candidate.step)) == known
