"""Plain calls: tensors by their place, of a kind that came before, and no gradients.

What must be checked before each of them stands in one function for each kind of call, with nothing
looked up twice: for a policy of three layers the way through all of `Calls` took half as long as
the layers. Whatever is unusual is MISSED, and goes that way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad

from plantune.errors import CaptureError
from plantune.runtime.calls.call_table import CallTable
from plantune.runtime.calls.framework import Framework, foreign_function_modes
from plantune.runtime.calls.inputs import PlannedCall
from plantune.runtime.calls.planned import Planned
from plantune.runtime.calls.route_race import Route, RouteRace
from plantune.runtime.calls.routes import FrameworkRoute
from plantune.runtime.calls.shipped_race import ShippedRace
from plantune.runtime.watched.module_signature import ModuleSignature
from plantune.runtime.watched.torch_internals import (
    CALL,
    CALL_IMPL,
    HOOKS_OF_ALL,
    any_autocast,
    asks_for_determinism,
    dispatch_modes,
    function_modes,
    guard_of,
    has_transforms,
    knows_none,
    set_grad_enabled,
    tracing_state,
)

# Where eager runs a module, the module is looked at once in so many calls: with another signature
# it may have a plan.
UNLOOKED_CALLS = 64
MISSED = object()
# Gives what the module does for these arguments, or MISSED.
PlainCall = Callable[[tuple[Any, ...]], Any]
CANNOT_RUN = (torch.OutOfMemoryError, CaptureError)


def missed(args: tuple[Any, ...]) -> Any:
    """Of a call of which nothing is known yet."""
    return MISSED


@dataclass(frozen=True)
class Known:
    """A kind of call for one signature of the module, and what runs it. `trains` says that calls
    may record gradients; `guard` knows most such calls.
    """

    framework: Framework
    table: CallTable
    signature: ModuleSignature
    call: PlannedCall
    kept: Planned
    trains: bool
    guard: Callable[..., bool] = knows_none

    def likeness(self) -> Callable[[tuple[Any, ...]], bool]:
        """Says whether a call is such a one, which nothing records, transforms or sees. Of most
        torch's core says nearly all of it at a glance; it takes some for others, such as tensors
        of an inference mode.
        """
        guard, is_like, count = self.guard, self.call.is_like, self.call.count

        def is_plain(args: tuple[Any, ...]) -> bool:
            if dispatch_modes() or forward_ad._current_level >= 0:
                return False
            if function_modes() and foreign_function_modes():
                return False
            if len(args) == count and guard(*args):
                return True
            seen = tracing_state() is not None or has_transforms() or any_autocast()
            return not seen and is_like(args)

        return is_plain

    def check(self) -> Callable[[], bool]:
        """Says whether module and settings are what they were."""
        table, signature, is_same = self.table, self.signature, self.signature.looker()
        settings, planned_for = table.settings_of(self.kept), self.kept.settings
        trains = self.trains

        def is_known() -> bool:
            return (
                table.signature is signature
                and signature.why_not is None
                and not (trains and is_grad_enabled())
                and (settings is None or settings() == planned_for)
                and is_same()
            )

        return is_known


def eager_call(known: Known) -> PlainCall:
    """Runs the module itself, which sees every change; as its `forward` where a call of the module
    would come to that alone. Without a function inside: beside a module of 24 us each is seen.
    """
    framework, last, trains = known.framework, known.kept.call, known.trains
    table, signature, left = known.table, known.signature, UNLOOKED_CALLS
    is_plain, guard, count = known.likeness(), known.guard, known.call.count
    module = framework.reference
    before_all, after_all, before_back_all, back_all = HOOKS_OF_ALL

    def answer(args: tuple[Any, ...]) -> Any:
        nonlocal left
        if (
            dispatch_modes()
            or forward_ad._current_level >= 0
            or function_modes()
            or len(args) != count
            or not guard(*args)
        ) and not is_plain(args):
            return MISSED
        if left:
            left -= 1
        elif table.signature is not signature or signature.changed():
            return MISSED
        else:
            left = UNLOOKED_CALLS
        framework.eager += 1
        if framework.last is not last:
            framework.note(last)
        kind, hooks = type(module), module.__dict__
        is_bare = kind.__call__ is CALL and kind._call_impl is CALL_IMPL
        if (
            is_bare
            and not (before_all or after_all or before_back_all or back_all)
            and not (hooks["_forward_hooks"] or hooks["_forward_pre_hooks"])
            and not (hooks["_backward_hooks"] or hooks["_backward_pre_hooks"])
            and module._compiled_call_impl is None
        ):
            run = module.forward
        else:
            run = module
        if trains or not is_grad_enabled():
            return run(*args)
        set_grad_enabled(False)
        try:
            return run(*args)
        finally:
            set_grad_enabled(True)

    return answer


def route_call(known: Known, route: FrameworkRoute) -> PlainCall:
    """Runs a route of the framework's, with the weights that the module has now."""
    framework, last, run = known.framework, known.kept.call, route.made()
    is_plain, is_known, owned = known.likeness(), known.check(), known.signature.tensors
    writes = owned.writes

    def answer(args: tuple[Any, ...]) -> Any:
        if not is_plain(args) or not is_known() or owned.writes != writes:
            return MISSED
        framework.eager += 1
        if framework.last is not last:
            framework.note(last)
        if not is_grad_enabled():
            return run(*args)
        set_grad_enabled(False)
        try:
            return run(*args)
        finally:
            set_grad_enabled(True)

    return answer


