"""The sentence that says what runs a network and how fast, and the numbers after it."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from plantune.plans.plan import EAGER, PROGRAM
from plantune.plans.raced_routes import NO_COMPILED, UNKNOWN
from plantune.plans.standing import Standing, loss_text

WON = {"ratio": 0.667, "ratio_low": 0.65, "ratio_high": 0.69, "baseline": "torchscript"}
BESIDE_EAGER = {"eager_ratio": 0.49, "eager_ratio_low": 0.47, "eager_ratio_high": 0.52}
RIVALS = {"rivals": "eager,torchscript,compile-default"}


def lost(low: float, ratio: float, high: float, to: str = EAGER) -> dict[str, Any]:
    """The evidence of a plan that did not beat a route."""
    ends = {"ratio": ratio, "ratio_low": low, "ratio_high": high}
    unbeaten = {f"unbeaten_{name}": value for name, value in ends.items()}
    return {**ends, "baseline": to, **unbeaten, "unbeaten": to, **RIVALS}


def said(route: str, evidence: dict[str, Any]) -> list[str]:
    standing = Standing.of(route, evidence)
    return [standing.headline(), *standing.details()]


def test_a_plan_that_won_is_compared_with_eager_and_with_the_best() -> None:
    assert said(PROGRAM, {**WON, **BESIDE_EAGER, **RIVALS}) == [
        "runs as plantune's plan, 2.04 times faster than eager and 1.50 times faster than "
        "torchscript (the fastest other route)",
        "0.490 of eager's time, 95 % interval 0.470 to 0.520",
        "0.667 of torchscript's time, 95 % interval 0.650 to 0.690",
    ]


def test_where_eager_was_the_best_it_is_named_once() -> None:
    evidence = {**BESIDE_EAGER, "ratio": 0.49, "ratio_low": 0.47, "ratio_high": 0.52}
    assert said(PROGRAM, {**evidence, "baseline": EAGER, "rivals": EAGER}) == [
        "runs as plantune's plan, 2.04 times faster than eager",
        "0.490 of eager's time, 95 % interval 0.470 to 0.520",
        NO_COMPILED,
    ]


def test_a_faster_compiler_is_in_the_sentence() -> None:
    better = {"ratio": 1.2, "ratio_low": 1.1, "ratio_high": 1.3, "baseline": "compile-default"}
    first, *rest = said(
        PROGRAM,
        {**better, **BESIDE_EAGER, **RIVALS, "lost_to": "compile-default", "loss": 1.2},
    )
    assert first == (
        "runs as plantune's plan, 2.04 times faster than eager, but 1.20 times slower than "
        "compile-default (the fastest other route)"
    )
    assert not [line for line in rest if "was faster" in line]


@pytest.mark.parametrize(
    ("interval", "why"),
    [
        (
            (0.95, 0.98, 1.02),
            "no plan was clearly faster (best: 0.980 of its time, 95 % interval 0.950 to 1.020)",
        ),
        (
            (0.137, 0.47, 1.607),
            "times varied too much to show that a plan is faster (best: 0.470 of its time, 95 % "
            "interval 0.137 to 1.607)",
        ),
        (
            (1.1, 1.2, 1.3),
            "every plan was slower (best: 1.200 of its time, 95 % interval 1.100 to 1.300)",
        ),
    ],
)
def test_a_plan_that_did_not_win_says_by_its_numbers_why(
    interval: tuple[float, float, float], why: str
) -> None:
    assert said(EAGER, lost(*interval)) == [f"runs as eager: {why}"]


def test_another_route_of_the_framework_is_compared_with_eager() -> None:
    beside = {"eager_ratio": 0.763, "eager_ratio_low": 0.75, "eager_ratio_high": 0.78}
    first, *rest = said("torchscript-traced", {**lost(0.95, 0.98, 1.02, "torchscript"), **beside})
    assert first == (
        "runs as torchscript-traced, 1.31 times faster than eager: no plan was clearly faster "
        "(best: 0.980 of torchscript's time, 95 % interval 0.950 to 1.020)"
    )
    assert rest == ["0.763 of eager's time, 95 % interval 0.750 to 0.780"]


def test_the_frameworks_kernels_in_one_graph_go_by_a_name_of_their_own() -> None:
    first, *_ = said(PROGRAM, {**lost(1.0, 1.02, 1.04, "cuda-graph"), **BESIDE_EAGER})
    assert first.startswith(
        "runs as the framework's kernels in one CUDA graph, 2.04 times faster than eager: no plan "
        "was clearly faster (best: 1.020 of its time"
    )


@pytest.mark.parametrize(
    ("evidence", "caveat"),
    [
        ({"rivals": "compile-default"}, None),
        ({"rivals": "x"}, NO_COMPILED),
        ({}, UNKNOWN),
    ],
)
def test_a_plan_of_before_has_its_ratio_alone(evidence: dict[str, Any], caveat: str | None) -> None:
    """And is not said to have met a compiler that it did not meet."""
    first, *rest = said(PROGRAM, {"ratio": 0.5, "baseline": "x", **evidence})
    assert first == "runs as plantune's plan, 2.00 times faster than x (the fastest other route)"
    assert rest == ["0.500 of x's time", *([] if caveat is None else [caveat])]


def test_a_plan_of_before_lost_to_a_route_that_is_not_known() -> None:
    old = {"ratio": 0.9, "ratio_low": 0.8, "ratio_high": 0.95, "baseline": "compile-frozen"}
    assert said(EAGER, {**old, **RIVALS})[0] == (
        "runs as eager: no plan was clearly faster (best: 0.900 of compile-frozen's time, 95 % "
        "interval 0.800 to 0.950)"
    )


@pytest.mark.parametrize(
    ("route", "why", "text"),
    [
        (PROGRAM, None, "runs as plantune's plan: it was not raced"),
        (EAGER, None, "runs as eager: no plan was raced"),
        (EAGER, "5 s were too short", "runs as eager: 5 s were too short"),
    ],
)
def test_without_a_race_nothing_is_compared(route: str, why: str | None, text: str) -> None:
    standing = Standing.of(route, {"predicted_ms": 1.0, "ratio": "x", "eager_ratio": None})
    assert (standing.headline(why), standing.details()) == (text, [])


def test_a_loss_to_torch_compile_is_told() -> None:
    evidence = {**lost(1.1, 1.2, 1.3), "lost_to": "compile-default", "loss": 2.0}
    told = "compile-default was faster: a call takes 2.00 of its time"
    assert loss_text(evidence) == told
    assert said(EAGER, evidence)[-1] == told
    assert loss_text({"lost_to": "compile-default"}) is None


@pytest.mark.parametrize("route", [PROGRAM, EAGER, "torchscript-traced"])
def test_no_sentence_contradicts_an_interval(route: str) -> None:
    """Whatever the numbers: who is called faster is below 1 in all of the interval."""
    draw = random.Random(route)
    for _ in range(500):
        low, ratio, high = sorted(2 ** draw.uniform(-1, 1) for _ in range(3))
        evidence = lost(low, ratio, high) if route != PROGRAM else BESIDE_EAGER | RIVALS
        if route == PROGRAM:
            evidence |= {"eager_ratio": ratio, "eager_ratio_low": low, "eager_ratio_high": high}
        text = " ".join(said(route, evidence))
        shown = re.search(r"interval ([\d.]+) to ([\d.]+)", text)
        assert shown is not None
        ends = float(shown[1]), float(shown[2])
        assert ("times faster" in text) == (ends[1] < 1 and route == PROGRAM)
        assert ("slower than eager" in text and "nor" not in text) == (
            ends[0] > 1 and route == PROGRAM
        )
        assert ("every plan was slower" in text) == (ends[0] > 1 and route != PROGRAM)
