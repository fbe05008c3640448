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
from plantune.search import policy
from plantune.search.budget import Budget


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
            effort = budget.limited(Effort(budget_s=policy.RUN_AHEAD_S), "ranking")
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
    effort = budget.limited(Effort(budget_s=policy.RUN_AHEAD_S), "racing")

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
