"""Every bound that a plan meets, tried with a plan: what refuses it, with the figures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from cases import Case
from torch import nn

from plantune import check as check_call
from plantune.errors import CannotJudge, WrongResult
from plantune.graph.fusions import all_fusions
from plantune.graph.partition import alternatives
from plantune.graph.step import Step
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates
from plantune.measure.numerics import check as check_step
from plantune.measure.racing.built_routes import RouteBuilder
from plantune.measure.subject import Raced
from plantune.plans.checked_plan import check_plan
from plantune.plans.plan import Plan
from plantune.report.steps import plan_steps
from plantune.runtime.load import optimize
from plantune.runtime.proof.recheck import recheck

# So many steps of a plan, and so many groups that a fusion offers, are proved for a case.
STEPS, GROUPS = 3, 1


@dataclass(frozen=True)
class Tried:
    """One try of a bound; `reason` is None where it was passed. `judged` is false where the
    framework itself cannot be judged; `failed` says that something else went wrong.
    """

    bound: str
    reason: str | None = None
    judged: bool = True
    failed: bool = False

    @property
    def passed(self) -> bool:
        return self.reason is None


def of_steps(case: Case, plan: Plan) -> Iterator[Tried]:
    """Some steps of the plan, then the framework's kernels for some groups."""
    rng = random.Random(f"steps {case.seed}")
    found = {
        (step.signature, candidate): (step, candidate)
        for step, candidate in plan_steps(plan, case.graph)
    }
    pairs = [*found.values()]
    taken = rng.sample(pairs, min(STEPS, len(pairs)))
    groups = [s for s in alternatives(case.graph, all_fusions()) if len(s.nodes) > 1]
    for step in rng.sample(groups, min(GROUPS, len(groups))):
        legal = candidates(step, case.space, ("framework",))
        taken += [(step, c) for c in legal if c.config.get("layout") in (None, *case.layouts)]
    for step, candidate in taken:
        yield _tried("step", _proving(case, step, candidate))


def _proving(case: Case, step: Step, candidate: Candidate) -> Callable[[], object]:
    return lambda: check_step(step, candidate, case.space, case.seed)


def of_network(case: Case, plan: Plan) -> Iterator[Tried]:
    """The proof of a plan from elsewhere, and of a guess."""
    graph, place = case.graph, case.x.device
    checked = check_plan(plan, graph, case.space)
    yield _tried("network", lambda: recheck(checked, case.module, place))


def of_race(case: Case, plan: Plan) -> Iterator[Tried]:
    """The plan as it joins a race, and eager as it does."""
    raced = Raced(case.sought.problem, case.sought.tape)

    def joins() -> None:
        builder = RouteBuilder(raced, case.seed, 2)
        builder.plan(plan)
        for name in ("eager", "eager-channels-last")[: 1 if _kills_torch(case) else 2]:
            builder.framework_route(name)

    with torch.set_grad_enabled(case.trains):
        yield _tried("race", joins)


def _kills_torch(case: Case) -> bool:
    """Whether eager may crash in channels_last: a GPU as `layouts` says, and torch's CPU
    kernel for the gradient of a group norm of an image that needs none itself (torch 2.13,
    2026-11-28).
    """
    if "nhwc" not in case.layouts:
        return True
    norms = any(isinstance(part, nn.GroupNorm) for part in case.module.modules())
    return norms and case.trains and not case.x.is_cuda


def of_call(case: Case, plan: Plan) -> Iterator[Tried]:
    """The user's own check, on an input of the user's."""
    mode = "train" if case.trains else "infer"

    def checked() -> None:
        check_call(optimize(case.module, case.x, mode=mode, plan=plan, fallback="error"), case.x)

    yield _tried("check", checked)


BOUNDS: dict[str, Callable[[Case, Plan], Iterator[Tried]]] = {
    "step": of_steps,
    "network": of_network,
    "race": of_race,
    "check": of_call,
}


def _tried(bound: str, run: Callable[[], object]) -> Tried:
    try:
        run()
    except WrongResult as error:
        # The first call of a given plan proves the network.
        of_network = str(error).startswith("the plan for")
        return Tried("network" if of_network else bound, str(error))
    except CannotJudge as error:
        return Tried(bound, str(error), judged=False)
    return Tried(bound)
