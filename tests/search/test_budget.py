"""What each stage has of a budget, by a clock that the test moves."""

from __future__ import annotations

import pytest

from plantune.measure.timing import Effort
from plantune.search.budget import Budget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(
    ("seconds", "measuring", "ranking"), [(10, 5.0, 6.5), (60, 36.0, 45.0), (300, 275.0, 285.0)]
)
def test_what_is_long_goes_to_measuring(clock, seconds, measuring, ranking):
    budget = Budget(seconds, clock)
    assert budget.left_for("measuring") == pytest.approx(measuring)
    assert budget.left_for("ranking") == pytest.approx(ranking)
    assert budget.left_for("racing") == budget.left_s == seconds
    clock.now += ranking
    assert budget.left_for("measuring") == 0
    assert budget.left_for("racing") == pytest.approx(seconds - ranking)


def test_a_network_that_takes_long_has_more_for_its_race(clock):
    assert Budget(60, clock, race_s=20.0).left_for("ranking") == pytest.approx(40)
    assert Budget(60, clock, race_s=900.0).left_for("ranking") == pytest.approx(24)


def test_what_is_short_goes_to_the_race(clock):
    budget = Budget(5, clock)
    assert budget.left_for("ranking") == pytest.approx(2)
    assert budget.left_for("measuring") == pytest.approx(1.25)


@pytest.mark.parametrize("seconds", [5, 15, 60, 300])
def test_nothing_runs_for_a_fifth_longer_than_it_may(clock, seconds):
    budget = Budget(seconds, clock)
    ends = [budget.cut_at(stage) - clock.now for stage in ("measuring", "ranking", "racing")]
    assert ends == sorted(ends)
    assert ends[-1] <= 1.2 * seconds
    # What is cut off leaves something to what follows.
    assert ends[0] < budget.left_for("ranking")
    assert ends[1] < budget.left_for("racing")


def test_what_was_spent_before_counts(clock):
    budget = Budget(60, clock, spent_s=2.5)
    clock.now += 1
    assert (budget.spent_s, budget.left_s) == (3.5, 56.5)
    assert budget.stages_s == {"preparing": 3.5}


def test_an_effort_ends_with_its_phase(clock):
    budget = Budget(10, clock)
    clock.now += 2
    effort = budget.limited(Effort(budget_s=1.0), "ranking")
    assert (effort.budget_s, effort.until) == (1.0, pytest.approx(106.5))
    assert effort.cut_at == pytest.approx(budget.cut_at("ranking"))


def test_a_race_begins_nothing_in_its_last_quarter(clock):
    effort = Budget(60, clock).limited(Effort(), "racing")
    assert effort.until == pytest.approx(100 + 60 - 15 / 4)
    assert effort.cut_at > 160


def test_each_phase_is_told_in_seconds_however_often_it_is_entered(clock):
    budget = Budget(60, clock)
    for stage, seconds in (("measuring", 5), ("ranking", 3), ("measuring", 2), ("racing", 1)):
        clock.now += 1
        budget.enter(stage)
        clock.now += seconds - 1
    clock.now += 1
    assert budget.stages_s == {"preparing": 1, "measuring": 7, "ranking": 3, "racing": 1}
    assert sum(budget.stages_s.values()) == budget.spent_s
