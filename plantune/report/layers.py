"""Where the framework's time goes by layer, and what a plan's steps made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.report.reasons import rejected_text
from plantune.report.tables import config_text


@dataclass(frozen=True)
class MeasuredStep:
    """A step with what became of its timing."""

    step: Step
    candidate: Candidate
    outcome: Outcome

    @property
    def us(self) -> float | None:
        """None if it could not be timed."""
        return self.outcome.median_us if isinstance(self.outcome, Measured) else None


Timed = Sequence[MeasuredStep]


@dataclass(frozen=True)
class LayerTime:
    """The framework's time in one module, None if one of its ops could not be timed; a backward op
    counts for its module.
    """

    layer: str
    ops: tuple[str, ...]
    framework_us: float | None


@dataclass(frozen=True)
class StepTime:
    """One step of a plan, and the framework's time of the ops that it covers."""

    step: str
    layers: tuple[str, ...]
    ops: tuple[str, ...]
    candidate: str
    framework_us: float | None
    plan_us: float | None

    @property
    def removed_us(self) -> float | None:
        """Negative if the framework's kernels alone are faster."""
        if self.framework_us is None or self.plan_us is None:
            return None
        return self.framework_us - self.plan_us

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "removed_us": self.removed_us}


def layer_of(node: str) -> str:
    """The module of a node: `stem.1` of `stem.1/conv2d` and of `d(stem.1/conv2d)/add_2`."""
    inner = node
    while inner.startswith("d("):
        inner = inner[2:]
    return inner.partition("/")[0].rstrip(")") or inner


def by_layer(framework: Timed) -> list[LayerTime]:
    """The slowest first, those without a time last."""
    times: dict[str, list[float | None]] = {}
    ops: dict[str, dict[str, None]] = {}
    for timed in framework:
        layer = layer_of(timed.step.name)
        times.setdefault(layer, []).append(timed.us)
        ops.setdefault(layer, {}).update(dict.fromkeys(timed.step.ops))
    found = [LayerTime(layer, tuple(ops[layer]), _sum(each)) for layer, each in times.items()]
    return sorted(found, key=lambda layer: -(layer.framework_us or 0.0))


def by_step(planned: Timed, framework: Timed) -> list[StepTime]:
    """Sorted by the time that each step saves, the most first."""
    alone: dict[str, float | None] = {}
    for timed in framework:  # a call of several ops counts where the first one is
        first, *rest = (node.name for node in timed.step.nodes)
        alone |= {first: timed.us, **dict.fromkeys(rest, None if timed.us is None else 0.0)}
    found = [_step_time(timed, alone) for timed in planned]
    return sorted(found, key=lambda item: -(item.removed_us or 0.0))


def _step_time(timed: MeasuredStep, alone: Mapping[str, float | None]) -> StepTime:
    step, candidate = timed.step, timed.candidate
    return StepTime(
        step=step.name,
        layers=tuple(dict.fromkeys(layer_of(node.name) for node in step.nodes)),
        ops=step.ops,
        candidate=config_text(candidate),
        framework_us=_sum([alone.get(node.name) for node in step.nodes]),
        plan_us=timed.us,
    )


def _sum(times: Sequence[float | None]) -> float | None:
    known = [us for us in times if us is not None]
    return sum(known) if len(known) == len(times) else None


def compared(steps: Sequence[StepTime]) -> dict[str, Any]:
    """The sums of both sides over the steps of which both times are known, and their number."""
    both = [s for s in steps if s.framework_us is not None and s.plan_us is not None]
    return {
        "framework_us": sum(step.framework_us or 0.0 for step in both),
        "plan_us": sum(step.plan_us or 0.0 for step in both),
        "compared_steps": len(both),
    }


def untimed(*sides: Timed) -> dict[str, str]:
    """Why each step without a time has none, by its name and candidate."""
    return {
        f"{timed.step.name} with {config_text(timed.candidate)}":
            rejected_text(timed.outcome)
        for side in sides
        for timed in side
        if isinstance(timed.outcome, Rejected)
    }  # fmt: skip
