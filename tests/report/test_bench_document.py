"""What a bench says of a race: intervals, noise, what pays after how many calls, few samples."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from plantune.devices.machine import cpu_environment
from plantune.measure.machine_state import State
from plantune.measure.racing.race import Detail, Race
from plantune.measure.timing import Timing, ratio_interval
from plantune.plans.verdict import Interval
from plantune.report.bench import SAMPLES_KEPT, bench_document
from plantune.report.bench_text import (
    Unit,
    advice,
    details,
    headline,
    other_ratios,
    parts_table,
    queued_table,
    single_table,
)

NOISY = Timing(tuple(1000.0 + 200 * (number % 5) for number in range(30)))


def flat(ms: float, samples: int = 30) -> Timing:
    return Timing((1e3 * ms,) * samples)


def detail(same: Timing, fresh: Timing, promise: str = "live", build_s: float = 1.0) -> Detail:
    return Detail(promise, build_s, False, False, {"same": same, "fresh": fresh}, {})


def race(**details: Detail) -> Race:
    timings = {name: route.queued["fresh"] for name, route in details.items()}
    others = [name for name in timings if not name.startswith("plantune")]
    best = min(others, key=lambda name: timings[name].median_us)
    ratio = ratio_interval(timings["plantune"], timings[best])
    return Race(timings, {}, best, ratio, {}, "fresh", 64, details, [1500, 1980, 1980])


@pytest.fixture
def document() -> dict:
    ran = race(
        plantune=detail(flat(1.0), flat(2.0), build_s=3.0),
        eager=detail(flat(4.0), flat(4.0), build_s=0.5),
        torchscript=detail(flat(4.0), flat(2.5), "frozen", build_s=1.0),
        slow=detail(flat(9.0), flat(9.0)),
    )
    return bench_document(ran, cpu_environment(), {}, search_s=60.0)


def rows(document: dict) -> dict:
    return {row["name"]: row for row in document["rows"]}


def test_the_headline_and_what_stands_beside_it(document: dict) -> None:
    assert (document["best_baseline"], document["ratio"]) == ("torchscript", pytest.approx(0.8))
    assert (document["best_live_baseline"], document["ratio_live"]) == ("eager", pytest.approx(0.5))
    assert document["ratios"] == {
        "same": {"best_baseline": "eager", "ratio": 0.25},
        "fresh": {"best_baseline": "torchscript", "ratio": 0.8},
    }
    assert document["sm_mhz"] == {"low": 1500, "median": 1980, "high": 1980}
    assert other_ratios(document) == [
        "the same input in each call: 0.250 of eager's time",
        "64 inputs in turns: 0.800 of torchscript's time",
        "torchscript is frozen; against the best live route: 0.500 of eager's time",
    ]


def test_what_building_and_searching_cost_is_paid_by_calls(document: dict) -> None:
    found = {name: row["paid_after_calls"] for name, row in rows(document).items()}
    # 62.5 s more than eager, 2 ms saved a call; 0.5 s and 1.5 ms.
    assert found == {"plantune": 31_250, "eager": None, "torchscript": 334, "slow": None}
    assert [row["search_s"] for row in document["rows"]] == [60.0, None, None, None]


def test_a_wide_row_is_marked(document: dict) -> None:
    assert "~" not in queued_table(document)
    ran = race(plantune=detail(NOISY, NOISY), eager=detail(flat(4.0), flat(4.0)))
    noisy = bench_document(ran, cpu_environment(), {})
    assert [row["noisy"] for row in noisy["rows"]] == [True, False]
    first, last = queued_table(noisy).splitlines()[1], queued_table(noisy).splitlines()[-1]
    assert first.endswith("~")
    assert last.startswith("~ noisy")


def test_few_samples_are_kept_from_the_whole_run() -> None:
    many = Timing(tuple(map(float, range(1, 1001))))
    ran = race(plantune=detail(many, many), eager=detail(many, many))
    document = bench_document(ran, cpu_environment(), {})
    kept = rows(document)["eager"]["samples_us"]["queued"]["same"]
    assert len(kept) <= SAMPLES_KEPT
    assert (kept[0], kept[-1]) == (1.0, pytest.approx(1000, rel=0.05))
    assert len(json.dumps(document)) < 10_000


def test_the_interval_of_a_median() -> None:
    timing = Timing(tuple(map(float, range(1, 101))))
    low, high = timing.interval_us
    assert (low, high) == (40.0, 61.0)
    assert Timing((5.0,)).interval_us == (5.0, 5.0)
    assert timing.percentile_us(99) == 99.0


@pytest.mark.parametrize(
    ("times_ms", "texts"),
    [
        ([2.874, 11.3], ["2.87 ms", "11.30 ms"]),
        ([0.0634, 0.197], ["63.4 us", "197.0 us"]),
        ([197.2, 1310.0], ["197 ms", "1310 ms"]),
    ],
)
def test_digits_are_equal_and_three_of_the_shortest(times_ms: list, texts: list) -> None:
    unit = Unit(times_ms)
    assert [f"{unit.text(ms)} {unit.name}" for ms in times_ms] == texts


def test_host_and_gpu_have_columns_where_they_were_timed() -> None:
    timing = flat(2.0)
    kinds = {"same": timing, "fresh": timing}
    one = Detail("live", 12.3, True, False, kinds, kinds, 15.0, 40.0)
    ran = Race({"plantune": timing}, {}, None, None, details={"plantune": one})
    told = single_table(bench_document(ran, cpu_environment(), {}, search_s=60.0))
    assert told is not None
    head, row, few = told.splitlines()
    assert few == "p99 is the slowest of 30 calls here; a larger --budget times more"
    assert "host   GPU" in head
    cells = "2.00 2.00 2.00 2.00 0.01 0.04 12.3 + 60 s (cached) -"
    assert " ".join(row.split()[1:]) == cells


def test_where_calls_are_many_their_p99_is_one() -> None:
    timing = flat(2.0, samples=100)
    kinds = {"same": timing, "fresh": timing}
    one = replace(detail(timing, timing), latency=kinds)
    ran = Race({"eager": timing}, {}, None, None, details={"eager": one})
    told = single_table(bench_document(ran, cpu_environment(), {}))
    assert told is not None
    assert "slowest" not in told


def test_a_race_without_routes_has_a_document() -> None:
    ran = Race({"plantune": flat(1.0)}, {}, None, None)
    document = bench_document(ran, cpu_environment(), {})
    assert (document["ratio"], document["interval"]) == (None, None)
    assert single_table(document) is None
    assert headline(ran, "program") == "runs as plantune's plan: no other route ran beside it"
    assert details(ran, "program") == []


def test_the_headline_and_its_interval_are_of_the_same_numbers() -> None:
    one = flat(1.0)
    ran = Race({"plantune": one, "compile-x": one}, {}, "compile-x", Interval(0.5, 0.4, 0.6))
    assert headline(ran, "program") == (
        "runs as plantune's plan, 2.00 times faster than compile-x (the fastest other route)"
    )
    told = ["0.500 of compile-x's time, 95 % interval 0.400 to 0.600"]
    assert details(ran, "program") == told


def test_the_headline_compares_with_eager_and_with_the_best() -> None:
    ran = race(
        plantune=detail(flat(2.0), flat(2.0)),
        eager=detail(flat(4.0), flat(4.0)),
        compiled=detail(flat(1.0), flat(1.0)),
    )
    assert headline(ran, "program") == (
        "runs as plantune's plan, 2.00 times faster than eager, but 2.00 times slower than "
        "compiled (the fastest other route)"
    )
    assert details(ran, "program")[:2] == [
        "0.500 of eager's time, 95 % interval 0.500 to 0.500",
        "2.000 of compiled's time, 95 % interval 2.000 to 2.000",
    ]


def test_a_plan_that_eager_runs_is_compared_as_it_runs() -> None:
    ran = race(plantune=detail(flat(4.0), flat(4.0)), eager=detail(flat(4.0), flat(4.0)))
    told = "runs as eager, as fast as eager called directly within the noise"
    assert headline(ran, "eager") == told


def test_phases_add_up_to_the_whole_beside_the_peak_of_memory() -> None:
    parts = {"forward": 700.0, "backward": 1000.0}
    ran = race(
        plantune=replace(detail(flat(2.0), flat(2.0)), parts_us=parts),
        eager=detail(flat(4.0), flat(4.0)),
    )
    ran = replace(ran, peaks_mib={"plantune": 41.6}, difference=0.00125)
    document = bench_document(ran, cpu_environment(), {})
    (row, _) = document["rows"]
    assert row["phases_ms"] == {"forward": 0.7, "backward": 1.0, "other": pytest.approx(0.3)}
    titles, ours = parts_table(document).splitlines()
    assert titles.split() == ["phases,", "ms", "forward", "backward", "other", "whole"]
    assert ours.split() == ["plantune", "0.70", "1.00", "0.30", "2.00"]
    first, second = queued_table(document).splitlines()[1:]
    assert first.split()[-1] == "42"
    assert second.split()[-1] == "-"
    assert "outputs of training and inference differ by 0.0013 of the largest" in other_ratios(
        document
    )


def test_without_phases_or_memory_there_are_no_columns_for_them(document: dict) -> None:
    assert parts_table(document) is None
    assert "peak" not in queued_table(document)


@pytest.mark.parametrize(
    ("high", "words"),
    [
        (1.1, "as fast as x (the fastest other route) within the noise"),
        (1.2, "neither clearly faster nor slower than x (the fastest other route)"),
    ],
)
def test_what_varies_too_much_is_no_tie(high: float, words: str) -> None:
    one = flat(1.0, samples=5)
    ran = Race({"plantune": one, "x": one}, {}, "x", Interval(1.0, 0.95, high))
    assert headline(ran, "program") == f"runs as plantune's plan, {words}"


def test_too_few_rounds_are_no_tie() -> None:
    one = flat(1.0, samples=3)
    ran = race(plantune=detail(one, one), eager=detail(one, one))
    assert "neither clearly faster nor slower than eager" in headline(ran, "program")
    assert details(ran, "program")[-1] == "the time was up after 3 rounds"


def test_what_decides_nothing_says_why_and_what_to_do() -> None:
    ran = race(plantune=detail(NOISY, NOISY), fast=detail(NOISY, NOISY, "frozen"))
    ran = replace(ran, ratio=Interval(1.36, 0.11, 16.2))
    busy = State(2, others=2.0, names=("python",))
    told = advice(bench_document(ran, cpu_environment(), {}, machine=busy), ran, 10.0)
    assert told == [
        "the machine was not quiet: other processes took 2.0 of 2 cores (python)",
        "measure again when nothing else runs, or longer with fewer routes: "
        "--budget 60 --peers fast",
    ]
    quiet = replace(ran, ratio=Interval(1.0, 0.99, 1.02))
    assert advice(bench_document(quiet, cpu_environment(), {}, machine=State(2)), quiet, 10.0) == []
