"""Which plan runs a graph: the given one, a stored one, or the framework's kernels."""

from __future__ import annotations

import warnings

import torch

from plantune.environment import environment_of
from plantune.errors import BuildError, CudaError, IllegalCandidate, InvalidPlan, WrongResult
from plantune.graph.graph import Graph
from plantune.plan import Plan, check_plan
from plantune.plan_rows import Found
from plantune.planning import default_plan, problem_of
from plantune.runtime.live_state import HeldTensors
from plantune.runtime.pool import Pool, device_of
from plantune.runtime.recheck import recheck
from plantune.space.search_space import SearchSpace
from plantune.stored_plans import find_stored_plan

# What a plan may raise that is none for this machine as it is now: other libraries, less memory.
CANNOT_RUN = (
    InvalidPlan,
    IllegalCandidate,
    BuildError,
    CudaError,
    WrongResult,
    torch.OutOfMemoryError,
)


class NoStoredPlan(UserWarning):
    """A known network runs from the framework's kernels, because nothing better is known."""


class OtherMachine(UserWarning):
    """A plan was made on another machine or with other versions of what it runs on."""


def pool_for(
    graph: Graph,
    space: SearchSpace,
    held: HeldTensors,
    name: str,
    *,
    given: Plan | None,
    look: bool,
) -> Pool:
    """Instances of the best plan there is for a graph; `look` says whether stored ones count.

    A stored plan that cannot run here is passed over with a warning.
    """
    if given is not None and given.graph == graph.digest:
        return Pool(graph, given, space, held)
    here = environment_of(device_of(held.module))
    found = find_stored_plan(problem_of(graph, space, network=name), here) if look else None
    if found is not None and found.match == "foreign":
        warnings.warn(
            f"the stored plan {found.id} is for another chip: expected {here.arch}, got "
            f"{found.environment.arch} ({found.environment.device}); the framework's kernels run",
            NoStoredPlan,
            stacklevel=2,
        )
    elif found is not None:
        pool = _pool_of_stored(found, graph, space, held)
        if pool is not None:
            return pool
    return Pool(graph, default_plan(graph, space, network=name), space, held)


def _pool_of_stored(
    found: Found, graph: Graph, space: SearchSpace, held: HeldTensors
) -> Pool | None:
    """The pool of a stored plan with one instance made, None where it cannot run here.

    One that was made elsewhere must first compute the network here.
    """
    try:
        check_plan(found.plan, graph, space)
        pool = Pool(graph, found.plan, space, held)
        pool.lease().release()
        from_elsewhere = found.match != "exact" or found.plan.origin == "predicted"
        if from_elsewhere and found.plan.runner == "program":
            recheck(graph, found.plan, space, held.module)
    except CANNOT_RUN as error:
        warnings.warn(
            f"the stored plan {found.id} cannot run here, the framework's kernels do: {error}",
            NoStoredPlan,
            stacklevel=2,
        )
        return None
    if found.plan.origin == "predicted":
        warnings.warn(
            f"the plan for {found.plan.network} was predicted for {found.plan.arch}, nothing of it "
            "was measured; `plantune verify` or `plantune search` measures it here",
            OtherMachine,
            stacklevel=2,
        )
    elif found.match == "compatible":
        differences = environment_of(device_of(held.module)).differences(found.environment)
        told = ", ".join(f"{key} {then!r}, now {now!r}" for key, (now, then) in differences.items())
        warnings.warn(
            f"the plan for {found.plan.network} was measured elsewhere ({told}); "
            "`plantune verify` checks it here",
            OtherMachine,
            stacklevel=2,
        )
    return pool
