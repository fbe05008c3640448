"""Each step of a plan beside what else was tried for it, and the least it could take here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plantune.errors import UnsupportedDevice
from plantune.gpus import device_for
from plantune.graph.graph import Graph
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.measure import roofline
from plantune.outcome import Measured, Rejected
from plantune.plan import Plan, candidates_by_step, check_plan
from plantune.report.covers import OtherCover, Trials, measured_of, rejected_of, trials_json
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space


@dataclass(frozen=True)
class StepStory:
    """A step, the candidate that a plan chose, and every outcome that is stored for the step and
    for other steps over some of its ops.
    """

    step: Step
    chosen: Candidate
    trials: Trials
    roofline_us: float | None
    guess_us: float
    covers: tuple[OtherCover, ...] = ()

    @property
    def chosen_us(self) -> float | None:
        outcome = self.trials.get(self.chosen)
        return outcome.median_us if isinstance(outcome, Measured) else None

    @property
    def about_us(self) -> float:
        """What the step takes, or a guess at it."""
        return self.guess_us if self.chosen_us is None else self.chosen_us

    @property
    def measured(self) -> list[tuple[Candidate, Measured]]:
        """The fastest first."""
        return measured_of(self.trials)

    @property
    def rejected(self) -> list[tuple[Candidate, Rejected]]:
        return rejected_of(self.trials)

    @property
    def tried(self) -> int:
        """Candidates, those for other covers included."""
        return len(self.trials) + sum(len(cover.trials) for cover in self.covers)

    @property
    def runner_up(self) -> tuple[Candidate, Measured] | None:
        """The fastest of those that were not chosen."""
        return next((pair for pair in self.measured if pair[0] != self.chosen), None)

    @property
    def margin(self) -> float | None:
        """By which part of the chosen one's time the runner-up is slower; negative if faster."""
        if self.chosen_us is None or self.runner_up is None:
            return None
        return self.runner_up[1].median_us / self.chosen_us - 1

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step.name,
            "nodes": [node.name for node in self.step.nodes],
            "ops": list(self.step.ops),
            "phase": self.step.phase,
            "chosen": self.chosen.to_json(),
            "chosen_us": self.chosen_us,
            "guess_us": self.guess_us,
            "margin": self.margin,
            "roofline_us": self.roofline_us,
            **trials_json(self.trials),
            "other_covers": [cover.to_json() for cover in self.covers],
        }


def step_roofline_us(step: Step, arch: str) -> float | None:
    """What arithmetic and traffic take at this machine's best, as the graph defines them; None for
    an arch that is not here.

    Winograd and Karatsuba tiles need fewer products than that, so they may be below it.
    """
    try:
        device = device_for(load_arch(arch))
    except UnsupportedDevice:
        return None
    peak = roofline.peak(step, device)
    return max(step.flops / peak, step.traffic_bytes / roofline.bytes_per_us(device))


def plan_steps(plan: Plan, graph: Graph) -> list[tuple[Step, Candidate]]:
    """The steps that run in each pass, in order; raises InvalidPlan if it does not fit."""
    steps = check_plan(plan, graph, load_search_space(plan.problem.arch))
    chosen = candidates_by_step(plan, steps)
    return [(step, chosen[step.name]) for step in steps if step.phase != "refresh"]
