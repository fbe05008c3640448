"""How much faster several GPUs measure than one: the same candidates, from the first to the last.

    python tools/gpus_study.py [--batch 128] [--candidates 96] [--seats 2] [--json FILE]

Kernels are compiled first, once for all runs, which go one, all, all, one, so that what changes
with time concerns both alike. Each run has fresh workers and knows nothing; the
plans that follow from the runs race each other on the first GPU. On a machine without a GPU,
`--seats` workers share the CPU, which shows that it works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

import torch

from plantune.gpus import Seat, best_arch, seats_of
from plantune.kernels.family import Candidate
from plantune.measure.machine_state import gpu_watcher, machine_for
from plantune.measure.timing import Effort, Timing, ratio_interval
from plantune.outcome import Measured, Outcome
from plantune.search.budget import Budget
from plantune.search.builds import builds_for
from plantune.search.candidates import StepCandidate
from plantune.search.crew import Crew
from plantune.search.elsewhere import start_all
from plantune.search.measuring import WorkerMeasurer
from plantune.search.ranking import plan_of
from plantune.search.results import silent
from plantune.search.seats import environment_on
from plantune.search.session import worker_for
from plantune.search.step_search import StepSearch
from plantune.space.search_space import load_search_space
from plantune.workload import Workload

LONG_S = 3600.0


class Memory:
    """Outcomes of one run."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, Candidate], Outcome] = {}
        self.at: list[float] = []

    def known(self, step: object) -> dict[Candidate, Outcome]:
        return {}

    def keep(self, step: object, candidate: Candidate, outcome: Outcome) -> None:
        self.rows[step.signature, candidate] = outcome
        self.at.append(time.monotonic())


def wanted_of(steps: StepSearch, count: int) -> list[StepCandidate]:
    """The most promising candidates of each step that is large, some four of each, the first of
    every step before the second ones, as a search comes to them.
    """
    by_step: dict[str, list[StepCandidate]] = {}
    for candidate in {c.key: c for c in steps.candidates}.values():
        by_step.setdefault(candidate.step.signature, []).append(candidate)
    rows = [sorted(found, key=lambda c: c.estimate_us) for _, found in sorted(by_step.items())]
    rows = sorted(rows, key=lambda row: -row[0].estimate_us)[: max(count // 4, 1)]
    return [c for rank in zip_longest(*rows) for c in rank if c is not None][:count]


def build_all(workload: Workload, wanted: list[StepCandidate], seats: tuple[Seat, ...]) -> float:
    start, arch = time.monotonic(), load_search_space(workload.arch).arch
    worker = worker_for(workload.graph, workload.problem, seat=seats[0])
    with worker, builds_for(arch, worker) as builds:
        builds.want(wanted)
        for candidate in wanted:
            builds.wait([candidate], LONG_S)
    return time.monotonic() - start


def run(workload: Workload, seats: tuple[Seat, ...], count: int) -> dict[str, object]:
    """Seconds from the first candidate to the last outcome, and what was measured."""
    space, memory, budget = load_search_space(workload.arch), Memory(), Budget(LONG_S)
    graph, problem = workload.graph, workload.problem
    machine = machine_for(space.arch.kind, gpu_watcher(workload.arch, seats[0].gpu))
    with ExitStack() as stack:
        workers = [stack.enter_context(worker_for(graph, problem, seat=seat)) for seat in seats]
        start_all(workers, time.monotonic() + 120.0)
        measurers = [WorkerMeasurer(each, space, 0, budget, machine) for each in workers]
        crew = Crew(measurers, [seat.name for seat in seats])
        steps = StepSearch(graph, space, crew, memory)
        wanted = wanted_of(steps, count)
        start = time.monotonic()
        steps.measure_all(wanted, budget, silent)
        seconds = memory.at[-1] - start
    covers = steps.covers(1)
    plan = plan_of(covers[0][1], graph, space, network=problem.network)
    return {"seconds": seconds, "rows": memory.rows, "plan": plan, "cover_us": covers[0][0]}


def race(workload: Workload, seat: Seat, plans: list[object]) -> dict[str, float]:
    """The second plan's time by the first one's, in turns, on one GPU."""
    with worker_for(workload.graph, workload.problem, seat=seat) as worker:
        timings = worker.time_programs(workload.graph, plans, Effort(budget_s=4.0))
    assert all(isinstance(timing, Timing) for timing in timings), timings
    ratio = ratio_interval(timings[1], timings[0])
    return {**asdict(ratio), "first_us": timings[0].median_us, "second_us": timings[1].median_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="se_resnet9_fixup")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--candidates", type=int, default=96)
    parser.add_argument("--seats", type=int, default=2, help="workers on a machine without a GPU")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    arch = best_arch()
    on_cpu = tuple(Seat(f"CPU {number}") for number in range(given.seats))
    seats = on_cpu if arch == "cpu" else seats_of(load_search_space(arch).arch, None)
    environment = environment_on(seats, arch)
    workload = Workload.on(arch, None, network=given.model, batch=given.batch)
    print(
        f"{workload} on {len(seats)} x {environment.device}, torch {torch.__version__}", flush=True
    )
    known = StepSearch(workload.graph, load_search_space(arch), Crew([None]), Memory())
    built_s = build_all(workload, wanted_of(known, given.candidates), seats)
    print(f"kernels built in {built_s:.1f} s", flush=True)
    runs: dict[str, dict[str, object]] = {}
    seconds: dict[str, list[float]] = {"one": [], "all": []}
    for name in ("one", "all", "all", "one"):
        used = seats[:1] if name == "one" else seats
        runs[name] = found = run(workload, used, given.candidates)
        seconds[name].append(found["seconds"])
        rows = found["rows"]
        good = sum(isinstance(outcome, Measured) for outcome in rows.values())
        text = f"{found['seconds']:.2f} s, {len(rows)} candidates, {good} measured"
        print(f"{name}: {len(used)} workers, {text}, cover {found['cover_us']:.1f} us", flush=True)
    one, every = runs["one"], runs["all"]
    assert set(one["rows"]) == set(every["rows"]), "not the same candidates"
    speedup = sum(seconds["one"]) / sum(seconds["all"])
    print(f"from the first candidate to the last: {speedup:.3f} times as fast", flush=True)
    result = race(workload, seats[0], [one["plan"], every["plan"]])
    print(f"the plan of all by that of one: {result}", flush=True)
    if given.json is not None:
        document = {
            "environment": environment.to_json(),
            "workload": workload.to_json(),
            "gpus": len(seats),
            "candidates": len(one["rows"]),
            "built_s": built_s,
            "one_s": seconds["one"],
            "all_s": seconds["all"],
            "speedup": speedup,
            "race": result,
        }
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
