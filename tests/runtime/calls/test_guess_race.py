"""A guess that the framework computes a part of races the framework's kernels once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.devices.machine import environment_of
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans import guess as default_plans
from plantune.plans.database.proofs import is_known_slower
from plantune.plans.guess import framework_plan
from plantune.plans.plan import EAGER
from plantune.runtime.calls import choose, guess_race
from plantune.space.search_space import load_search_space

X = TensorType((2, 3, 6, 6))


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()


def plan_of(graph):
    return framework_plan(graph, load_search_space("cpu"), network="guess")


def test_only_a_part_of_the_frameworks_in_a_pass_makes_a_guess_unsure() -> None:
    graph = extract(module(), X)
    plan = plan_of(graph)
    assert guess_race.is_unsure(graph, plan)
    ours = [replace(c, candidate=replace(c.candidate, family="ours")) for c in plan.choices]
    assert not guess_race.is_unsure(graph, replace(plan, choices=tuple(ours)))


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: differentiate(extract(module().train(), X)), id="training"),
        pytest.param(lambda: extract(module().train(), X), id="writes buffers"),
        pytest.param(lambda: extract(nn.Dropout().train(), X), id="draws"),
    ],
)
def test_a_pass_that_leaves_a_trace_is_not_raced(made) -> None:
    graph = made()
    assert not guess_race.is_unsure(graph, plan_of(graph))


@pytest.mark.parametrize("slower", [True, False])
def test_who_wins_runs_and_is_known_the_next_time(monkeypatch, slower: bool) -> None:
    races = []

    def race(guess, other, call) -> bool:
        races.append((guess.plan.route, other.plan.route))
        return slower

    monkeypatch.setattr(choose, "guessed_plan", lambda graph, space, network: plan_of(graph))
    monkeypatch.setattr(choose, "is_slower", race)
    monkeypatch.setitem(choose.UNPLANNED, "cpu", EAGER)
    x = torch.randn(2, 3, 6, 6)
    for _ in range(2):
        own = module()
        tuned = optimize(own, x, fallback="silent")
        torch.testing.assert_close(tuned(x), own(x))
        assert (tuned.pool().plan.route == EAGER) == slower
    assert len(races) == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "slower"), [(2.0, 1.0, True), (1.0, 2.0, False), (1.01, 1.0, False)]
)
def test_a_clearly_slower_guess_loses(monkeypatch, ours, theirs, slower) -> None:
    tuned = optimize(module(), torch.randn(2, 3, 6, 6), fallback="silent")
    guess, other = tuned.pool(), choose.ProgramPool.__new__(choose.ProgramPool)
    monkeypatch.setattr(
        guess_race, "_pass_s", lambda pool, inputs: ours if pool is guess else theirs
    )
    call = tuned._calls.arguments
    assert guess_race.is_slower(guess, other, call) == slower


def test_both_run_in_a_race() -> None:
    tuned = optimize(module(), torch.randn(2, 3, 6, 6), fallback="silent")
    pool = tuned.pool()
    assert guess_race.is_slower(pool, pool, tuned._calls.arguments) is False


@pytest.mark.gpu
def test_the_first_call_on_a_gpu_races_and_stays_right() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Softmax(1)
    own = nn.Sequential(*layers).eval().half().cuda().to(memory_format=torch.channels_last)
    images = torch.randn(8, 16, 12, 12, device="cuda", dtype=torch.float16)
    tuned = optimize(own, images, fallback="silent")
    graph = tuned.pool().graph
    with torch.no_grad():
        made, exact = tuned(images), own.double()(images.double())
    guess = default_plans.guessed_plan(
        graph,
        load_search_space(tuned.pool().plan.problem.arch),
        network=tuned.pool().plan.problem.network,
    )
    assert guess is not None
    assert guess_race.is_unsure(graph, guess)
    known = is_known_slower(guess, environment_of(images.device))
    assert known is not None, "the race was not run"
    assert (tuned.pool().plan.choices == guess.choices) == (not known)
    torch.testing.assert_close(made.double(), exact, rtol=2e-3, atol=1e-4)
