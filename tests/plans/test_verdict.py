"""Who is faster, and the words and digits that say so."""

from __future__ import annotations

import random

import pytest

from plantune.measure.timing import Timing, ratio_interval
from plantune.plans.verdict import (
    FASTER,
    SLOWER,
    TIE,
    UNDECIDED,
    Interval,
    compared,
    number,
    part_text,
)


@pytest.mark.parametrize(
    ("found", "verdict", "said"),
    [
        (Interval(0.49, 0.47, 0.52), FASTER, "2.04 times faster than eager"),
        (Interval(0.08, 0.07, 0.09), FASTER, "12.5 times faster than eager"),
        (Interval(1.2, 1.1, 1.3), SLOWER, "1.20 times slower than eager"),
        (Interval(1.01, 0.97, 1.05), TIE, "as fast as eager within the noise"),
        (Interval(0.47, 0.137, 1.607), UNDECIDED, "neither clearly faster nor slower than eager"),
    ],
)
def test_what_is_said_is_what_was_decided(found: Interval, verdict: str, said: str) -> None:
    assert (found.verdict, compared(found, "eager")) == (verdict, said)


def test_a_part_of_a_time_has_its_interval_if_one_is_known() -> None:
    assert part_text(Interval(0.49, 0.47, 0.52), "its") == (
        "0.490 of its time, 95 % interval 0.470 to 0.520"
    )
    assert part_text(Interval.without_range(0.5), "eager's") == "0.500 of eager's time"


@pytest.mark.parametrize(("value", "text"), [(0.99987, "0.9999"), (1.0004, "1.0004"), (1, "1.000")])
def test_digits_do_not_round_a_win_to_a_tie(value: float, text: str) -> None:
    assert number(value) == text


def test_a_small_win_is_more_than_one_time_faster() -> None:
    assert compared(Interval(0.998, 0.997, 0.9999), "x") == "1.002 times faster than x"
    assert compared(Interval(1.0004, 1.0001, 1.002), "x") == "1.0004 times slower than x"


def test_an_interval_has_its_ratio_inside() -> None:
    draw = random.Random(0)
    for rounds in (1, 2, 3, 5, 8):
        for _ in range(20):
            ours, theirs = (
                Timing(tuple(100 * 3 ** draw.random() for _ in range(rounds))) for _ in range(2)
            )
            found = ratio_interval(ours, theirs, resamples=60)
            assert found.low <= found.ratio <= found.high
