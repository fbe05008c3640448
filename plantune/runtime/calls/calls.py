"""How a tuned module answers a call: from a plan, or through the framework, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from plantune.devices.machine import environment_of
from plantune.errors import (
    CaptureError,
    InvalidPlan,
    UnsupportedDevice,
    UnsupportedModule,
    UntracedFunction,
)
from plantune.graph.graph import Graph
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.autocast import state_on
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.plan_file import PlanFile
from plantune.plans.plan import Plan, is_for, named_as
from plantune.plans.problem import Problem
from plantune.runtime.calls.call_table import CallTable
from plantune.runtime.calls.framework import Framework, Options
from plantune.runtime.calls.inputs import PlannedCall, PlannedInputs
from plantune.runtime.calls.padding import Padding
from plantune.runtime.calls.plain_calls import UNLOOKED_CALLS, Known, PlainCalls
from plantune.runtime.calls.planned import Planned, Trained
from plantune.runtime.captured.autograd import run_with_gradients
from plantune.runtime.captured.captured_program import CapturedProgram
from plantune.runtime.captured.program_pool import ProgramPool, device_of
from plantune.runtime.program.program import Program
from plantune.runtime.watched.live_state import OwnedTensors
from plantune.runtime.watched.module_signature import ModuleSignature
from plantune.runtime.watched.torch_internals import any_autocast, without_autocast


@dataclass(frozen=True)
class Stats:
    """What a tuned module did so far, and the memory that its plans hold."""

    planned: int
    eager: int
    instances: int
    captures: int
    held_bytes: int


class Calls:
    """Runs `reference` from plans for calls of one kind, and eagerly for everything else.

    In mode "infer" no gradient is recorded.
    """

    def __init__(
        self, reference: nn.Module, arguments: Arguments, options: Options, device: torch.device
    ) -> None:
        self.reference = reference
        self.arguments = arguments
        self.options = options
        self.framework = Framework(reference, options)
        self._device = device_of(reference, device)
        expected = (arguments, *options.also)
        self._inputs = PlannedInputs(reference, expected, self._device, options.name)
        self._expected = self._inputs.expected
        self._trains = options.mode == "train"
        self._table = CallTable(
            OwnedTensors(reference, device), self._inputs, options, self._device
        )
        self._padding = options.padding
        self.plain = PlainCalls()
        # The key of the signature that was checked last, and whether it may be padded.
        self._pads = self._table.signature.key, True
        # What eager runs, and for how many calls that is not checked again.
        self._eager: Planned | None = None
        self._eager_call: PlannedCall | None = None
        self._unlooked = 0

    def check(self) -> None:
        """Raises UnsupportedModule, or InvalidPlan, where the call this was made for cannot run."""
        signature = self._table.signature
        if self.framework.disabled or signature.why_not:
            return
        if self.options.plan is not None:
            self._check_given_plan(self.expected().pool.graph, self.options.plan)
        elif not signature.is_parametrized:
            # The plan is looked for in the first call; whether there can be one is known now.
            call, autocast = self._inputs.expected, state_on(self._device.type)
            call = call if autocast is None else call.under(autocast)
            # Eager runs what no plan can be for because of a Function, or of autocast.
            fine = UntracedFunction if autocast is None else UnsupportedModule
            with without_autocast(self._device.type), suppress(fine):
                self._table.extracted(signature, self._expected_trained(), call)

    def _check_given_plan(self, graph: Graph, plan: Plan | PlanFile) -> None:
        if isinstance(plan, PlanFile):
            problem = Problem.of(graph, self._table.space().arch.name, self.options.name)
            plan = plan.plan_for(problem, environment_of(self._device))
        if not is_for(plan, graph):
            raise InvalidPlan(
                f"the given plan is for other layers: it is for {plan.problem}, and this is "
                f"{self.options.name} with input {self.arguments.text(dtypes=True)}, "
                f"{self.options.mode}"
            )
        check_plan(named_as(plan, graph), graph, self._table.space())

    def expected(self) -> Planned:
        """What runs the call that this was made for."""
        table = self._table
        kept = table.planned(table.signature_now(), self._expected_trained(), self._inputs.expected)
        if isinstance(kept, str):
            raise UnsupportedModule(kept)
        return kept

    def expected_graph(self) -> Graph:
        """The layers of that call. Raises UnsupportedModule or UnsupportedDevice if a plan cannot
        be for it.
        """
        signature = self._table.signature_now()
        if signature.why_not:
            kind = UnsupportedDevice if self._table.why_no_plans else UnsupportedModule
            raise kind(f"{self.options.name}: {signature.why_not}")
        return self._table.extracted(signature, self._expected_trained(), self._inputs.expected)[0]

    @property
    def device(self) -> torch.device:
        return self._device

    def _expected_trained(self) -> Trained:
        trained = (*self._table.signature.trained(), *(False for _ in self.arguments.types))
        return trained if self._trains and any(trained) else None

    def stats(self) -> Stats:
        programs = self.programs()
        return Stats(
            self.framework.planned,
            self.framework.eager,
            len(programs),
            sum(getattr(program, "captures", 0) for program in programs),
            sum(getattr(program, "held_bytes", 0) for program in programs),
        )

    def programs(self) -> list[Program | CapturedProgram]:
        """All that there are now."""
        return [instance.program for pool in self.pools() for instance in pool.instances()]

    def pools(self) -> list[ProgramPool]:
        """The instances for each kind of call that came."""
        return list({id(kept.pool): kept.pool for kept in self._table.all_kept()}.values())

    def refresh(self, weights_only: bool) -> None:
        """Has the module read again: its weights, else also its attributes and its forward."""
        self.plain.forget()
        self._unlooked = 0
        if weights_only:
            self._table.weights_changed()
        else:
            self._table.refresh()

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Of a call that nothing records or transforms."""
        if self._padding is not None:
            padded = self._padding.larger(self.reference, args, kwargs)
            if padded is not None and self._may_pad(self._padding):
                return padded.cut(self._answer(padded.args, padded.kwargs))
        return self._answer(args, kwargs)

    def _may_pad(self, padding: Padding) -> bool:
        """Whether samples that are added make no difference to the module as it is now."""
        key = self._table.signature_now().key
        if key != self._pads[0]:
            try:
                padding.check(self.reference)
                self._pads = key, True
            except (ValueError, UnsupportedModule):
                self._pads = key, False
        return self._pads[1]

    def _answer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        expected = self._expected
        call: PlannedCall | None = expected
        tensors = args
        if kwargs or not expected.is_like(args):
            call = self._inputs.known(args, kwargs)
            tensors = () if call is None else call.tensors(args, kwargs)
        if self._unlooked and call is self._eager_call:
            self._unlooked -= 1
            return self._eagerly(args, kwargs)
        began_s = perf_counter()
        if self.framework.disabled:
            return self.framework.run("PLANTUNE_DISABLE is set", self._trains, *args, **kwargs)
        table = self._table
        signature = table.signature
        if signature.changed():
            signature = table.signature_now()
        reason = signature.why_not
        if reason is None and (call is None or not signature.is_home or any_autocast()):
            call, reason = self._looked_at(args, kwargs, signature, call)
            tensors = () if call is None else call.tensors(args, kwargs)
        if reason is not None or call is None:
            return self.framework.eagerly(str(reason), *args, **kwargs)
        trained = self._trained(signature, tensors) if self._trains else None
        try:
            kept = (
                signature.kept.get((call, trained, None))
                or signature.kept.get(table.key_of(call, trained))
                or table.planned(signature, trained, call)
            )
            if not isinstance(kept, Planned):
                reason = kept
            elif kept.substitute is not None:  # which another thread may settle
                result = self._by_substitute(kept, call, began_s, args, kwargs)
                self._follow(kept, signature, call, args, kwargs, trained)
                return result
            else:
                reason = kept.why_not_now(trained)
                if reason is None:
                    result = self._run(kept, signature, tensors, trained)
                    self._follow(kept, signature, call, args, kwargs, trained)
                    return result
        except torch.OutOfMemoryError:
            reason = "the plan cannot run: out of memory"
        except CaptureError as error:
            reason = f"the plan cannot run: {error}"
        # After the handlers: an error keeps the memory of the pass that it ended.
        return self.framework.eagerly(str(reason), *args, **kwargs)

    def _follow(
        self,
        kept: Planned,
        signature: ModuleSignature,
        call: PlannedCall,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        trained: Trained,
    ) -> None:
        """The next such call may be a plain one."""
        is_plain = trained is None and not kwargs and call.is_plain and self._padding is None
        if is_plain and self._table.keeps(signature, call, kept):
            known = Known(self.framework, self._table, signature, call, kept, self._trains)
            self.plain.follow(known, args)

    def _eagerly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Without checking the module: eager sees every change itself."""
        assert self._eager is not None
        return self.framework.by(self.reference, self._eager.call, args, kwargs)

    def _by_substitute(
        self,
        kept: Planned,
        call: PlannedCall,
        began_s: float,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if kept.is_eager:
            self._eager, self._eager_call, self._unlooked = kept, call, UNLOOKED_CALLS
            return self._eagerly(args, kwargs)
        result = self.framework.by(partial(kept.run_substitute, began_s), kept.call, args, kwargs)
        kept.settle()
        return result

    def _trained(self, signature: ModuleSignature, tensors: Sequence[Tensor]) -> Trained:
        if not torch.is_grad_enabled():
            return None
        trained = (*signature.trained(), *[x.requires_grad for x in tensors])
        return trained if any(trained) else None

    def _run(
        self, kept: Planned, signature: ModuleSignature, tensors: Sequence[Tensor], trained: Trained
    ) -> Any:
        if kept.under_autocast:  # whose casts are steps of the plan
            with without_autocast(self._device.type):
                outputs = self._outputs(kept, signature, tensors, trained)
        elif trained is None:
            outputs = kept.pool.run(*tensors)
        else:
            outputs = self._outputs(kept, signature, tensors, trained)
        framework = self.framework
        framework.planned += 1
        if framework.last is not kept.call:
            framework.note(kept.call)
        return kept.outputs.of(outputs)

    def _outputs(
        self, kept: Planned, signature: ModuleSignature, tensors: Sequence[Tensor], trained: Trained
    ) -> tuple[Tensor, ...]:
        if trained is None:
            return kept.pool.run(*tensors)
        return run_with_gradients(kept.pool, tensors, kept.leaves(signature, trained))

    def _looked_at(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        signature: ModuleSignature,
        call: PlannedCall | None,
    ) -> tuple[PlannedCall | None, str | None]:
        """The kind of a call that may be a new one, or why no plan can run it now."""
        reason = self._inputs.why_not(args, kwargs, signature)
        if reason is not None:
            return None, reason
        if call is None:
            found = self._table.register(args, kwargs)
            self.plain.forget()  # what is for kinds that were forgotten for this one
            if isinstance(found, str):
                return None, found
            call = found
        autocast = state_on(self._device.type)
        return (call if autocast is None else call.under(autocast)), None