def program_call(known: Known) -> PlainCall:
    """Runs the plan's own steps."""
    framework, kept = known.framework, known.kept
    last, run, outputs = kept.call, kept.pool.run, kept.outputs
    is_plain, is_known = known.likeness(), known.check()
    is_deterministic, is_tensor = kept.is_deterministic, outputs.is_tensor

    def answer(args: tuple[Any, ...]) -> Any:
        if not is_plain(args) or not is_known():
            return MISSED
        if asks_for_determinism() and not is_deterministic:
            return MISSED
        try:
            made = run(*args)
        except CANNOT_RUN:  # the other way says so, and eager runs
            return MISSED
        framework.planned += 1
        if framework.last is not last:
            framework.note(last)
        return made[0] if is_tensor else outputs.of(made)

    return answer


def racing_call(known: Known, race: RouteRace) -> PlainCall:
    """Runs the route whose turn it is, as if it had won, and tells the race how long that took:
    of a route all but the entry, which a call pays whoever wins.
    """
    eager, routes = _eager_turn(known, race), dict[str, PlainCall]()

    def answer(args: tuple[Any, ...]) -> Any:
        route = race.turn()
        if race.winner is not None or not route.is_made:
            return MISSED
        if route is race.eager:
            return eager(args)
        run = routes.get(route.name)
        if run is None:
            run = routes[route.name] = _call_of_route(known, route)
        began_s = perf_counter()
        made = run(args)
        if made is not MISSED:
            race.note(route, perf_counter() - began_s)
        return made

    return answer


def _eager_turn(known: Known, race: RouteRace) -> PlainCall:
    """Times the module alone."""
    framework, last, module = known.framework, known.kept.call, known.framework.reference
    is_plain, is_known = known.likeness(), known.check()

    def answer(args: tuple[Any, ...]) -> Any:
        if not is_plain(args) or not is_known():
            return MISSED
        framework.eager += 1
        if framework.last is not last:
            framework.note(last)
        with torch.no_grad():
            began_s = perf_counter()
            made = module(*args)
            took_s = perf_counter() - began_s
        race.note(race.eager, took_s)
        return made

    return answer


def _call_of_route(known: Known, route: Route) -> PlainCall:
    return route_call(known, route) if isinstance(route, FrameworkRoute) else program_call(known)


def plain_call(known: Known) -> PlainCall:
    """What answers such calls from now on."""
    route = known.kept.substitute
    if route is None:
        return program_call(known)
    if isinstance(route, ShippedRace):  # which builds, proves and races in its calls
        return missed
    if route.winner is None:
        assert isinstance(route, RouteRace)
        return racing_call(known, route)
    return eager_call(known) if route.winner.is_eager else _call_of_route(known, route.winner)


class PlainCalls:
    """The functions for the kinds of plain calls that came, for one signature of the module."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        # Of the kind that came last.
        self.answer: PlainCall = missed
        self._signature: ModuleSignature | None = None
        self._made: dict[PlannedCall, PlainCall] = {}

    def follow(self, known: Known, args: tuple[Any, ...]) -> None:
        """After such a call with these arguments, which was missed."""
        if known.signature is not self._signature:
            self._signature, self._made = known.signature, {}
        made = self._made.get(known.call)
        if made is None or made is self.answer:
            made = plain_call(replace(known, guard=guard_of(args)))
            self._made[known.call] = made
        self.answer = made
