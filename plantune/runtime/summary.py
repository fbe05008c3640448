"""What a plan makes of a module, in a few lines: how fast, which steps, and what is torch's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from plantune.graph.graph import Graph
from plantune.graph.ops import OPS
from plantune.plan import Plan
from plantune.rivals import loss_text, ratio_text, runner_text

FRAMEWORK, VIEW = "framework", "view"


@dataclass(frozen=True)
class FrameworkOp:
    """An op of torch's that plantune has no kernels for, and the line that calls it."""

    name: str
    op: str
    line: str


@dataclass(frozen=True)
class Summary:
    """`ratio` is the time of a call as a part of that of the best of the framework's ways, `low`
    and `high` its interval of 95 %; None if nothing was raced. `families` has the number of steps
    that each kernel family of plantune runs, `framework` the number of those that torch runs.
    """

    call: str
    ratio: float | None
    low: float | None
    high: float | None
    families: Mapping[str, int]
    framework: int
    views: int
    framework_ops: tuple[FrameworkOp, ...]
    notes: tuple[str, ...]

    @property
    def ours(self) -> int:
        """How many steps plantune's kernels run."""
        return sum(self.families.values())

    def __str__(self) -> str:
        named = ", ".join(f"{count} {family}" for family, count in self.families.items())
        kernels = f"{self.ours} by plantune's kernels" + (f" ({named})" if named else "")
        steps = self.ours + self.framework + self.views
        views = f", {_counted(self.views, 'view')}" if self.views else ""
        told = f"{_counted(steps, 'step')}: {kernels}, {self.framework} by torch's{views}"
        lines = [self.call, *self.notes, told]
        if self.framework_ops:
            ops = _counted(len(self.framework_ops), "op")
            lines.append(f"{ops} for which plantune has no kernels:")
        lines += [f"  {op.name}: {op.op}  {op.line}".rstrip() for op in self.framework_ops]
        return "\n".join(lines)

    __repr__ = __str__


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def summary_of(plan: Plan, graph: Graph, lines: Mapping[str, str]) -> Summary:
    """`lines` are those of the user's code by the names of nodes."""
    families = Counter(choice.candidate.family for choice in plan.choices)
    framework, views = families.pop(FRAMEWORK, 0), families.pop(VIEW, 0)
    unknown = tuple(
        FrameworkOp(node.name, node.op, lines.get(node.name, ""))
        for node in graph.nodes
        if node.op not in OPS
    )
    return Summary(
        f"{plan.problem}: {plan.problem.call_text}",
        _number(plan, "ratio"),
        _number(plan, "ratio_low"),
        _number(plan, "ratio_high"),
        dict(families.most_common()),
        framework,
        views,
        unknown,
        tuple(filter(None, _notes(plan))),
    )


def _notes(plan: Plan) -> tuple[str | None, ...]:
    low, high = (_number(plan, name) for name in ("ratio_low", "ratio_high"))
    ratio = ratio_text(plan.evidence)
    if ratio is None:
        ratio = "this plan was not raced; plantune.tune(module, *inputs) searches for one"
    elif low is not None and high is not None:
        ratio = f"{ratio} (95 % interval {low:.3f} to {high:.3f})"
    return ratio, runner_text(plan.runner, plan.evidence), loss_text(plan.evidence)


def _number(plan: Plan, name: str) -> float | None:
    value = plan.evidence.get(name)
    return float(value) if isinstance(value, (int, float)) else None
