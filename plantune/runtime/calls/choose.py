"""Which plan runs a graph: a given, a stored or a guessed one, or the framework's kernels."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from functools import partial
from weakref import WeakSet

import torch
from torch import nn

from plantune import errors
from plantune.base.warning import warn
from plantune.devices.machine import environment_of
from plantune.graph.graph import Graph
from plantune.graph.tracing.arguments import Arguments
from plantune.plans.checked_plan import CheckedPlan, check_plan
from plantune.plans.database.plan_file import PlanFile
from plantune.plans.database.proofs import is_known_slower, is_proved, remember_proof, remember_race
from plantune.plans.database.rows import Found
from plantune.plans.database.stored import find_stored_plan, shipped_contender, shipped_file
from plantune.plans.guess import framework_plan, guessed_plan
from plantune.plans.plan import EAGER, PROGRAM, Plan, is_for, named_as
from plantune.plans.problem import Problem
from plantune.plans.standing import loss_text
from plantune.plans.workload import Workload
from plantune.plans.written_words import PREDICTED
from plantune.runtime.calls.consistent import by_its_program, report, transferred, why_apart
from plantune.runtime.calls.framework import Options
from plantune.runtime.calls.guess_race import is_slower, is_unsure
from plantune.runtime.captured.program_pool import ProgramPool, device_of
from plantune.runtime.captured.shipped import Shipped
from plantune.runtime.proof.recheck import recheck
from plantune.runtime.watched.live_state import OwnedTensors
from plantune.space.search_space import SearchSpace

log = logging.getLogger(__name__)

# Errors that mean a plan cannot run on this machine now: other libraries, less memory.
CANNOT_RUN = (
    errors.InvalidPlan,
    errors.IllegalCandidate,
    errors.BuildError,
    errors.CannotJudge,
    errors.CudaError,
    errors.WrongResult,
    torch.OutOfMemoryError,
)


# The framework's kernels: on a GPU as one captured graph; on a CPU op by op they are slower than
# eager, which took 7 us for a layer that they took 60 for (2 cores, 2026-11-22).
UNPLANNED = {"cpu": EAGER, "cuda": PROGRAM}
SLOWER = "they were quicker than plantune's in a race"


class NoStoredPlan(errors.PlantuneWarning):
    """A known network runs from no plan that was measured."""


class PredictedPlan(errors.PlantuneWarning):
    """A plan was predicted for this kind of GPU, and never measured."""


class LosingPlan(errors.PlantuneWarning):
    """torch.compile was faster than a plan in the race that it was stored with."""


_reported: set[str] = set()
_advised: WeakSet[nn.Module] = WeakSet()


class Finder:
    """Looks for the plan of one graph here, and proves what was not measured here.

    `options.fallback` says whether a plan that is missing comes with a warning, silently or as
    NoPlan. If nothing is stored, there is a word only for a `known` network, for which a search can
    find something.
    """

    def __init__(
        self,
        graph: Graph,
        space: SearchSpace,
        owned: OwnedTensors,
        options: Options,
        arguments: Arguments,
    ) -> None:
        self._graph, self._space, self._owned, self._options = graph, space, owned, options
        self._arguments = arguments
        self._device = device_of(owned.module, owned.otherwise)
        self._here = environment_of(self._device)
        self._problem = Problem.of(graph, space.arch.name, options.name)
        self._shipped: Found | None = None

    def pool(self) -> ProgramPool:
        """Instances of the best plan there is: the given one, else one that is stored for this
        graph under whatever name, else a guessed one or the framework's kernels.
        """
        return self.planned() or self._unplanned()

    def leading(self) -> ProgramPool:
        """`pool`, run by its own steps."""
        pool = self.pool()
        plan = by_its_program(pool.plan)
        return pool if plan == pool.plan else self._pool_of(self._checked(plan))

    def following(self, leader: ProgramPool) -> ProgramPool:
        """Instances of the leader's plan for this other batch, whose outputs are the same to the
        bit; says so if they are not.
        """
        own = self.pool()
        checked = transferred(leader.plan, own.checked)
        made = checked if isinstance(checked, str) else self._attempt(checked.plan, checked)
        if isinstance(made, str):
            report(self._options.name, made)
            return own
        why = why_apart(leader, made)
        if why is not None:
            report(self._options.name, why)
        return made

    def planned(self) -> ProgramPool | None:
        """Instances of the given or stored plan, None if there is none that can run here."""
        given, options = self._given(), self._options
        if given is not None:
            return self._proved(given)
        if options.plan is not None:
            return None
        found = find_stored_plan(self._problem, self._here)
        if found is not None and found.match != "foreign":
            return self._stored(found)
        self._shipped = shipped_contender(self._problem, self._here)
        if self._shipped is not None and self._may_try(self._shipped):
            return None
        if options.known:
            text = _what_is_missing(self._problem, found) + _how_to_enable(self._shipped)
            _without_plan(text, options.fallback)
        else:
            _advise(self._owned.module, options.name)
        return None

    def _unplanned(self) -> ProgramPool:
        """Of kernels that estimates choose, where these are known to be good, else of the
        framework's.
        """
        guessed = guessed_plan(self._graph, self._space, network=self._options.name)
        if guessed is None:
            return self._of_framework()
        made = SLOWER if is_known_slower(guessed, self._here) else self._attempt(guessed)
        if isinstance(made, ProgramPool):
            return self._quicker(made)
        log.info("%s: the framework's kernels run: %s", self._options.name, made)
        return self._of_framework()

    def _of_framework(self) -> ProgramPool:
        plain = framework_plan(self._graph, self._space, network=self._options.name)
        plain = replace(plain, route=UNPLANNED[self._space.arch.kind])
        pool = self._pool_of(self._checked(plain))
        if self._shipped is not None and self._may_try(self._shipped):
            prove = partial(self._attempt, self._shipped.plan)
            checked = partial(self._checked, self._shipped.plan)
            pool.shipped = Shipped(checked, prove, self._report_shipped)
        return pool

    def _may_try(self, shipped: Found) -> bool:
        """Whether the first calls can race a shipped plan: they must leave nothing behind but their
        results, and may differ in the last bits.
        """
        graph, options = self._graph, self._options
        if graph.backward_from is not None or graph.updates or graph.draws or options.consistent:
            return False
        fits = is_for(shipped.plan, graph) and self._arguments.autocast is None
        return fits and shipped.plan.route_for(frozen=options.frozen) == PROGRAM

    def _report_shipped(self, why: str) -> None:
        text = f"the plan that plantune ships for {self._problem} cannot run here: {why}"
        if self._options.known and self._options.fallback != "silent":
            workload = Workload.of(self._problem)
            text += f"; `plantune search {workload.arguments()}` finds another one"
            warn(text, NoStoredPlan)
        else:
            log.info(text)

    def _quicker(self, guess: ProgramPool) -> ProgramPool:
        """The guess, or the framework's kernels if they win a race, where that is not sure."""
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        is_raced = is_known_slower(guess.plan, self._here) is not None
        if is_raced or capturing or not is_unsure(self._graph, guess.plan):
            return guess
        other = self._of_framework()
        try:
            slower = is_slower(guess, other, self._arguments)
        except CANNOT_RUN:
            return guess
        remember_race(guess.plan, self._here, slower=slower)
        if slower:
            log.info("%s: the framework's kernels run: %s", self._options.name, SLOWER)
        return other if slower else guess

    def _given(self) -> Plan | None:
        """The plan that the user gave, if it is one for this graph and kind of chip."""
        plan = self._options.plan
        if isinstance(plan, PlanFile):
            found = plan.find(self._problem, self._here)
            plan = None if found is None or found.match == "foreign" else found.plan
        return plan if plan is not None and is_for(plan, self._graph) else None

    def _checked(self, plan: Plan) -> CheckedPlan:
        """A plan for this graph, with the names that its layers have here."""
        return check_plan(named_as(plan, self._graph), self._graph, self._space)

    def _pool_of(self, checked: CheckedPlan) -> ProgramPool:
        return ProgramPool(checked, self._owned, frozen=self._options.frozen)

    def _stored(self, found: Found) -> ProgramPool | None:
        """The pool of a stored plan with one instance made, None if it cannot run here."""
        pool = self._attempt(found.plan)
        if not isinstance(pool, ProgramPool):
            text = f"the stored plan {found.id} cannot run here: {pool}"
            others = "a guessed plan or the framework's kernels run"
            _without_plan(f"{text}; {others}", self._options.fallback)
            return None
        pool.match = found.match
        _tell_of_loss(found.plan, self._options.fallback)
        if found.plan.origin == PREDICTED:
            warn(_predicted(found.plan.problem), PredictedPlan)
        return pool

    def _attempt(self, plan: Plan, checked: CheckedPlan | None = None) -> ProgramPool | str:
        """The pool of a plan with one instance made, or why it cannot run here.

        Not the error itself, which would keep the memory of what it ended.
        """
        try:
            pool = self._proved(plan, checked)
            pool.lend().release()
        except CANNOT_RUN as error:
            return str(error)
        return pool

    def _proved(self, plan: Plan, checked: CheckedPlan | None = None) -> ProgramPool:
        """The pool of a plan that has computed the network once in this environment, wherever it
        came from, unless it was measured or proved here before. Raises as `recheck` does.
        """
        checked = checked or self._checked(plan)
        runs = plan.route_for(frozen=self._options.frozen) == PROGRAM
        if runs and not is_proved(plan, self._here):
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise errors.CaptureError(_not_in_a_capture(plan.problem))
            owned = self._owned
            recheck(checked, owned.module, owned.otherwise, self._arguments)
            remember_proof(plan, self._here)
        return self._pool_of(checked)


