"""Lists all candidates of a search, for the pool of its workers and by its studies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plantune.devices.cuda.capture import no_collection
from plantune.measure.worker.client import Worker
from plantune.search.builds import Builds
from plantune.search.contenders.contender import GUESS, Contenders, distinct
from plantune.search.contenders.warm_start import quick_kernels
from plantune.search.measuring import CACHES, StoredTrials, WorkerMeasurer
from plantune.search.step_search import StepSearch
from plantune.search.studies import Studies
from plantune.search.worker_pool import WorkerPool

if TYPE_CHECKING:
    from plantune.search.search import Search


def listed_steps(
    search: Search, known: Contenders, builds: Builds, workers: Sequence[Worker]
) -> StepSearch:
    """All candidates, ready to be measured by these workers. What the first plans need is compiled
    while they are listed.
    """
    graph, space = search.sought.graph, search.sought.space
    first = distinct([*known.plans()[:1], *known.plans(GUESS)])
    builds.want(c for plan in first for c in quick_kernels(plan, graph, space))
    store = StoredTrials(search.database, search.environment, search.options.fresh)
    pool, studies = _pool(search, workers), _studies(search)
    with no_collection():  # looking through all that was listed takes a fifth of the time
        return StepSearch(graph, space, pool, store, builds=builds, studies=studies)


def _pool(search: Search, workers: Sequence[Worker]) -> WorkerPool:
    seed, machine = search.options.seed, search.log.machine
    measurers = [
        WorkerMeasurer(worker, search.sought.space, seed, search.budget, machine)
        for worker in workers
    ]
    return WorkerPool(measurers, [slot.name for slot in search.options.slots], search.board)


def _studies(search: Search) -> Studies:
    options, arch = search.options, search.sought.space.arch
    storage = options.storage if search.board is None else None  # a board has all trials
    scope = f"{search.environment.key} {CACHES[arch.kind]}"
    return Studies(storage, options.seed, scope, fresh=options.fresh, arch=arch.name)
