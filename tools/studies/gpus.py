"""How much faster several GPUs measure than one: the same candidates, from the first to the last.

    python tools/studies/gpus.py [--batch 128] [--candidates 96] [--slots 2] [--json FILE]

Kernels are compiled first, once for all runs, which go one, all, all, one, so that what changes
with time concerns both alike. Each run has fresh workers and knows nothing. In the end the plans of
the best covers of all runs race in turns on the first GPU: what those of the two runs on one GPU
differ by is the noise. On a machine without a GPU, `--slots` workers share the CPU, which shows
that it works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path

import torch

from plantune.base.outcome import Measured, Outcome
from plantune.devices.gpus import Slot, best_arch, slots_of
from plantune.graph.graph import Graph
from plantune.kernels.family import Candidate
from plantune.measure.machine_state import gpu_watcher, machine_for
from plantune.measure.timing import Effort, Timing, ratio_interval
from plantune.measure.worker.client import Worker
from plantune.plans.plan import Choice, Plan
from plantune.plans.planner.candidates import StepCandidate
from plantune.plans.workload import Workload
from plantune.search.budget import Budget
from plantune.search.builds import builds_for
from plantune.search.contenders.elsewhere import start_all
from plantune.search.contenders.of_covers import plan_of
from plantune.search.measuring import WorkerMeasurer
from plantune.search.results import silent
from plantune.search.session import worker_for
from plantune.search.shared.slots import environment_on
from plantune.search.step_search import StepSearch
from plantune.search.worker_pool import WorkerPool
from plantune.space.search_space import load_search_space

LONG_S = 3600.0
ORDER = ("one", "all", "all", "one")
# Plans of so many covers of each run race.
COVERS, RACE_S, MAKES = 2, 10.0, 5


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


def build_all(workload: Workload, wanted: list[StepCandidate], slots: tuple[Slot, ...]) -> float:
    start, arch = time.monotonic(), load_search_space(workload.arch).arch
    worker = worker_for(workload.graph, workload.problem, slot=slots[0])
    with worker, builds_for(arch, worker) as builds:
        builds.want(wanted)
        for candidate in wanted:
            builds.wait([candidate], LONG_S)
    return time.monotonic() - start


@dataclass(frozen=True)
class Found:
    """Of one run: seconds from the first candidate to the last outcome, outcomes, and the plans of
    its best covers.
    """

    seconds: float
    rows: dict[tuple[str, Candidate], Outcome]
    plans: tuple[Plan, ...]

    @property
    def times_us(self) -> dict[tuple[str, Candidate], float]:
        return {k: o.median_us for k, o in self.rows.items() if isinstance(o, Measured)}


def started(workload: Workload, slots: Sequence[Slot], stack: ExitStack) -> list[Worker]:
    """A worker on each slot, and another one in reserve: none of them starts later."""
    made = [worker_for(workload.graph, workload.problem, slot=slot) for slot in slots]
    workers = [stack.enter_context(worker) for worker in made]
    start_all(workers, time.monotonic() + 120.0)
    for worker in workers:
        worker.settle()
    return workers


def run(workload: Workload, slots: Sequence[Slot], workers: Sequence[Worker], count: int) -> Found:
    space, memory, budget = load_search_space(workload.arch), Memory(), Budget(LONG_S)
    graph, problem = workload.graph, workload.problem
    machine = machine_for(space.arch.kind, gpu_watcher(workload.arch, slots[0].gpu))
    measurers = [WorkerMeasurer(each, space, 0, budget, machine) for each in workers]
    pool = WorkerPool(measurers, [slot.name for slot in slots])
    steps = StepSearch(graph, space, pool, memory)
    wanted = wanted_of(steps, count)
    start = time.monotonic()
    steps.measure_all(wanted, budget, silent)
    seconds = memory.at[-1] - start
    covers = [cover for _, cover in steps.covers(COVERS)]
    plans = [plan_of(cover, graph, space, network=problem.network) for cover in covers]
    plans = [replace(plan, branches=space.arch.kind == "cuda") for plan in plans]
    return Found(seconds, memory.rows, tuple(plans))


def race(graph: Graph, worker: Worker, runs: Sequence[Found]) -> list[tuple[Plan, Timing]]:
    """Each run's fastest plan, with its time: all plans in turns, equal ones once. Each is
    made several times: where the memory of one happens to be changes its time by some percent.
    """
    different = list({chosen(plan): plan for found in runs for plan in found.plans}.values())
    samples: dict[object, tuple[float, ...]] = {}
    for _ in range(MAKES):
        timings = worker.time_programs(graph, different, Effort(budget_s=RACE_S / MAKES))
        for plan, timing in zip(different, timings, strict=True):
            assert isinstance(timing, Timing), timing
            samples[chosen(plan)] = (*samples.get(chosen(plan), ()), *timing.samples_us)
    times = {key: Timing(found) for key, found in samples.items()}
    best = [min(f.plans, key=lambda plan: times[chosen(plan)].median_us) for f in runs]
    return [(plan, times[chosen(plan)]) for plan in best]


def chosen(plan: Plan) -> tuple[frozenset[Choice], bool]:
    """What a plan runs."""
    return frozenset(plan.choices), plan.branches


def spread(run: Found, other: Found) -> dict[str, float]:
    """A run's times by those of another one, of the same candidates."""
    times, by = run.times_us, other.times_us
    ratios = [times[key] / by[key] for key in times.keys() & by.keys()]
    if not ratios:
        return {}
    median, near = statistics.median(ratios), sum(0.95 < ratio < 1.05 for ratio in ratios)
    return {"median": median, "within_5_percent": near / len(ratios)}


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="se_resnet9_fixup")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--candidates", type=int, default=96)
    parser.add_argument("--slots", type=int, default=2, help="workers on a machine without a GPU")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    given, arch = asked(), best_arch()
    on_cpu = tuple(Slot(f"CPU {number}") for number in range(given.slots))
    slots = on_cpu if arch == "cpu" else slots_of(load_search_space(arch).arch, None)
    environment = environment_on(slots, arch)
    workload = Workload.on(arch, None, network=given.model, batch=given.batch)
    print(
        f"{workload} on {len(slots)} x {environment.device}, torch {torch.__version__}", flush=True
    )
    on = [slots[:1] if name == "one" else slots for name in ORDER]
    known = StepSearch(workload.graph, load_search_space(arch), WorkerPool([None]), Memory())
    wanted = wanted_of(known, given.candidates)
    runs: list[Found] = []
    with ExitStack() as stack, ThreadPoolExecutor(1) as beside:
        built = beside.submit(build_all, workload, wanted, slots)
        workers = started(workload, [slot for used in on for slot in used], stack)
        print(f"kernels built in {built.result():.1f} s", flush=True)
        waiting = iter(workers)
        for name, used in zip(ORDER, on, strict=True):
            found = run(workload, used, list(islice(waiting, len(used))), given.candidates)
            runs.append(found)
            counts = f"{len(found.rows)} candidates, {len(found.times_us)} measured"
            print(f"{name}: {found.seconds:.2f} s, {counts}", flush=True)
        assert all(set(found.rows) == set(runs[0].rows) for found in runs), "other candidates"
        one, every = (of(ORDER, runs, name) for name in ("one", "all"))
        speedup = sum(found.seconds for found in one) / sum(found.seconds for found in every)
        print(f"from the first candidate to the last: {speedup:.3f} times as fast", flush=True)
        spreads = {"one_by_one": spread(*one), "all_by_one": spread(every[0], one[0])}
        print(f"times of the same candidates: {spreads}", flush=True)
        document: dict[str, object] = {
            "environment": environment.to_json(),
            "workload": workload.to_json(),
            "gpus": len(slots),
            "candidates": len(runs[0].rows),
            "built_s": built.result(),
            "order": ORDER,
            "seconds": [found.seconds for found in runs],
            "speedup": speedup,
            "candidates_times": spreads,
        }
        save(document, given.json)  # a race may fail
        raced = race(workload.graph, workers[-1], runs)
    save({**document, **told_of(raced)}, given.json)


def told_of(raced: Sequence[tuple[Plan, Timing]]) -> dict[str, object]:
    """Prints how each run's plan compares with the first one's, and gives the same as JSON."""
    ratios = [asdict(ratio_interval(timing, raced[0][1])) for _, timing in raced]
    for name, (plan, timing), ratio in zip(ORDER, raced, ratios, strict=True):
        same = chosen(plan) == chosen(raced[0][0])
        text = "the first plan" if same else f"{ratio['low']:.4f} to {ratio['high']:.4f} of it"
        print(f"plan of {name}: {timing.median_us:.1f} us, {text}", flush=True)
    return {
        "plans_us": [timing.median_us for _, timing in raced],
        "plans_by_the_first": ratios,
        "plans": [json.loads(plan.dumps()) for plan, _ in raced],
    }


def save(document: dict[str, object], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


def of(names: Sequence[str], runs: Sequence[Found], name: str) -> list[Found]:
    return [found for given, found in zip(names, runs, strict=True) if given == name]


if __name__ == "__main__":
    main()
