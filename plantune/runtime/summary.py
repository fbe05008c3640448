"""What a plan makes of a module, in a few lines: how fast, which steps, and what is torch's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from plantune.graph.graph import Graph
from plantune.graph.ops import OPS
from plantune.plans import written_words
from plantune.plans.plan import PROGRAM, Plan
from plantune.plans.standing import Standing
from plantune.runtime.calls.planned import Planned

FRAMEWORK, VIEW = "framework", "view"
# How a call that the plan's own program ran is called.
BY_PROGRAM = ("captured", "planned")
HOW_TO_RACE = "plantune.tune(module, *inputs) searches for the fastest one"
NOT_RACED = f"it was not raced; {HOW_TO_RACE}"
NO_RACE = f"no plan was raced; {HOW_TO_RACE}"
PREDICTED = "it was predicted, and nothing of it was measured"
ELSEWHERE = "that race was on another machine; plantune.tune(module, *inputs) has one here"


@dataclass(frozen=True)
class FrameworkOp:
    """An op of torch's that plantune has no kernels for, and the line that calls it."""

    name: str
    op: str
    line: str


@dataclass(frozen=True)
class Summary:
    """`headline` says in one sentence what runs the call and how fast. `ratio` is the time of a
    call as a part of that of the best of the framework's routes, `low` and `high` its interval of
    95 %; None if nothing was raced. `families` has the number of steps that each kernel family of
    plantune runs, `framework` the number of those that torch runs.
    """

    headline: str
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
        counts = f"{_counted(steps, 'step')}: {kernels}, {self.framework} by torch's{views}"
        lines = [self.headline, self.call, *self.notes, counts]
        if self.framework_ops:
            ops = _counted(len(self.framework_ops), "op")
            lines.append(f"{ops} for which plantune has no kernels:")
        lines += [f"  {op.name}: {op.op}  {op.line}".rstrip() for op in self.framework_ops]
        return "\n".join(lines)

    __repr__ = __str__


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


@dataclass(frozen=True)
class Runs:
    """How such calls run now, and why, as `LastCall` says it; `elsewhere` is where the plan's race
    was on another machine.
    """

    how: str
    reason: str
    elsewhere: bool = False

    @property
    def route(self) -> str:
        return PROGRAM if self.how in BY_PROGRAM else self.how


def runs_of(planned: Planned) -> Runs:
    """How calls of this kind run from now on, and why."""
    call = planned.call
    return Runs(call.how, call.reason, elsewhere=planned.pool.match == "compatible")


def headline_of(plan: Plan, runs: Runs) -> str:
    """What runs the plan's call and how fast, in one sentence."""
    if runs.route != plan.route:  # by what calls have shown since, or with frozen weights
        return Standing(runs.route).headline(runs.reason)
    if plan.origin == written_words.PREDICTED:
        return Standing(runs.route).headline(PREDICTED)
    why = NOT_RACED if runs.route == PROGRAM else NO_RACE
    return Standing.of(plan.route, plan.evidence).headline(why)


def summary_of(plan: Plan, graph: Graph, lines: Mapping[str, str], runs: Runs) -> Summary:
    """`lines` are those of the user's code by the names of nodes."""
    families = Counter(choice.candidate.family for choice in plan.choices)
    framework, views = families.pop(FRAMEWORK, 0), families.pop(VIEW, 0)
    unknown = tuple(
        FrameworkOp(node.name, node.op, lines.get(node.name, ""))
        for node in graph.nodes
        if node.op not in OPS
    )
    return Summary(
        headline_of(plan, runs),
        f"{plan.problem}: {plan.problem.call_text}",
        _number(plan, "ratio"),
        _number(plan, "ratio_low"),
        _number(plan, "ratio_high"),
        dict(families.most_common()),
        framework,
        views,
        unknown,
        tuple(_notes(plan, runs)),
    )


def _notes(plan: Plan, runs: Runs) -> list[str]:
    """The numbers of the plan's race."""
    details = Standing.of(plan.route, plan.evidence).details()
    if runs.route != plan.route:
        details = [f"in the plan's race: {line}" for line in details]
    return [*details, ELSEWHERE] if details and runs.elsewhere else details


def _number(plan: Plan, name: str) -> float | None:
    value = plan.evidence.get(name)
    return float(value) if isinstance(value, (int, float)) else None
