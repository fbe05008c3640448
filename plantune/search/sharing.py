"""What a search does for others that share its study: it waits for them, and takes their plan."""

from __future__ import annotations

from plantune.devices.machine import Environment
from plantune.plans.checked_plan import check_plan
from plantune.plans.plan import Plan
from plantune.search import policy
from plantune.search.budget import Budget
from plantune.search.contenders.elsewhere import prove_elsewhere
from plantune.search.run import Run
from plantune.search.shared.board import Board
from plantune.search.shared.joint import plan_of_others


def found_elsewhere(board: Board | None, run: Run, here: Environment) -> Plan | None:
    """Where searches share a study, the plan of the one that ranked and raced, after all of them
    have measured what they can; None if that is for this search to do.
    """
    if board is None:
        return None
    run.enter("waiting for others")
    plan, seconds = plan_of_others(board, run.steps.observe_others, here)
    run.budget.exclude(seconds)
    if plan is not None:
        check_plan(plan, run.graph, run.space)
    return plan


def prove_on_all(run: Run, plan: Plan) -> None:
    """Has every worker here prove a plan that another search found; raises as `prove_elsewhere`."""
    run.enter("proving")
    workers = (run.worker, *run.others)
    prove_elsewhere(workers, run.sought.raced, plan, Budget(policy.PROVING_S))


def publish(board: Board | None, plan: Plan) -> bool:
    """Gives the plan to the others; False if one of them may do so, see Board.publish."""
    ms = plan.evidence.get("median_ms", 0.0)
    value = float(ms) if isinstance(ms, (int, float)) else 0.0
    return board is None or board.publish(plan.dumps(), value)
