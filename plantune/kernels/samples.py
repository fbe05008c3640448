"""A cheap kernel of each CUDA family, to see whether they compile here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from plantune.graph.fusions import all_fusions
from plantune.graph.partition import alternatives
from plantune.graph.step import Step
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Candidate
from plantune.kernels.registry import all_families, candidates, estimate_us
from plantune.space.search_space import SearchSpace

# Every family has a step in one of these.
NETWORKS = ("se_resnet9_fixup", "resnet18")


def samples(space: SearchSpace) -> Iterator[tuple[Step, Candidate]]:
    """For each CUDA family of an arch its smallest step, with the config that is guessed best."""
    for name, family in all_families().items():
        if isinstance(family, CudaFamily) and name in space.families:
            found = _sample(family, space)
            if found is not None:
                yield found


def _sample(family: CudaFamily[Any], space: SearchSpace) -> tuple[Step, Candidate] | None:
    fits = (step for step in _steps(space.arch.name) if family.why_not_step(step) is None)
    for step in sorted(fits, key=lambda step: (len(step.nodes), step.flops)):
        legal = [c for c in candidates(step, space) if c.family == family.name]
        if legal:
            return step, min(legal, key=lambda c: estimate_us(step, c, space.arch))
    return None


@cache
def _steps(arch: str) -> tuple[Step, ...]:
    from plantune.workload import Workload

    fusions = tuple(all_fusions())
    return tuple(
        step
        for network in NETWORKS
        for step in alternatives(Workload(network, 1, 3, "infer", "float16", arch).graph, fusions)
    )
