"""bench: the table, the JSON of the design, the plot, and what is refused before it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.machine import cpu_environment
from plantune.errors import WrongResult
from plantune.measure.machine_state import Machine, State
from plantune.measure.racing.race import Race
from plantune.measure.racing.routes import framework_routes
from plantune.measure.subject import Raced
from plantune.plans.plan import Plan
from plantune.plans.workload import Workload
from plantune.report.bench import bench_document

from .conftest import FakeWorker, Run, changed, object_of, timing

PEERS = list(framework_routes("cpu"))


@pytest.fixture(autouse=True)
def stored(store: Callable[..., int], plan: Plan, worker: FakeWorker) -> int:
    return store(plan)


def test_the_json_is_that_of_the_design(run: Run) -> None:
    result = run("bench", "--batch", 1, "--json")
    assert result.exit_code == 0
    data = object_of(result)
    assert list(data)[:5] == ["environment", "workload", "rows", "best_baseline", "ratio"]
    assert data["environment"] == cpu_environment().to_json()
    assert data["workload"] == {
        "model": "se_resnet9_fixup",
        "arch": "cpu",
        "batch": 1,
        "mode": "infer",
        "dtype": "float32",
        "in_channels": 3,
    }
    assert [row["name"] for row in data["rows"]] == ["plantune", "plantune-frozen", *PEERS]
    for row in data["rows"]:
        assert list(row)[:5] == ["name", "median_ms", "low_ms", "high_ms", "peak_mib"]
        assert row["interval_ms"][0] <= row["median_ms"] <= row["interval_ms"][1]
        assert set(row["queued_ms"]) == set(row["latency_ms"]) == {"same", "fresh"}
        assert (row["host_ms"], row["gpu_ms"]) == (None, None)
        assert row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["peak_mib"] is None
    assert data["best_baseline"] == "torchscript"
    assert data["ratio"] == pytest.approx(0.5)
    assert data["interval"]["low"] <= data["ratio"] <= data["interval"]["high"]
    assert (data["best_live_baseline"], data["ratio_live"]) == ("eager", pytest.approx(0.4))
    promises = {row["name"]: row["promise"] for row in data["rows"]}
    assert promises["plantune"] == promises["compile-default"] == "live"
    assert promises["plantune-frozen"] == promises["compile-frozen"] == "frozen"


def test_the_memory_of_each_route_is_in_its_row() -> None:
    one = timing(1.0)
    race = Race({"plantune": one, "eager": one}, {}, "eager", None, {"plantune": 12.5})
    rows = bench_document(race, cpu_environment(), {})["rows"]
    assert [row["peak_mib"] for row in rows] == [12.5, None]


def test_the_first_line_says_what_runs_and_how_fast_and_the_table_has_the_fastest_first(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "look", lambda machine: State(2, others=1.5, names=("a", "b")))
    result = run("bench", "--batch", 1)
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "runs as plantune's plan, 2.50 times faster than eager and 2.00 times faster than "
        "torchscript (the fastest other route)"
    )
    assert lines[1].startswith("0.400 of eager's time, 95 % interval")
    assert lines[2].startswith("0.500 of torchscript's time, 95 % interval")
    assert lines[5].split() == ["plantune", "live", "2.00", "2.00", "2.00", "to", "2.01", "0.500"]
    assert lines[6].startswith("torchscript  ")
    assert "torchscript is frozen; against the best live route: 0.400 of eager's time" in lines
    assert lines[-1] == "the machine was not quiet: other processes took 1.5 of 2 cores (a, b)"
    assert max(map(len, lines[1:])) <= 100


def test_a_plan_that_gives_the_same_bits_each_time_is_said_to(
    run: Run, store: Callable[..., int], plan: Plan
) -> None:
    words = "the plan gives the same bits each time"
    assert words not in run("bench", "--batch", 1).stdout
    store(replace(plan, evidence=Attrs(deterministic=1)))
    assert words in run("bench", "--batch", 1).stdout
    assert object_of(run("bench", "--batch", 1, "--json"))["deterministic"] is True


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (5.0, "as fast as eager within the noise, but 1.25 times slower than torchscript"),
        (4.0, "1.25 times faster than eager, but as fast as torchscript"),
    ],
)
def test_the_headline_is_honest(run: Run, worker: FakeWorker, ours: float, words: str) -> None:
    worker.times_ms = {"plantune": ours, "torchscript": 4.0}
    assert words in run("bench", "--batch", 1).stdout.splitlines()[0]


def test_a_plan_that_did_not_win_says_what_runs(
    run: Run, store: Callable[..., int], plan: Plan, worker: FakeWorker
) -> None:
    store(replace(plan, route="eager"))
    worker.times_ms = {"plantune": 5.0}
    lines = run("bench", "--batch", 1, "--peers", "eager").stdout.splitlines()
    assert lines[0] == "runs as eager, as fast as eager called directly within the noise"
    assert any(line.startswith("in the race that decided this: runs as eager: ") for line in lines)


def test_whole_steps_are_those_of_training(
    run: Run, worker: FakeWorker, store: Callable[..., int], plan: Plan
) -> None:
    refused = run("bench", "--batch", 1, "--step")
    assert refused.exit_code == 2
    assert "--step needs --mode train" in refused.stderr
    workload = Workload(batch=1, mode="train")
    store(replace(plan, problem=workload.problem))
    data = object_of(run("bench", "--batch", 1, "--mode", "train", "--step", "--json"))
    assert data["workload"]["optimizer"] == "AdamW"
    assert worker.raced == Raced(workload.problem, None, steps=True)


def test_peers_limit_the_routes(run: Run) -> None:
    data = object_of(run("bench", "--batch", 1, "--peers", "eager, torchscript", "--json"))
    names = ["plantune", "plantune-frozen", "eager", "torchscript"]
    assert [row["name"] for row in data["rows"]] == names


def test_building_may_be_limited(run: Run, worker: FakeWorker) -> None:
    began = time.monotonic()
    result = run("bench", "--batch", 1, "--build-limit", 600)
    assert "routes (600 s and what is begun by then), then 10 s of timing" in result.stderr
    assert began + 600 <= worker.effort.build_until <= time.monotonic() + 600
    run("bench", "--batch", 1)
    assert worker.effort.build_until is None


@pytest.mark.parametrize("peers", ["tensorrt", "eager,cuda-graph", ",", ""])
def test_an_unknown_route_is_wrong_usage(run: Run, peers: str) -> None:
    result = run("bench", "--batch", 1, "--peers", peers)
    assert result.exit_code == 2
    assert "eager-channels-last" in result.stderr


def test_json_and_output_write_files(run: Run, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    result = run("bench", "--batch", 1, "--json", one, "--output", other)
    assert result.exit_code == 0
    assert "times faster than eager" in result.stdout
    assert json.loads(one.read_text()) == json.loads(other.read_text())
    assert json.loads(one.read_text())["best_baseline"] == "torchscript"


@pytest.mark.parametrize("option", ["--output", "--json", "--plot"])
@pytest.mark.parametrize("name", ["no/such.png", "file/such.png", f"{'x' * 300}.png"])
def test_a_file_that_could_not_be_written_is_refused_before_the_run(
    run: Run, worker: FakeWorker, tmp_path: Path, option: str, name: str
) -> None:
    (tmp_path / "file").touch()
    worker.failure = AssertionError("it must not run")
    result = run("bench", "--batch", 1, option, tmp_path / name)
    assert result.exit_code == 2, result.stderr
    assert "cannot be written" in result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["file"]


@pytest.mark.parametrize("name", ["bench.png", "bench.svg"])
def test_the_plot_is_drawn(run: Run, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    result = run("bench", "--batch", 1, "--plot", tmp_path / name)
    assert result.exit_code == 0
    assert f"plot: {tmp_path / name}" in result.stdout
    assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize("name", ["bench.txt", "bench", "no/such/bench.png"])
def test_a_plot_that_could_not_be_written_is_refused_first(
    run: Run, worker: FakeWorker, tmp_path: Path, name: str
) -> None:
    worker.failure = AssertionError("it must not run")
    assert run("bench", "--batch", 1, "--plot", tmp_path / name).exit_code == 2


def test_without_matplotlib_the_way_to_get_it_is_told(
    run: Run, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.failure = AssertionError("it must not run")
    monkeypatch.setattr("plantune.cli.bench.can_plot", lambda: False)
    result = run("bench", "--batch", 1, "--plot", "x.png")
    assert result.exit_code == 2
    assert "pip install 'plantune[plot]'" in result.stderr


def test_wrong_numbers_are_5(run: Run, worker: FakeWorker) -> None:
    worker.failure = WrongResult("plantune gives another output", 1.0, 0.1)
    assert run("bench", "--batch", 1).exit_code == 5


def test_a_plan_for_another_chip_is_refused_with_4(
    run: Run, store: Callable[..., int], plan: Plan, tmp_path: Path
) -> None:
    from plantune.plans.database.plan_database import PlanDatabase

    path = tmp_path / "foreign.db"
    there = replace(cpu_environment(), arch="sm90", device="H200")
    with PlanDatabase.open(path) as database:
        database.put_plan(changed(plan, arch="sm90"), there)
    result = run("bench", "--batch", 1, "--db", path, "--json")
    assert result.exit_code == 4
    assert "expected cpu, got sm90 (H200)" in object_of(result)["error"]["message"]


def test_another_arch_needs_its_device(run: Run) -> None:
    result = run("bench", "--arch", "sm90", "--batch", 1)
    assert result.exit_code == 6
    assert "sm90" in result.stderr
