"""What the tests of the search share: a small network, times that nobody has to measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from plantune.base.canonical import canonical, digest
from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.graph.graph import Graph
from plantune.graph.step import Step
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.measure.machine_state import Machine, State
from plantune.space.search_space import SearchSpace, load_search_space

from .shared.postgres import Postgres


class Small(nn.Module):
    """Two convolutions with a scale, a bias and a residual: enough to fuse and to convert."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, 1, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(1))
        self.conv2 = nn.Conv2d(8, 8, 3, 1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.conv1(x) + self.bias)
        return torch.relu(self.conv2(y) + y)


@dataclass
class FakeMeasurer:
    """Times that follow from the candidate alone; `reject` names families that never work, and of
    each candidate so many first measurements are `disturbed`.
    """

    reject: tuple[str, ...] = ()
    disturbed: int = 0
    asked: list[tuple[str, Candidate]] = field(default_factory=list)
    limits_us: list[float] = field(default_factory=list)

    def time_us(self, step: Step, candidate: Candidate) -> float:
        drawn = digest([step.signature, canonical(candidate.to_json())])
        return len(step.nodes) * (20.0 + int(drawn[:8], 16) % 50)

    def measure(self, step: Step, candidate: Candidate, limit_us: float) -> Outcome:
        self.asked.append((step.signature, candidate))
        self.limits_us.append(limit_us)
        if candidate.family in self.reject:
            return Rejected("numerics", "it is wrong")
        if self.asked.count((step.signature, candidate)) <= self.disturbed:
            return Rejected("noisy", "other work")
        time_us = self.time_us(step, candidate)
        return Measured(time_us, time_us, time_us, 9, 1e-7, 1e-6, True)


@dataclass
class FakeStore:
    """Keeps outcomes in memory."""

    rows: dict[str, dict[Candidate, Outcome]] = field(default_factory=dict)

    def known(self, step: Step) -> dict[Candidate, Outcome]:
        return self.rows.get(step.signature, {})

    def keep(self, step: Step, candidate: Candidate, outcome: Outcome) -> None:
        self.rows.setdefault(step.signature, {})[candidate] = outcome


class Quiet(Machine):
    """A machine on which nothing else runs."""

    def look(self) -> State:
        return State(2)

    def slowdown(self) -> float:
        return 1.0


@pytest.fixture(autouse=True, scope="session")
def _quick_storages(migrations_read_once: None) -> None: ...


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server that all tests of this process share."""
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def alone(nothing_built: None) -> None:
    """No worker here is a process."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No decision in a test depends on what else runs here."""
    monkeypatch.setattr("plantune.search.machine_log.machine_for", lambda kind, gpu: Quiet())


@pytest.fixture
def space() -> SearchSpace:
    return load_search_space("cpu")


@pytest.fixture
def graph() -> Graph:
    return extract(Small().eval(), TensorType((2, 4, 8, 8)))


@pytest.fixture
def measurer() -> FakeMeasurer:
    return FakeMeasurer()


@pytest.fixture
def broken() -> type[FakeMeasurer]:
    """The class, for measurers that reject."""
    return FakeMeasurer


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()
