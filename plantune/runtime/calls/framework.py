"""Runs calls by PyTorch, and keeps account of how calls ran."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from plantune.base.environment_variables import is_disabled, is_logging
from plantune.base.warning import warn
from plantune.devices.cuda.workspaces import foreign_dispatch_modes
from plantune.errors import InputMismatch, PlantuneWarning
from plantune.graph.tracing.arguments import Arguments
from plantune.plans.database.plan_file import PlanFile
from plantune.plans.plan import Plan
from plantune.runtime.calls.padding import Padding
from plantune.runtime.watched.torch_internals import (
    PRE_DISPATCH,
    dispatch_modes,
    function_modes,
    has_transforms,
    is_included,
    tracing_state,
)


class UnplannedCall(PlantuneWarning):
    """A call ran through the framework because no plan covers it."""


@dataclass(frozen=True)
class LastCall:
    """How the last call ran: "captured" (a plan as CUDA graphs), "planned", or one of the
    framework's routes, mostly "eager"; and why.
    """

    how: str
    reason: str


@dataclass(frozen=True)
class Options:
    """What the user asked for; `also` are calls that the module is for beside the first one, and
    `padding` makes such calls of smaller ones.
    """

    name: str
    mode: str
    plan: Plan | PlanFile | None
    known: bool
    fallback: str
    frozen: bool = False
    also: tuple[Arguments, ...] = ()
    consistent: bool = False
    padding: Padding | None = None


# Where each call has another shape there would be no end of warnings.
MOST_WARNINGS = 32


class Framework:
    """Runs the reference itself, and keeps account of how calls ran."""

    def __init__(self, reference: nn.Module, options: Options) -> None:
        self.options = options
        self.last = LastCall("none", "it was not called yet")
        self.planned = self.eager = 0
        self.disabled = is_disabled()
        self.reference = reference
        self._trains = options.mode == "train"
        self._logs = is_logging()
        self._warned: set[str] = set()

    def eagerly(self, reason: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the module itself, with one warning for each reason."""
        if self.options.fallback == "error" and not self.disabled:
            said = "fallback='error' keeps the framework from running it"
            raise InputMismatch(f"{self.options.name}: {reason}; {said}")
        text = f"{self.options.name}: {reason}; the framework runs it instead"
        result = self.run(reason, self._trains, *args, **kwargs)
        if self.options.fallback == "warn" and self._is_worth_saying(reason):
            self._warned.add(reason)
            if len(self._warned) == MOST_WARNINGS:
                text += "; further reasons are not said, see last_call()"
            warn(text, UnplannedCall)
        return result

    def _is_worth_saying(self, reason: str) -> bool:
        return reason not in self._warned and len(self._warned) < MOST_WARNINGS

    def run(self, reason: str, gradients: bool, *args: Any, **kwargs: Any) -> Any:
        self.eager += 1
        self.note(LastCall("eager", reason))
        # A tracer knows the submodules by their place in the tuned module.
        traced = any(isinstance(arg, fx.Proxy) for arg in (*args, *kwargs.values()))
        with torch.set_grad_enabled(gradients and torch.is_grad_enabled()):
            return (self.reference.forward if traced else self.reference)(*args, **kwargs)

    def by(
        self,
        route: Callable[..., Any],
        call: LastCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Runs a PyTorch route in place of the plan."""
        self.eager += 1
        if self.last is not call:
            self.note(call)
        if self._trains or not torch.is_grad_enabled():
            return route(*args, **kwargs)
        # As torch.no_grad, which takes ten times as long.
        torch._C._set_grad_enabled(False)
        try:
            return route(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    def note(self, call: LastCall) -> None:
        if self._logs and call != self.last:
            print(f"plantune: {self.options.name}: {call.how}: {call.reason}", file=sys.stderr)
        self.last = call


def foreign_function_modes() -> bool:
    """Whether there are others than torch.set_default_device() and `with torch.device()` make."""
    every = map(torch._C._get_function_stack_at, range(function_modes()))
    return not all(isinstance(mode, DeviceContext) for mode in every)


def transform_of(args: Iterable[Any]) -> str | None:
    """What records or transforms such a call: it needs the module's own operations."""
    if tracing_state() is not None:
        return "torch.jit.trace records it"
    if dispatch_modes() and foreign_dispatch_modes():
        return "a dispatch mode sees each operation, as in make_fx and torch.export"
    if has_transforms():
        return "it is inside of a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives are on"
    why = None
    for x in args:  # without a call for each: 0.1 us of every call
        if type(x) is Tensor:
            if x.is_meta and is_included(PRE_DISPATCH):
                why = "a module around it is traced"
        elif isinstance(x, fx.Proxy):
            why = "torch.fx traces it"
    if why is None and function_modes() and foreign_function_modes():
        why = "a mode sees each function of torch's that it calls"
    return why
