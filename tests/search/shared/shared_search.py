"""Searches that share a study, each in a process that may be killed: URL FOLDER CANDIDATES.

Each line on stdin is the name of a search to start, which keeps what it finds in FOLDER/NAME.db;
its process is forked, because importing all of it takes seconds. The process says on stdout when it
starts, when it has joined the others, and in the end which plan it has, or that it failed. Times
follow from the candidate alone.

FOLDER/room holds how many outcomes a search may know: then it measures until there is room for
more, so that however slow a machine is, no search ends before its time.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from plantune.base.canonical import canonical, digest
from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.devices.machine import cpu_environment
from plantune.graph.graph import Graph
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.planner.candidates import step_candidates
from plantune.plans.problem import Problem
from plantune.search.budget import Budget
from plantune.search.measuring import StoredTrials
from plantune.search.results import Patience
from plantune.search.shared.joint import joined, wait_for_turn
from plantune.search.step_search import StepSearch
from plantune.search.worker_pool import WorkerPool
from plantune.space.search_space import load_search_space


class Hasty(Patience):
    """Silent after two seconds, gone after two minutes."""

    silent_s = 2
    gone_s = 120.0


# Of each convolution's size there are so many.
OF_A_LAYER = 16
# As many as a search claims together.
AT_ONCE = 4


class Deep(nn.Module):
    """Convolutions of as many sizes as give the candidates that a test wants."""

    def __init__(self, candidates: int) -> None:
        super().__init__()
        channels = [4 + 4 * layer for layer in range(-(-candidates // OF_A_LAYER) + 1)]
        sizes = pairwise(channels)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, 1, 1, bias=False) for a, b in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def outcome_of(key: tuple[str, object]) -> Outcome:
    """What every search finds for a candidate: one of eight is wrong."""
    step, candidate = key
    drawn = int(digest([step, canonical(candidate.to_json())])[:8], 16)
    if drawn % 8 == 0:
        return Rejected("numerics", "it is wrong")
    us = 20.0 + drawn % 500 / 10
    return Measured(us, us, us, 9, 1e-7, 1e-6, True)


class Measurer:
    """Waits for room."""

    def __init__(self, room: Path) -> None:
        self._room = room
        self.known: Callable[[], int] = lambda: 0

    def measure(self, step: object, candidate: object, limit_us: float) -> Outcome:
        while self.known() >= int(self._room.read_text()):
            time.sleep(0.02)
        return outcome_of((step.signature, candidate))


def search(url: str, path: Path, graph: Graph, count: int) -> str:
    """Measures until nobody lacks anything; the plan that all end with is the first one's name."""
    space = load_search_space("cpu")
    problem, environment = Problem.of(graph, "cpu", "deep"), cpu_environment()

    def say(text: str) -> None:
        print(f"{path.stem}: {text}", file=sys.stderr, flush=True)

    shared = joined(url, problem, environment, Hasty(1), say)
    with PlanDatabase.open(path) as database, shared as (board, heart):
        print(f"joined {path.stem} -", flush=True)
        store = StoredTrials(database, environment, fresh=False)
        measurer = Measurer(path.with_name("room"))
        steps = StepSearch(graph, space, WorkerPool([measurer], shared=board), store)
        measurer.known = lambda: len(steps.costs.outcomes)
        budget = Budget(3600.0)
        wanted = list({c.key: c for c in steps.candidates}.values())[:count]

        def reporting(progress: object) -> None:
            heart.report(progress)

        while missing := [c for c in wanted if not steps.costs.knows(c)]:
            free = board.spread([c for c in missing if not board.has(c)])
            steps.measure_all(free[:AT_ONCE], budget, reporting)
            steps.observe_others()
            time.sleep(0.02)
        own = f"plan of {path.stem}"
        while (found := wait_for_turn(board, steps.observe_others)[0]) is None:
            if board.publish(own, 1.0):
                return own
        return found


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    url, folder, count = sys.argv[1:]
    graph = extract(Deep(int(count)).eval(), TensorType((2, 4, 8, 8)))
    step_candidates(graph, load_search_space("cpu"))  # what it computed once is kept
    for line in sys.stdin:
        name = line.strip()
        if pid := os.fork():
            print(f"started {name} {pid}", flush=True)
            continue
        code = 1
        try:
            plan = search(url, Path(folder) / f"{name}.db", graph, int(count))
            print(f"done {name} {plan}", flush=True)
            code = 0
        except BaseException:
            traceback.print_exc()
            print(f"failed {name} -", flush=True)
        finally:
            sys.stdout.flush()
            os._exit(code)


if __name__ == "__main__":
    main()
