"""What workers on other GPUs do while the first one races: compile the framework's routes, prove
the plan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from plantune.base.warning import warn
from plantune.errors import OutOfTime, PlantuneError, UnsupportedDevice
from plantune.measure.subject import Raced
from plantune.measure.timing import Effort
from plantune.measure.worker.client import Worker
from plantune.plans.plan import Plan
from plantune.search.budget import Budget

# The time that must be left for a route of torch.compile to join the race; others always join.
COMPILING_S = {"compile-default": 25.0, "compile-reduce-overhead": 25.0}
# For each node of the forward pass if that is more: 47 s for densenet121's 1,822, 18 to 22 s for
# the 777 to 939 of four others of torchvision (H200, 8 cores beside a search, 2026-11-23).
COMPILING_NODE_S = 0.03
# Where the kernels are in inductor's cache already.
COMPILED_AHEAD_S = 12.0
# A few calls: what counts is that they run, and that the plan's outputs are right.
CALLS_S = 0.2


def start_all(workers: Sequence[Worker], cut_at: float) -> None:
    """Starts all workers in parallel; raises what the first one raises, and OutOfTime. If another
    one does not start, its first request says so.
    """
    first, *others = workers

    def start(worker: Worker) -> None:
        with suppress(PlantuneError):
            worker.start(cut_at)

    threads = [threading.Thread(target=start, args=(worker,), daemon=True) for worker in others]
    for thread in threads:
        thread.start()
    first.start(cut_at)
    for thread in threads:
        thread.join(max(cut_at - time.monotonic(), 0.0))


def compiled_elsewhere(
    workers: Sequence[Worker], raced: Raced, routes: Sequence[str], budget: Budget, seed: int
) -> Callable[[], frozenset[str]]:
    """Compiles the routes on the first of the workers, in the background, so that inductor finds
    them in its cache; gives a function that says which of them are ready.
    """
    ready: set[str] = set()

    def compile_all() -> None:
        for name in routes:
            effort = budget.limited(Effort(budget_s=CALLS_S), "ranking")
            with suppress(PlantuneError):  # then it compiles in the race, if there is time
                race = workers[0].race(raced, None, (name,), effort, seed)
                ready.update(race.timings)

    if workers and routes:
        threading.Thread(target=compile_all, daemon=True).start()
    return lambda: frozenset(ready)


def prove_elsewhere(workers: Sequence[Worker], raced: Raced, plan: Plan, budget: Budget) -> None:
    """Has each worker compare the plan's outputs with the framework's; raises WrongResult,
    MeasureTimeout or WorkerDied of the first one on which it fails.

    A GPU that is lost, or for which no time is left, proves nothing, which is warned of.
    """
    effort = budget.limited(Effort(budget_s=CALLS_S), "racing")

    def prove(worker: Worker) -> str | None:
        """Why it proves nothing; said in the caller's thread, whose lines a warning names."""
        try:
            worker.race(raced, plan, ("eager",), effort)
        except (OutOfTime, UnsupportedDevice) as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(workers)) as pool:
        for why in pool.map(prove, workers):
            if why is not None:
                warn(f"the plan was not proved on every GPU: {why}")
