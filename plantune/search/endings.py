"""How a search ends without a plan of its own: no time for a race, or none got through one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from plantune.base.warning import warn
from plantune.devices.machine import Environment
from plantune.errors import CannotJudge, InvalidPlan, NoViableCandidate
from plantune.graph import Graph
from plantune.plans.database.opening import now_text
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.rows import COMPLETE, Found, StoredPlan
from plantune.plans.database.validation import check_stored_plan
from plantune.plans.plan import EAGER, Plan, named_as
from plantune.plans.problem import Problem
from plantune.search.contenders.contender import choose_alike
from plantune.search.contenders.known import plan_in_use, plan_without_search
from plantune.search.contenders.racing import FAILURES, Failed
from plantune.search.sought import Sought

# After these no plan is left: all failed, or the framework gives nothing to compare one with.
NOTHING_LEFT = (CannotJudge, NoViableCandidate)
# What a plan ends with that was right elsewhere and is not here.
REFUTED = (CannotJudge, *FAILURES)


def why_needless(graph: Graph, problem: Problem) -> str | None:
    """Why no kernel can be faster than another one; None if one may be."""
    if not graph.nodes:
        return "a call has no op that a kernel could run"
    results = {name: graph.types[name] for name in graph.outputs}
    empty = graph.inputs if problem.batch < 1 else [*results.items()]
    for name, type_ in empty:
        if not type_.numel:
            shape = "x".join(map(str, type_.shape))
            return f"{name} of shape {shape} has no elements, so there is nothing to compare"
    return None


@dataclass(frozen=True)
class Endings:
    """Keeps what runs in the place of a plan of the search. `failed` grows as plans fail."""

    sought: Sought
    database: PlanDatabase
    environment: Environment
    failed: list[Failed] = field(default_factory=list)

    def without_race(self) -> tuple[Plan, Found | None]:
        """The plan that calls use already, as it is stored, unless it failed; else what runs
        without a plan, which needs no race.
        """
        plain = plan_without_search(self.sought)
        known = plan_in_use(plain, self.database, self.environment)
        if known is not None and not self._has_failed(known.plan):
            return known.plan, known
        plan = self._eager() if self._has_failed(plain) else plain
        self.database.put_plan(plan, self.environment)
        return plan, None

    def nothing_left(self) -> Plan:
        """Eager, whatever ran before: that failed, too. A plan that no database may hold, of no
        steps or for a batch of 0, runs as no plan does.
        """
        plan = self._eager()
        try:
            check_stored_plan(StoredPlan(0, plan, self.environment, COMPLETE, now_text()))
        except InvalidPlan:
            return plan
        self.database.put_plan(plan, self.environment)
        return plan

    def warn_of_failed(self) -> None:
        for each in self.failed:
            text = f"a plan failed in its race and was dropped: {each.why}"
            warn(text)

    def _eager(self) -> Plan:
        return replace(self.sought.of_framework[0], route=EAGER)

    def _has_failed(self, plan: Plan) -> bool:
        own = named_as(plan, self.sought.graph)
        return any(choose_alike(own, each.plan) for each in self.failed)
