"""Plans with what they are to a search: one value, in the order in which they are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plantune.plans.problem import Problem
from plantune.search.contenders.contender import (
    COVER,
    FRAMEWORK,
    GUESS,
    HAND,
    IN_USE,
    KNOWN,
    NEAREST,
    STORED,
    Contenders,
    labelled,
)
from plantune.search.contenders.proposal import is_less_than_the_guess
from plantune.search.sought import Sought


@pytest.fixture
def sought(graph):
    return Sought(graph, Problem.of(graph, "cpu", "small"))


@pytest.fixture
def plans(sought):
    """The framework's, the one by hand, and the framework's in channels_last."""
    plain, channels_last = sought.of_framework
    return plain, sought.by_hand(("winograd", "patch_conv")), channels_last


def test_plans_that_choose_the_same_are_one_with_the_labels_of_both(plans):
    plain, by_hand, _ = plans
    again = replace(plain, choices=plain.choices[::-1], origin="measured")
    found = Contenders.of(
        [*labelled(FRAMEWORK, [plain]), *labelled(HAND, [by_hand, None]), *labelled(COVER, [again])]
    )
    assert found.plans() == [plain, by_hand]
    assert found.plans(COVER) == found.plans(FRAMEWORK) == [plain]
    assert found.first(HAND) == by_hand
    assert found.first(GUESS) is None


def test_a_mark_is_set_where_a_plan_chooses_the_same(plans):
    plain, by_hand, other = plans
    found = Contenders.of(labelled(KNOWN, plans))
    marked = found.marked(IN_USE, [replace(other, origin="predicted"), None])
    assert marked.plans(IN_USE) == [other]
    assert marked.plans(KNOWN) == [plain, by_hand, other]
    assert found.plans(IN_USE) == []


class TestBefore:
    """What a plan must clearly beat to take its place."""

    def test_the_one_that_is_stored_and_the_nearest(self, plans):
        _, by_hand, other = plans
        found = Contenders.of(labelled(KNOWN, plans)).marked(NEAREST, [by_hand])
        assert found.marked(IN_USE, [other]).marked(STORED, [other]).before == [other, by_hand]

    def test_a_guess_that_calls_use_only_where_nothing_is_known(self, plans):
        plain, by_hand, _ = plans
        found = Contenders.of(labelled(GUESS, [by_hand])).marked(IN_USE, [by_hand])
        assert found.before == [by_hand]
        known = Contenders.of([*found.items, *labelled(KNOWN, [plain])])
        assert known.marked(NEAREST, [plain]).before == [plain]

    def test_nothing_where_nothing_was_there(self, plans):
        assert Contenders.of(labelled(COVER, plans)).before == []


def test_the_framework_alone_takes_no_guesss_place(sought, plans, monkeypatch):
    plain, by_hand, other = plans
    assert not is_less_than_the_guess(sought, plain, [plain])
    guessing = Sought(sought.graph, sought.problem)
    guessing.__dict__["guess"] = by_hand
    assert is_less_than_the_guess(guessing, plain, [plain, other])
    assert not is_less_than_the_guess(guessing, plain, [plain, by_hand])
    assert not is_less_than_the_guess(guessing, other, [other])
