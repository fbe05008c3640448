from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Rejected
from plantune.graph.fusions import all_fusions
from plantune.graph.partition import alternatives
from plantune.graph.step import Step, make_step
from plantune.kernels.family import Candidate
from plantune.plans.workload import Workload
from plantune.report.covers import (
    ACROSS,
    PART,
    WIDER,
    Trials,
    cheapest_parts,
    names_of,
    other_covers,
)

FRAMEWORK = Candidate("framework", Attrs(layout="nchw"))


def taking(us: float) -> Trials:
    return {FRAMEWORK: Measured(us, us, us, 1, 0.0, 0.0, True)}


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    """Growing beginnings of the longest fusion of the network."""
    graph = Workload("se_resnet9_fixup", 1).graph
    longest = max(alternatives(graph, tuple(all_fusions())), key=lambda step: len(step.nodes))
    names = [node.name for node in longest.nodes]
    return [make_step(graph, names[:size]) for size in (1, 2, 3)] + [
        make_step(graph, names[1:2]),
        make_step(graph, names[2:3]),
        make_step(graph, names[1:3]),
    ]


def test_parts_wider_and_crossing_steps_are_told_apart(steps: list[Step]) -> None:
    one, two, three, second, third, _ = steps
    planned = [(two, 5.0), (third, 1.0)]
    tried = [(one, taking(2.0)), (three, taking(7.0)), (second, {}), (third, taking(1.0))]
    found = other_covers(two, planned, tried)
    assert [(cover.step, cover.relation) for cover in found] == [(one, PART), (three, WIDER)]
    wider = found[1]
    assert (wider.replaces, wider.instead_us) == (2, 6.0)
    assert wider.to_json()["measured"][0]["median_us"] == 7.0


def test_a_step_that_splits_a_neighbour_is_not_compared(steps: list[Step]) -> None:
    one, two, _, _, third, last_two = steps
    (cover,) = other_covers(third, [(two, 5.0), (third, 1.0)], [(last_two, taking(9.0))])
    assert (cover.relation, cover.replaces, cover.instead_us) == (ACROSS, 2, None)
    assert names_of(one).isdisjoint(names_of(cover.step))


def test_the_cheapest_parts_cover_the_step_once(steps: list[Step]) -> None:
    one, two, three, second, third, last_two = steps
    trials = [(one, 3.0), (second, 4.0), (third, 5.0), (two, 6.0), (last_two, 20.0)]
    covers = other_covers(three, [(three, 1.0)], [(step, taking(us)) for step, us in trials])
    assert [cover.step for cover in cheapest_parts(three, covers)] == [two, third]


def test_without_a_time_for_each_op_there_are_no_parts(steps: list[Step]) -> None:
    one, _, three, second, third, _ = steps
    failed = {FRAMEWORK: Rejected("noisy", "busy")}
    tried = [(one, taking(3.0)), (second, taking(4.0)), (third, failed)]
    assert cheapest_parts(three, other_covers(three, [(three, 1.0)], tried)) == ()
