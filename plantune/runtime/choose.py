"""Which plan runs a graph: the given one, a stored one, or the framework's kernels."""

from __future__ import annotations

import warnings

from torch import nn

from plantune.environment import environment_of
from plantune.errors import BuildError, InvalidPlan
from plantune.graph.graph import Graph
from plantune.plan import Plan, check_plan
from plantune.plan_rows import Found, ProblemKey
from plantune.planning import default_plan
from plantune.runtime.pool import Pool, device_of
from plantune.space.search_space import SearchSpace
from plantune.stored_plans import find_stored_plan


class NoStoredPlan(UserWarning):
    """A known network runs from the framework's kernels, because nothing better is known."""


class OtherMachine(UserWarning):
    """A plan was made on another machine or with other versions of what it runs on."""


def pool_for(
    graph: Graph,
    space: SearchSpace,
    module: nn.Module,
    name: str,
    *,
    given: Plan | None,
    look: bool,
) -> Pool:
    """Instances of the best plan there is for a graph; `look` says whether stored ones count.

    A stored plan that cannot run here is passed over with a warning.
    """
    if given is not None and given.graph == graph.digest:
        return Pool(graph, given, space, module)
    default = default_plan(graph, space, network=name)
    here = environment_of(device_of(module))
    found = find_stored_plan(ProblemKey.of(default), here) if look else None
    if found is not None and found.match != "foreign":
        pool = _pool_of_stored(found, graph, space, module)
        if pool is not None:
            return pool
    return Pool(graph, default, space, module)


def _pool_of_stored(
    found: Found, graph: Graph, space: SearchSpace, module: nn.Module
) -> Pool | None:
    """The pool of a stored plan with one instance made, None where it cannot run here."""
    try:
        check_plan(found.plan, graph, space)
        pool = Pool(graph, found.plan, space, module)
        pool.lease().release()
    except (InvalidPlan, BuildError) as error:
        warnings.warn(
            f"the stored plan {found.id} cannot run here, the framework's kernels do: {error}",
            NoStoredPlan,
            stacklevel=2,
        )
        return None
    if found.match == "compatible":
        differences = environment_of(device_of(module)).differences(found.environment)
        told = ", ".join(f"{key} {then!r}, now {now!r}" for key, (now, then) in differences.items())
        warnings.warn(
            f"the plan for {found.plan.network} was measured elsewhere ({told}); "
            "`plantune verify` checks it here",
            OtherMachine,
            stacklevel=2,
        )
    return pool
