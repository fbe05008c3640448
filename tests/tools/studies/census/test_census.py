"""The census goes on after a kill, outlives what hangs, and its table shows what rows say."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

# Of the sample; each takes some seconds.
FIRST = 12


def row(network: str, mode: str, measure: str, verdict: str, **more: object) -> dict[str, object]:
    return {"network": network, "mode": mode, "measure": measure, "verdict": verdict, **more}


def test_a_row_that_a_kill_cut_off_is_measured_again(part, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    first, second = row("a", "infer", "right", "right"), row("b", "infer", "right", "refused")
    file.write_text(json.dumps(first) + "\n" + json.dumps(second)[:30])
    rows = part("rows").Rows(file)
    assert list(rows.by_key) == [("a", "infer", "right")]
    rows.add(second)
    rows.add({**second, "verdict": "right"})
    assert [r["verdict"] for r in part("rows").Rows(file).by_key.values()] == ["right", "right"]


def test_the_sample_names_sixty_networks_once(part) -> None:
    names = part("networks").sample(1000)
    assert len(names) == len(set(names)) == 60
    assert part("networks").sample(3) == names[:3]


def test_the_table_counts_and_names_what_is_not_right(part, tmp_path: Path) -> None:
    measured = {"ms": {"plantune": 1.25}, "device": "GPU"}
    steps = {"us": 354.4, "roofline_us": 176.6}
    torn = "SwinTransformer, at features.1: in-place op aten.x_ cannot be part of a plan. Optimize"
    rows = [
        row("torchvision/a", "infer", "taken", "taken"),
        row("torchvision/b", "infer", "taken", "refused", reason=torn),
        row("torchvision/a", "infer", "right", "right"),
        row("timm/c", "train", "share", "taken", share=0.5, left={"conv2d": 0.5}, arch="sm90"),
        row("timm/c", "infer", "time", "timed", ratios={"eager": [1.05, 1, 1.1]}, **measured),
        row("timm/d", "infer", "time", "timed", ratios={"eager": [0.5, 0.4, 0.6]}, **measured),
        row("timm/d", "infer", "searched", "searched", search_s=119.6, measured=21, steps=steps),
        row("timm/d", "infer", "tuned", "timed", ratios={"compile": [0.6, 0.5, 0.7]}, **measured),
    ]
    part("table").write_table(rows, tmp_path / "census.md")
    text = (tmp_path / "census.md").read_text()
    assert "| torchvision | infer | 1 of 2 (50.0%) | 1 of 1 (100.0%) |" in text
    assert "| infer | 1 | in-place op aten.x_ |" in text
    assert "| timm/c | train | 0.500 | `conv2d` 0.50 |" in text
    assert "| eager | infer | 2 | 0.78 | 1.05 | 1 |" in text
    assert "| timm/c | infer | 1.250 | 1.05 | GPU |" in text
    _, _, tuned = text.partition("## Time with the plan of a search")
    assert "| timm/d | infer | 1.250 | 0.60 | GPU |" in tuned
    assert "| timm/d | - | 120 s | 21 | 354 us | 177 us |" in tuned
    assert "- `torchvision/b` infer: refused, in-place op aten.x_" in text
    assert "| timm | train | sm90 | 1 | 0.500 | 0.500 | 1 |" in text


def test_the_outputs_of_a_network_do_not_vanish(part) -> None:
    """They would with the statistics of the beginning: its weights are small."""
    torch.manual_seed(0)
    first, second = (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Dropout(0.1)), nn.Conv2d(8, 8, 1)
    module = nn.Sequential(*first, second, nn.BatchNorm2d(8)).eval()
    for place in (0, 3):
        for parameter in module[place].parameters():
            parameter.data *= 0.1
    x = torch.randn(4, 8, 5, 5)
    assert module(x).std() < 0.02
    part("networks").settle(module, x)
    assert 0.5 < module(x).std() < 2
    assert not module.training
    assert module[1].momentum == 0.1


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_a_policy_has_two_heads_and_sees_its_images(part, name: str) -> None:
    networks = part("networks")
    module, x = networks.build(f"policies/{name}"), networks.call_of(f"policies/{name}")[:2]
    actions, value = module(x)
    assert (actions.shape, value.shape) == ((2, 18), (2, 1))
    with torch.no_grad():  # bytes count as numbers from 0 to 1
        same = module(x / 255) if name == "nature" else module(x.clone())
    torch.testing.assert_close(same, (actions, value))


def test_the_last_race_with_each_rival_of_a_tuned_network_counts(part, tmp_path: Path) -> None:
    """Some rivals are compiled for a second one."""
    few = {"compile": [0.6, 0.5, 0.7], "graph": [0.4, 0.3, 0.5]}
    late = {"compile": [0.61, 0.5, 0.7], "best": [0.8, 0.7, 0.9]}
    told = {"ms": {"plantune": 1.25}, "device": "GPU"}
    rows = [
        row("timm/d", "infer", "tuned", "timed", ratios=few, **told),
        row("timm/d", "infer", "tuned late", "timed", ratios=late, **told),
        row("timm/e", "infer", "tuned", "timed", ratios=few, **told),
        row("timm/e", "infer", "tuned late", "failed", reason="the time was up"),
    ]
    part("table").write_table(rows, tmp_path / "census.md")
    text = (tmp_path / "census.md").read_text()
    assert "| timm/d | infer | 1.250 | 0.61 | 0.40 | 0.80 | GPU |" in text
    assert "| timm/e | infer | 1.250 | 0.60 | 0.40 | - | GPU |" in text


def test_forgotten_rows_leave_the_file(part, tmp_path: Path) -> None:
    rows = part("rows").Rows(tmp_path / "rows.jsonl")
    rows.add(row("a", "infer", "right", "refused"))
    rows.add(row("b", "infer", "right", "right"))
    rows.forget(["refused"])
    assert list(part("rows").Rows(rows.path).by_key) == [("b", "infer", "right")]


def test_one_of_each_family_comes_first(part, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = part("networks")
    monkeypatch.setattr(networks, "family", lambda name: name[0])
    sizes = {"a1": 9, "a2": 5, "b1": 7}
    assert networks.in_turns(sizes, sizes.__getitem__) == ["a2", "b1", "a1"]


def test_a_network_that_hangs_or_crashes_is_a_row(part) -> None:
    """And the next one is measured."""
    children = part("children")
    child = children.Child(children.Limits(seconds=5.0))
    try:
        lost = child.row("__import__('os')._exit(3)", eval, {})
        assert lost["reason"] == "the process ended with code 3"
        raised = child.row("1 / 0", eval, {})
        assert raised["reason"].startswith("ZeroDivisionError: division by zero")
        assert child.row("{'verdict': 'right'}", eval, {})["verdict"] == "right"
        child.limits = children.Limits(seconds=0.01)
        assert (
            child.row("__import__('time').sleep(99)", eval, {})["reason"] == "took more than 0.01 s"
        )
    finally:
        child.stop()


def test_jobs_take_each_network_once_until_the_time_is_up(part, capsys) -> None:
    todo = part("children").Todo(iter(range(40)), until=float("inf"))
    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(lambda _: todo.take(), range(40))) == list(range(40))
    assert todo.take() is None
    assert part("children").Todo(iter([1]), until=0.0).take() is None
    assert "time is up" in capsys.readouterr().out


def test_one_at_a_time_has_the_gpu(part, monkeypatch, tmp_path: Path) -> None:
    turns, inside = part("turns"), []
    monkeypatch.setattr(turns, "FOLDER", tmp_path)

    def turn(_: int) -> None:
        with turns.alone_on_gpu():
            inside.append(1)
            time.sleep(0.01)
            assert len(inside) == 1
            inside.pop()
        with turns.beside_others():
            assert not inside

    before = os.sched_getaffinity(0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(turn, range(4)))
    turn(0)
    assert os.sched_getaffinity(0) == before


def test_what_is_timed_has_the_last_of_its_own_cores(part, monkeypatch, tmp_path: Path) -> None:
    """Other cores may be somebody else's."""
    turns, given = part("turns"), []
    monkeypatch.setattr(turns, "FOLDER", tmp_path)
    monkeypatch.setattr(turns, "OWN", list(range(4, 14)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: given.append(set(cores)))
    turns.prepare_elsewhere()
    with turns.alone_on_gpu():
        pass
    assert given == [set(range(4, 11)), {11, 12, 13}, os.sched_getaffinity(0)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("place", range(FIRST))
def test_the_first_of_the_sample_are_taken_and_right(part, place: int, mode: str) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    measures = part("measures")
    name = part("networks").sample(FIRST)[place]
    found = measures.called(name, measures.Asked(mode=mode))
    assert found["verdict"] == "right", found


def test_rivals_that_compiled_beside_the_search_race_with_its_plan(
    part, monkeypatch, tmp_path
) -> None:
    """Who was not compiled in time does not, and says so; errors are those of both."""
    beside, speed, asked, timing = map(part, ("beside", "speed", "asked", "timing"))
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(speed.networks, "build", lambda name: nn.Conv2d(3, 4, 3))
    monkeypatch.setattr(speed.networks, "call_of", lambda name: torch.randn(2, 3, 8, 8))
    given = asked.Asked(
        race=timing.Race(["eager", "slow"], 0.02), compile_until=time.monotonic() + 9
    )

    def made(ready, asked, route):
        if route == "slow":
            signal.raise_signal(signal.SIGALRM)
        return real(ready, asked, route)

    real = beside._made
    monkeypatch.setattr(beside, "_made", made)
    monkeypatch.setitem(beside.ROUTES["cpu"], "slow", beside.ROUTES["cpu"]["eager"])
    found = beside.compile_rivals("a", given)
    assert set(found["compile_s"]) == {"eager", "slow"}
    assert found["failures"] == {"slow": "not compiled in time"}
    row = beside.race("a", given)
    assert row["verdict"] == "no plan"
    assert set(row["ratios"]) == {"eager"}
    assert row["failures"] == found["failures"]
    assert 0 < beside.errors("a", given)["distances"]["plantune"] < 1e-6
    again = replace(given, race=replace(given.race, rivals=["eager", "again"]))
    monkeypatch.setitem(beside.ROUTES["cpu"], "again", beside.ROUTES["cpu"]["eager"])
    asked_again = replace(again, race=replace(given.race, rivals=["again"]))
    assert set(beside.compile_rivals("a", asked_again)["compile_s"]) == {"again"}
    assert set(beside.race("a", again)["ratios"]) == {"eager", "again"}


class Answers:
    """In place of a child: what each measure says, and in which order they were asked."""

    def __init__(self, lost: tuple[str, ...] = (), race_s: float = 0.0) -> None:
        self.lost, self.asked, self.ends, self.race_s = lost, [], [], race_s

    def __call__(self, limits):
        self.limits = limits
        return self

    def row(self, name, measure, asked):
        routes = list(asked.race.rivals or ())
        self.asked.append((name, measure.__name__, routes))
        self.ends.append(asked.compile_until)
        time.sleep(self.race_s if measure.__name__ == "race" else 0)
        if measure.__name__ in self.lost:
            return {"verdict": "failed", "reason": "lost"}
        verdicts = {"searched": "searched", "compile_rivals": "compiled", "race": "timed"}
        return {"verdict": verdicts.get(measure.__name__), "failures": {}}

    def stop(self) -> None: ...

    def of(self, *measures: str) -> list[tuple[str, str, list[str]]]:
        return [asked for asked in self.asked if asked[1] in measures]


@pytest.fixture
def in_one_go(part, monkeypatch, tmp_path: Path):
    """Runs the tool on networks, with children that only answer; gives its rows."""
    one_call, lanes = part("one_call"), part("lanes")
    file, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    for name in (*one_call.CACHES.values(), "PLANTUNE_TURNS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(lanes, "POLL_S", 0.001)

    def run(answers: Answers, *given: str):
        monkeypatch.setattr(one_call, "Child", answers)
        monkeypatch.setattr(lanes, "Child", answers)
        files = ["--rows", str(file), "--cache", str(cache)]
        monkeypatch.setattr(sys, "argv", ["one_call.py", *given, *files])
        one_call.main()
        return part("rows").Rows(file).by_key

    return run


def test_networks_are_one_call_that_goes_on(in_one_go) -> None:
    """Beside each other: searches and rivals; what is known is not asked for again."""
    names, lost = ("a", "b=25"), Answers(lost=("race",))
    rows = in_one_go(lost, *names)
    assert [name for name, *_ in lost.of("searched")] == ["a", "b"]
    assert rows["b", "infer", "searched"]["verdict"] == "searched"
    routes = ["compile-reduce-overhead", "cuda-graph"]
    assert sorted(lost.of("race")) == [(name, "race", routes) for name in "ab"]
    good = Answers()
    rows = in_one_go(good, *names)
    assert not good.of("searched")
    assert sorted(good.of("compile_rivals")) == [(n, "compile_rivals", routes[:1]) for n in "ab"]
    assert rows["a", "infer", "tuned"]["verdict"] == "timed"
    done = Answers()
    in_one_go(done, *names)
    assert not done.asked


def test_rivals_that_take_long_join_a_second_race(in_one_go) -> None:
    """Also where all searches are over before the first races are."""
    answers = Answers(race_s=0.1)
    best = "compile-max-autotune"
    rows = in_one_go(answers, "a", "b", "--late", best, "--late-networks", "b")
    *_, last = answers.of("race")
    assert last == ("b", "race", ["compile-reduce-overhead", best, "cuda-graph"])
    assert len(answers.of("race")) == 3
    assert rows["b", "infer", "tuned late"]["verdict"] == "timed"
    assert ("a", "infer", "tuned late") not in rows


def test_rivals_of_two_networks_compile_beside_each_other(in_one_go) -> None:
    """Each waits for the other; a network's own rivals take turns."""
    both, inside = threading.Barrier(2, timeout=20), set[str]()

    class Meeting(Answers):
        def row(self, name, measure, asked):
            if measure.__name__ != "compile_rivals":
                return super().row(name, measure, asked)
            assert name not in inside
            inside.add(name)
            both.wait()
            inside.remove(name)
            return super().row(name, measure, asked)

    meeting, routes = Meeting(), ["compile-reduce-overhead", "compile-default"]
    in_one_go(meeting, "a", "b", "--compilers", "2", "--rivals", *routes)
    found = sorted(meeting.of("compile_rivals"))
    assert found == sorted((n, "compile_rivals", [route]) for n in "ab" for route in routes)


def test_what_was_searched_before_races_with_what_is_captured(in_one_go) -> None:
    in_one_go(Answers(lost=("race",)), "a", "--rivals", "cuda-graph")
    again = Answers()
    in_one_go(again, "a", "--rivals", "cuda-graph")
    assert [measure for _, measure, _ in again.asked] == ["race", "errors"]


def test_a_race_whose_process_was_lost_compiles_again_within_its_time(in_one_go) -> None:
    """A clock that rings never cannot be set."""
    answers, began = Answers(), time.monotonic()
    in_one_go(answers, "a", "--limit", "170")
    ends = [
        end for asked, end in zip(answers.asked, answers.ends, strict=True) if asked[1] == "race"
    ]
    assert ends
    assert all(began < end < began + 170 for end in ends)


def test_a_cpu_has_rivals_of_its_own_and_others_are_refused(in_one_go, capsys) -> None:
    answers = Answers()
    in_one_go(answers, "a", "--device", "cpu")
    assert [routes for *_, routes in answers.of("race")] == [["eager", "eager-channels-last"]]
    with pytest.raises(SystemExit):
        in_one_go(answers, "a", "--device", "cpu", "--rivals", "eager", "cuda-graph")
    assert "no routes on cpu: cuda-graph" in capsys.readouterr().err


def test_no_search_begins_that_has_no_time(in_one_go, capsys) -> None:
    answers = Answers()
    in_one_go(answers, "a=10", "b=100", "--limit", "60")
    assert [name for name, *_ in answers.of("searched")] == ["a"]
    assert "b: no time for its search" in capsys.readouterr().out


def test_a_search_says_which_steps_are_furthest_from_their_roofline(part) -> None:
    def choice(name: str, us: float | None, roofline_us: float = 1.0):
        times = None if us is None else SimpleNamespace(us=us, roofline_us=roofline_us)
        return SimpleNamespace(nodes=(name,), candidate=SimpleNamespace(family="conv"), times=times)

    plan = SimpleNamespace(choices=[choice("a", 3.0), choice("b", None), choice("c", 9.0, 8.5)])
    assert part("speed").steps_of(plan) == {
        "known": 2,
        "of": 3,
        "us": 12.0,
        "roofline_us": 9.5,
        "furthest": [("a", "conv", 3.0, 1.0), ("c", "conv", 9.0, 8.5)],
    }
