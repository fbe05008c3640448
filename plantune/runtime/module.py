"""The tuned module: the reference's parameters and face, run from a plan."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from plantune.base.given import require_flag, require_one_of
from plantune.errors import UnsupportedModule
from plantune.graph.layouts import HOST_MEMORY
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import lines_of
from plantune.plans.database.plan_file import PlanFile
from plantune.plans.plan import Plan
from plantune.plans.problem import MODES
from plantune.runtime.calls.calls import Calls, Stats
from plantune.runtime.calls.framework import LastCall, Options, UnplannedCall, transform_of
from plantune.runtime.calls.padding import Padding
from plantune.runtime.calls.plain_calls import MISSED
from plantune.runtime.calls.routes import FrameworkRoute
from plantune.runtime.captured.program_pool import ProgramPool
from plantune.runtime.summary import Summary, runs_of, summary_of
from plantune.runtime.watched.copies import rebind
from plantune.runtime.watched.forward_signature import bare, class_for, plain
from plantune.runtime.watched.module_signature import OF_ALL_MODULES
from plantune.runtime.watched.stands_in import StandsIn

__all__ = ["FALLBACKS", "TunedModule", "UnplannedCall"]

FALLBACKS = ("warn", "error", "silent")


class TunedModule(StandsIn):
    """Runs `reference` from plans for calls like one, and eagerly for everything else.

    Parameters, buffers, submodules and attributes are the reference's own, under the same names:
    every change of them counts in the next call. What a plan computes is what the reference does in
    the state that it has; each submodule keeps its `training` flag. In mode "infer" no gradient is
    recorded. `known` says that a search can find a plan for `name`; `also` are other calls that it
    is made for, and `padding` makes such calls of smaller ones. If it is `consistent`, calls
    without gradients run the forward pass of training.
    """

    def __init__(
        self,
        reference: nn.Module,
        arguments: Arguments,
        *,
        name: str,
        mode: str,
        plan: Plan | PlanFile | None = None,
        known: bool = False,
        fallback: str = "warn",
        frozen: bool = False,
        device: torch.device = HOST_MEMORY,
        also: tuple[Arguments, ...] = (),
        consistent: bool = False,
        padding: Padding | None = None,
    ) -> None:
        super().__init__(reference)
        require_one_of("mode", mode, MODES)
        require_one_of("fallback", fallback, FALLBACKS)
        require_flag("frozen", frozen)
        require_flag("consistent", consistent)
        if consistent and mode != "train":
            raise ValueError('consistent=True needs mode="train": it is about acting and learning')
        options = Options(
            name, mode, plan, known, fallback, frozen, also, consistent=consistent, padding=padding
        )
        self._arguments = (arguments, options, device)
        self._calls = Calls(reference, *self._arguments)
        self._calls.check()
        self._tell_signature()

    def _tell_signature(self) -> None:
        """Has `inspect.signature` of this module and of its forward be the reference's."""
        object.__setattr__(self, "__class__", class_for(type(self), self.reference))

    @property
    def plan(self) -> Plan:
        """The plan of the call that this module was made for."""
        return self.pool().plan

    def run_from(self, plan: Plan | None) -> TunedModule:
        """Replaces the plan of the expected call, if one is given."""
        if plan is not None:
            arguments, options, device = self._arguments
            self._arguments = (arguments, replace(options, plan=plan), device)
            self._calls = Calls(self.reference, *self._arguments)
        return self

    def pool(self) -> ProgramPool:
        """The instances for the call that this module was made for."""
        return self._calls.expected().pool

    def pools(self) -> list[ProgramPool]:
        """The instances for each kind of call that came, in training and inference for example."""
        return self._calls.pools()

    def last_call(self) -> LastCall:
        """How the last call ran, and why."""
        return self._calls.framework.last

    def stats(self) -> Stats:
        """How calls ran so far, and what the plans hold."""
        return self._calls.stats()

    def summary(self) -> Summary:
        """What runs that call and how fast it was in its race, what runs its steps, and which ops
        are torch's own, with their lines. It prints as text.
        """
        planned, calls = self._calls.expected(), self._calls
        plan, graph = planned.pool.plan, planned.pool.graph
        lines = lines_of(self.reference, calls.arguments, derives=plan.problem.mode == "train")
        return summary_of(plan, graph, lines, runs_of(planned))

    def refresh(self, *, weights_only: bool = False) -> None:
        """Has the next call read again what changes without a trace: globals, closures and
        foreign objects that a forward reads; weights written through `.data` or a collective on a
        CPU; weights whose strides, shape or dtype changed in the same memory.

        With `weights_only` the values of weights alone, which takes no new trace of the module.
        """
        self._calls.refresh(weights_only)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's, in half of its time if that would call `forward` alone. Torch's hooks for
        all modules are called for the reference, which runs while there are any.
        """
        own = self.__dict__  # each attribute of a module takes five times as long
        if (
            is_dynamo_compiling()
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            return super().__call__(*args, **kwargs)
        calls = own["_calls"]
        if not kwargs:
            made = calls.plain.answer(args)
            if made is not MISSED:
                return made
        if transform_of((*args, *kwargs.values()) if kwargs else args) is not None:
            return super().__call__(*args, **kwargs)
        return calls.run(args, kwargs)

    def is_hooked(self) -> bool:
        """Whether hooks see its calls."""
        names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return any(OF_ALL_MODULES) or any(self.__dict__[name] for name in names)

    def why_eager(self) -> str | None:
        """Why eager runs in place of the route that the plan names; None if it does not."""
        route = self._calls.expected().substitute
        return route.why_not if isinstance(route, FrameworkRoute) else None

    def eager_calls(self) -> int:
        """How many calls no plan ran."""
        return self._calls.framework.eager

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            # Dynamo would trace into the kernels' memory; the plan is a compiled whole already.
            return torch.compiler.disable(self.forward)(*args, **kwargs)
        why = transform_of((*args, *kwargs.values()))
        if why is not None:
            return self._calls.framework.run(why, True, *args, **kwargs)
        return self._calls.run(args, kwargs)

    def _replicate_for_data_parallel(self) -> Any:
        """A replica on another GPU, whose weights are not parameters: the framework runs it."""
        return self.reference._replicate_for_data_parallel()

    def __deepcopy__(self, memo: dict[int, Any]) -> TunedModule:
        other = memo[id(self)] = type(self).__new__(type(self))
        state = deepcopy(self.__getstate__(), memo)
        rebind(state["_reference"][0], memo)
        other.__setstate__(state)
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        return bare, (plain(type(self)),), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_calls"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._calls = Calls(self.reference, *self._arguments)
        self._tell_signature()

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script asks of each module that it is to compile."""
        raise UnsupportedModule(
            f"torch.jit.script compiles Python, and a tuned {self._arguments[1].name} runs kernels "
            "from a plan: give it tuned.reference, or trace the tuned module by torch.jit.trace, "
            "which records the reference's own operations"
        )

    def extra_repr(self) -> str:
        arguments, options, _ = self._arguments
        calls = " and ".join(each.text() for each in (arguments, *options.also))
        return f"plantune {options.mode} plan for {calls}"
