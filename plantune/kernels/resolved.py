"""A step with the candidate that runs it, whose family was found by its name, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plantune.base.canonical import Attrs
from plantune.graph.step import Step
from plantune.kernels.chips import measured_arch
from plantune.kernels.family import AnyFamily, Candidate, Parts
from plantune.space.arch import Arch


@dataclass(frozen=True)
class ResolvedStep:
    """What a candidate's name stands for: its family, which has read the step."""

    step: Step
    candidate: Candidate
    family: AnyFamily
    parts: Parts

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def config(self) -> Attrs:
        return self.candidate.config

    def estimate_us(self, arch: Arch | None = None) -> float:
        """A guess at the time of one launch, on the chip of `arch`, else on the measured one."""
        measured = arch or measured_arch(min(self.family.arch_kinds))
        return self.family.estimate_us(self.parts, self.config, measured)

    def renamed(self, names: Mapping[str, str]) -> ResolvedStep:
        """The same on values with other names."""
        step = self.step.renamed(names)
        return ResolvedStep(step, self.candidate, self.family, self.family.parts(step))
