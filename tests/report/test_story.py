"""What `explain` says of a step: its own candidates, its parts, and fusions with its neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Rejected
from plantune.graph.fusions import all_fusions
from plantune.graph.partition import alternatives
from plantune.graph.step import Step, make_step
from plantune.kernels.family import Candidate
from plantune.plans.step_times import StepTimes
from plantune.plans.workload import Workload
from plantune.report.covers import ACROSS, WIDER, OtherCover
from plantune.report.steps import StepStory
from plantune.report.story import WIDER_SHOWN, story_text, summary_table, verdict

CHOSEN = Candidate("framework", Attrs(layout="nchw"))
SLOWER = Candidate("framework", Attrs(layout="nhwc"))
WRONG = Candidate("gemm", Attrs(layout="nhwc"))


def taking(us: float) -> Measured:
    return Measured(us, us, us, 1, 1e-7, 1e-6, True)


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    """An op, and two fusions that begin with it."""
    graph = Workload("se_resnet9_fixup", 1).graph
    longest = max(alternatives(graph, tuple(all_fusions())), key=lambda step: len(step.nodes))
    names = [node.name for node in longest.nodes]
    return [make_step(graph, names[:size]) for size in (1, 2, 3)]


@pytest.fixture
def story(steps: list[Step]) -> StepStory:
    trials = {
        CHOSEN: taking(100.0),
        SLOWER: taking(125.0),
        WRONG: Rejected("numerics", "7 instead\nof 8"),
    }
    return StepStory(steps[0], CHOSEN, trials, 50.0, 80.0)


def lines(story: StepStory, *, whole: bool = False) -> list[str]:
    return story_text(story, whole=whole, predicted=False, width=None).splitlines()


def test_the_others_lose_for_a_reason(story: StepStory) -> None:
    told = lines(story)
    assert "the runner-up is 25.0 % slower; 50.0 % of the roofline, 50 us" in told[0]
    assert told[2].split() == [
        "framework,",
        "other",
        "configs",
        "1",
        "125",
        "us",
        "25.0",
        "%",
        "slower",
    ]
    assert told[3].endswith("wrong numbers: 7 instead of 8")


def test_the_whole_has_every_candidate(story: StepStory) -> None:
    told = lines(story, whole=True)
    assert any(line.split()[:3] == ["*", "framework", "layout=nchw"] for line in told)
    assert "  rejected: gemm layout=nhwc: wrong numbers: 7 instead of 8" in told


@pytest.mark.parametrize(
    ("relation", "instead_us", "words"),
    [
        (WIDER, 140.0, "instead of 2 steps in 140 us"),
        (WIDER, None, "no times are stored for the 2 steps that it would replace"),
        (ACROSS, None, "would split one of 2 steps of the plan"),
    ],
)
def test_a_fusion_is_set_beside_what_it_would_replace(
    story: StepStory, steps: list[Step], relation: str, instead_us: float | None, words: str
) -> None:
    cover = OtherCover(steps[1], {CHOSEN: taking(150.0)}, relation, 2, instead_us)
    assert lines(replace(story, covers=(cover,)))[-1].endswith(f"150 us  {words}")


def test_more_fusions_are_counted(story: StepStory, steps: list[Step]) -> None:
    covers = tuple(
        OtherCover(steps[2], {CHOSEN: taking(150.0 + n)}, WIDER, 2, 140.0)
        for n in range(WIDER_SHOWN + 2)
    )
    told = lines(replace(story, covers=covers))
    assert sum("fused: " in line for line in told) == WIDER_SHOWN
    assert "2 other fusions with its neighbours" in told[-1]


def test_without_a_time_there_is_an_estimate(story: StepStory) -> None:
    unknown = replace(story, trials={})
    assert (
        verdict(unknown)
        == "framework layout=nchw; no time of it came with the plan or is stored here"
    )
    row = summary_table([unknown], 160.0, None).splitlines()[1]
    assert "~80 us" in row
    assert "50.0 %" in row


def test_the_times_of_the_plan_stand_where_none_are_stored(story: StepStory) -> None:
    other = Candidate("onednn_conv", Attrs(layout="nhwc", prepack=True))
    brought = replace(story, trials={}, kept=StepTimes(100.0, 50.0, (other, 125.0)))
    assert (brought.chosen_us, brought.runner_up, brought.margin) == (100.0, (other, 125.0), 0.25)
    assert "100 us; the runner-up is 25.0 % slower; 50.0 % of the roofline" in verdict(brought)
    assert brought.to_json()["runner_up"] == {**other.to_json(), "median_us": 125.0}
