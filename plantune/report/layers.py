"""Where the framework's time goes by layer, and what a plan's steps made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.report.tables import config_text

Timed = Sequence[tuple[Step, Candidate, float | None]]


@dataclass(frozen=True)
class LayerTime:
    """The framework's time in one module; a backward op counts for its module."""

    layer: str
    ops: tuple[str, ...]
    framework_us: float


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
        """Negative where the framework's kernels alone are faster."""
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
    """The slowest first."""
    times: dict[str, float] = {}
    ops: dict[str, dict[str, None]] = {}
    for step, _, us in framework:
        layer = layer_of(step.name)
        times[layer] = times.get(layer, 0.0) + (us or 0.0)
        ops.setdefault(layer, {}).update(dict.fromkeys(step.ops))
    found = [LayerTime(layer, tuple(ops[layer]), us) for layer, us in times.items()]
    return sorted(found, key=lambda layer: -layer.framework_us)


def by_step(planned: Timed, framework: Timed) -> list[StepTime]:
    """What removed most first."""
    alone = {step.name: us for step, _, us in framework}
    found = [_step_time(step, candidate, us, alone) for step, candidate, us in planned]
    return sorted(found, key=lambda item: -(item.removed_us or 0.0))


def _step_time(
    step: Step, candidate: Candidate, us: float | None, alone: Mapping[str, float | None]
) -> StepTime:
    covered = [alone.get(node.name) for node in step.nodes]
    known = [each for each in covered if each is not None]
    return StepTime(
        step=step.name,
        layers=tuple(dict.fromkeys(layer_of(node.name) for node in step.nodes)),
        ops=step.ops,
        candidate=config_text(candidate.family, candidate.config),
        framework_us=sum(known) if len(known) == len(covered) else None,
        plan_us=us,
    )


def total_us(timed: Timed) -> float:
    return sum(us or 0.0 for _, _, us in timed)
