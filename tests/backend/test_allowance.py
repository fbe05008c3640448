"""`options={"budget": seconds}`: one budget for all pieces of a module, in all processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune.backend import options, pieces
from plantune.backend.allowance import SearchEnded
from plantune.devices.machine import cpu_environment
from plantune.errors import WorkerDied
from plantune.plans.database.plan_database import PlanDatabase
from plantune.runtime.captured.program_pool import ProgramPool
from plantune.runtime.module import TunedModule


class TwoPieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(256, 256), nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x).relu()
        torch._dynamo.graph_break()
        return self.head(x)


class Searches:
    """What was searched for, and for how long."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.error: Exception | None = None

    def __call__(self, tuned: TunedModule, pool: ProgramPool, seconds: float) -> None:
        self.seconds.append(seconds)
        if self.error is not None:
            raise self.error
        with PlanDatabase.open() as database:
            database.put_plan(replace(pool.plan, origin="measured"), cpu_environment())


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    found = Searches()
    monkeypatch.setattr(options, "search", found)
    return found


def call(budget: float, times: int, mode: str = "infer", batch: int = 64) -> None:
    """As a process would that begins now."""
    torch._dynamo.reset()
    module: Any = torch.compile(
        TwoPieces(), backend="plantune", options={"budget": budget}, dynamic=False
    )
    with torch.set_grad_enabled(mode == "train"):
        for _ in range(times):
            module(torch.randn(batch, 256)).sum()


def matches() -> set[str | None]:
    """How the stored plans that the last two pieces run from match this machine."""
    tuned = [t for piece in pieces()[-2:] for owner in piece._owners for t in owner.tuned.values()]
    return {pool.match for each in tuned for pool in each.pools()}


def test_nothing_is_searched_without_one(searches):
    call(0, 4)
    assert searches.seconds == []


def test_it_is_spent_once_when_all_pieces_have_run(searches):
    call(60, 1)
    assert searches.seconds == []
    call(60, 4)
    assert len(searches.seconds) == 2
    assert sum(searches.seconds) == pytest.approx(60)
    assert searches.seconds[0] > searches.seconds[1]
    assert matches() == {"exact"}


def test_another_process_searches_no_more(searches):
    call(60, 2)
    call(60, 3)
    assert sum(searches.seconds) == pytest.approx(60)


def test_a_larger_one_adds_what_it_has_more(searches):
    call(60, 2)
    call(100, 3)
    assert sum(searches.seconds) == pytest.approx(100, abs=0.2)


def test_what_comes_later_has_what_is_left(searches):
    module = torch.compile(TwoPieces(), backend="plantune", options={"budget": 60})
    with torch.no_grad():
        for batch in (64, 64, 64, 8, 8, 8):
            module(torch.randn(batch, 256))
    assert sum(searches.seconds) == pytest.approx(60)
    assert len(searches.seconds) == 2


def test_a_search_that_fails_is_told_and_not_repeated(searches):
    searches.error = WorkerDied("the worker died")
    with pytest.warns(SearchEnded, match=r"TwoPieces.*the worker died"):
        call(60, 4)
    assert len(searches.seconds) == 2
    call(60, 4)
    assert len(searches.seconds) == 2