def _not_in_a_capture(problem: Problem) -> str:
    return (
        f"the plan for {problem.network} must be proved before its first use, which a CUDA graph "
        "cannot hold: call the module once before the capture"
    )


def _predicted(problem: Problem) -> str:
    return (
        f"the plan for {problem.network} was predicted for {problem.arch}, nothing of it was "
        "measured; `plantune verify` or `plantune search` measures it here"
    )


def _what_is_missing(problem: Problem, found: Found | None) -> str:
    if found is not None:
        return (
            f"the stored plan {found.id} is for another chip: expected {problem.arch}, got "
            f"{found.environment.arch} ({found.environment.device}); the framework's kernels run"
        )
    workload = Workload.of(problem)
    return (
        f"no plan for {workload} is stored, so nothing that was measured runs; "
        f"`plantune search {workload.arguments()}` finds one"
    )


def _how_to_enable(shipped: Found | None) -> str:
    """Of a plan that is shipped, and is not raced in the first calls."""
    if shipped is None:
        return ""
    problem = shipped.plan.problem
    arguments = Workload.of(problem).arguments()
    place = shlex.quote(str(shipped_file(problem.arch)))
    return (
        f"; plantune ships one that was measured on another CPU: `plantune verify {arguments} "
        f"--from {place}` proves and measures it here, from then on it runs"
    )


def _advise(module: nn.Module, name: str) -> None:
    """Once for a module, and only to who listens to the log."""
    if module not in _advised:
        _advised.add(module)
        log.info(
            "%s: no plan is stored for it; plantune.tune(module, *inputs) searches for one, in "
            "about a minute",
            name,
        )


def _without_plan(text: str, fallback: str) -> None:
    if fallback == "error":
        raise errors.NoPlan(text)
    if fallback == "warn":
        warn(text, NoStoredPlan)


def _tell_of_loss(plan: Plan, fallback: str) -> None:
    """Once in a process."""
    text = loss_text(plan.evidence)
    if text is None or fallback == "silent" or plan.digest in _reported:
        return
    _reported.add(plan.digest)
    warn(
        f"{plan.problem}: {text}; `plantune search` may find a faster plan",
        LosingPlan,
    )
