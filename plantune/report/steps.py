"""Each step of a plan beside what else was tried for it, and the least it could take here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plantune.base.outcome import Measured
from plantune.devices.gpus import device_for
from plantune.errors import UnsupportedDevice
from plantune.graph import Graph, Step
from plantune.kernels.family import Candidate
from plantune.measure import roofline
from plantune.plans.checked_plan import check_plan
from plantune.plans.plan import Plan
from plantune.plans.step_times import StepTimes
from plantune.report.covers import OtherCover, Trials, measured_of, trials_json
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
    kept: StepTimes | None = None
    covers: tuple[OtherCover, ...] = ()

    @property
    def chosen_us(self) -> float | None:
        outcome = self.trials.get(self.chosen)
        if isinstance(outcome, Measured):
            return outcome.median_us
        return None if self.kept is None else self.kept.us

    @property
    def about_us(self) -> float:
        """What the step takes, or a guess at it."""
        return self.guess_us if self.chosen_us is None else self.chosen_us

    @property
    def tried(self) -> int:
        """Candidates, those for other covers included."""
        return len(self.trials) + sum(len(cover.trials) for cover in self.covers)

    @property
    def runner_up(self) -> tuple[Candidate, float] | None:
        """The fastest of those that were not chosen, with its time."""
        others = ((c, o.median_us) for c, o in measured_of(self.trials) if c != self.chosen)
        return next(others, None if self.kept is None else self.kept.runner_up)

    @property
    def margin(self) -> float | None:
        """By which part of the chosen one's time the runner-up is slower; negative if faster."""
        if self.chosen_us is None or self.runner_up is None:
            return None
        return self.runner_up[1] / self.chosen_us - 1

    def to_json(self) -> dict[str, Any]:
        runner_up = None
        if self.runner_up is not None:
            runner_up = {**self.runner_up[0].to_json(), "median_us": self.runner_up[1]}
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
            "runner_up": runner_up,
            **trials_json(self.trials),
            "other_covers": [cover.to_json() for cover in self.covers],
        }


def step_roofline_us(step: Step, arch: str) -> float | None:
    """The step's roofline on this machine; None for an arch that is not here."""
    try:
        return roofline.step_us(step, device_for(load_arch(arch)))
    except UnsupportedDevice:
        return None


def plan_steps(plan: Plan, graph: Graph) -> list[tuple[Step, Candidate]]:
    """The steps that run in each pass, in order; raises InvalidPlan if it does not fit."""
    checked = check_plan(plan, graph, load_search_space(plan.problem.arch))
    return [(chosen.step, chosen.candidate) for chosen in checked.of_pass]
