"""A predicted plan, and what of kernels is known for a chip that is not here: what they take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from plantune.base.outcome import Rejected
from plantune.devices.cuda.build import Binary
from plantune.graph import Step
from plantune.kernels.cuda.cuda_family import CudaFamily, block_shared_bytes
from plantune.kernels.family import Candidate
from plantune.kernels.resolved import ResolvedStep
from plantune.plans.plan import Plan
from plantune.plans.planner.candidates import Key, StepCandidate
from plantune.search import policy
from plantune.search.costs import Costs
from plantune.space.arch import Arch


@dataclass(frozen=True)
class Footprint:
    """What a block of a kernel takes, as the assembler counted it; zeros if nothing counts it."""

    threads: int = 0
    registers: int = 0
    shared_bytes: int = 0


@dataclass(frozen=True)
class PredictedStep:
    """A step of a predicted plan; `footprint` is None if nothing is compiled."""

    step: Step
    candidate: Candidate
    estimate_us: float
    footprint: Footprint | None


@dataclass(frozen=True)
class Prediction:
    """A predicted plan, its steps in running order, and what was rejected."""

    plan: Plan
    steps: tuple[PredictedStep, ...]
    built: int
    rejected: tuple[tuple[Step, Candidate, Rejected], ...]


class PredictedCosts(Costs):
    """Estimates alone, of what builds and fits the chip."""

    def __init__(self) -> None:
        super().__init__()
        # When closed, what was not built cannot be used.
        self.closed = False
        self.footprints: dict[Key, Footprint] = {}
        self._failures: Counter[tuple[object, ...]] = Counter()

    def of(self, candidate: StepCandidate) -> float:
        """Microseconds; infinite for what cannot be used."""
        given_up = self.closed or self._failures[_configs_of(candidate)] >= policy.FAILURES_MAX
        unknown = given_up and not self.knows(candidate)
        return math.inf if candidate.key in self.outcomes or unknown else candidate.estimate_us

    def knows(self, candidate: StepCandidate) -> bool:
        """Whether it was built; what compiles nothing counts as built."""
        return candidate.key in self.footprints or not candidate.build_s

    def reject(self, candidate: StepCandidate, rejected: Rejected) -> None:
        self.outcomes[candidate.key] = rejected
        self._failures[_configs_of(candidate)] += 1


def _configs_of(candidate: StepCandidate) -> tuple[object, ...]:
    return candidate.step.signature, candidate.cluster


def footprint_of(chosen: ResolvedStep, built: object, arch: Arch) -> Footprint | Rejected:
    """What a block of a built kernel takes; rejected if a thread's registers do not suffice."""
    family = chosen.family
    if not isinstance(built, Binary) or not isinstance(family, CudaFamily):
        return Footprint()
    used = built.usage["run"]
    if used.spill_bytes:
        return Rejected("build", f"it spills {used.spill_bytes} bytes of a thread's registers")
    parts, config = chosen.parts, chosen.config
    shared = block_shared_bytes(used, arch) + family.shared_bytes(parts, config, arch)
    return Footprint(family.threads(parts, config), used.registers, shared)


def row_of(chosen: ResolvedStep, footprints: Mapping[Key, Footprint], arch: Arch) -> PredictedStep:
    """A step of a predicted plan with what its kernel takes."""
    footprint = footprints.get((chosen.step.signature, chosen.candidate))
    return PredictedStep(chosen.step, chosen.candidate, chosen.estimate_us(arch), footprint)
