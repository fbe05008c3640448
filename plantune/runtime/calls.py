"""How a tuned module answers a call: from a plan, or through the framework, and why."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, overload

import torch
from torch import Tensor, nn

from plantune.errors import (
    CaptureError,
    InvalidPlan,
    UnsupportedDevice,
    UnsupportedModule,
)
from plantune.graph.arguments import Arguments
from plantune.graph.autocast import state_on
from plantune.graph.differentiate import differentiate
from plantune.graph.extract import extract_with_outputs
from plantune.graph.graph import Graph
from plantune.graph.outputs import Outputs
from plantune.machine import arch_of, environment_of, why_no_plans
from plantune.plan import Plan, check_plan, is_for, named_as
from plantune.plan_db.plan_file import PlanFile
from plantune.problem import Problem
from plantune.runtime.autograd import run_with_gradients
from plantune.runtime.captured import CapturedProgram
from plantune.runtime.choose import Choice
from plantune.runtime.form import Form
from plantune.runtime.framework import Framework, Options
from plantune.runtime.inputs import PlannedCall, PlannedInputs
from plantune.runtime.live_state import HeldTensors
from plantune.runtime.planned import Planned, Trained, threads_on
from plantune.runtime.pool import Pool, device_of
from plantune.runtime.program import Program
from plantune.runtime.torch_internals import any_autocast, without_autocast
from plantune.space.search_space import SearchSpace, load_search_space

# Where eager runs a module, the module is looked at once in so many calls: in another form it may
# have a plan.
UNLOOKED_CALLS = 64
# Forms of the module whose pools are kept, such as the ones in training and in inference mode.
KEPT_FORMS = 4
# With the number of threads, which a plan on a CPU is for.
Kind = tuple[PlannedCall, Trained, int]
# Calls of a kind without a stored plan, before what runs unplanned calls is made for it: making
# takes long, and a shape may come once.
FEW_CALLS = 16


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
        self._of_others = replace(options, known=False)
        self.framework = Framework(reference, options)
        self._device = device_of(reference, device)
        self._inputs = PlannedInputs(reference, arguments, self._device, options.name)
        self._expected = self._inputs.expected
        self._on_cpu = self._device.type == "cpu"
        self._trains = options.mode == "train"
        self._why_no_plans: str | None = None
        with suppress(UnsupportedDevice):  # of a GPU that is not here the call tells
            self._why_no_plans = why_no_plans(self._device)
        self._lock = threading.Lock()
        self._held = HeldTensors(reference, device)
        # What eager runs, and for how many calls that is not checked again.
        self._eager: Planned | None = None
        self._eager_call: PlannedCall | None = None
        self._unlooked = 0
        # By the form's key; and those from before a refresh.
        self._kept: dict[object, dict[Kind, Planned | str]] = {}
        self._spare: list[Planned] = []
        self._form = self._new_form()

    def check(self) -> None:
        """Raises UnsupportedModule, or InvalidPlan, where the call this was made for cannot run."""
        if self.framework.disabled or self._form.why_not:
            return
        if self.options.plan is not None:
            self._check_given_plan(self.expected().pool.graph, self.options.plan)
        elif not self._form.is_parametrized:
            # The plan is looked for in the first call; whether there can be one is known now.
            self._extracted(self._form, self._expected_trained(), self._inputs.expected)

    def _check_given_plan(self, graph: Graph, plan: Plan | PlanFile) -> None:
        if isinstance(plan, PlanFile):
            problem = Problem.of(graph, self._space().arch.name, self.options.name)
            plan = plan.plan_for(problem, environment_of(self._device))
        if not is_for(plan, graph):
            raise InvalidPlan(
                f"the given plan is for other layers: it is for {plan.problem}, and this is "
                f"{self.options.name} with input {self.arguments.text(dtypes=True)}, "
                f"{self.options.mode}"
            )
        check_plan(named_as(plan, graph), graph, self._space())

    def expected(self) -> Planned:
        """What runs the call that this was made for."""
        kept = self._planned(self._form_now(), self._expected_trained(), self._inputs.expected)
        if isinstance(kept, str):
            raise UnsupportedModule(kept)
        return kept

    def expected_graph(self) -> Graph:
        """The layers of that call. Raises UnsupportedModule or UnsupportedDevice if a plan cannot
        be for it.
        """
        form = self._form_now()
        if form.why_not:
            kind = UnsupportedDevice if self._why_no_plans else UnsupportedModule
            raise kind(f"{self.options.name}: {form.why_not}")
        return self._extracted(form, self._expected_trained(), self._inputs.expected)[0]

    @property
    def device(self) -> torch.device:
        return self._device

    def _expected_trained(self) -> Trained:
        trained = (*self._form.trained(), *(False for _ in self.arguments.types))
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

    def pools(self) -> list[Pool]:
        """The instances for each kind of call that came."""
        return list({id(kept.pool): kept.pool for kept in self._all_kept()}.values())

    def refresh(self, weights_only: bool) -> None:
        """Has the module read again: its weights, else also its attributes and its forward."""
        with self._lock:
            if weights_only:
                self._held.writes += 1
                return
            self._held.forget()
            self._unlooked = 0
            self._spare = self._in_forms()  # those of before the last refresh end here
            self._kept = {}
            self._form = self._new_form()

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Of a call that nothing records or transforms."""
        expected = self._expected
        call: PlannedCall | None = expected
        tensors = args
        if kwargs or not expected.is_like(args):
            call = self._inputs.met(args, kwargs)
            tensors = () if call is None else call.tensors(args, kwargs)
        if self._unlooked and call is self._eager_call:
            self._unlooked -= 1
            return self._eagerly(args, kwargs)
        began_s = perf_counter()
        if self.framework.disabled:
            return self.framework.run("PLANTUNE_DISABLE is set", self._trains, *args, **kwargs)
        form = self._form
        if form.changed():
            form = self._form_now()
        reason = form.why_not
        if reason is None and (call is None or not form.is_home or any_autocast()):
            call, reason = self._looked_at(args, kwargs, form, call)
            tensors = () if call is None else call.tensors(args, kwargs)
        if reason is not None or call is None:
            return self.framework.eagerly(str(reason), *args, **kwargs)
        trained = self._trained(form, tensors) if self._trains else None
        try:
            kept = form.kept.get(self._kind_of(call, trained)) or self._planned(form, trained, call)
            if not isinstance(kept, Planned):
                reason = kept
            elif kept.runner is not None:  # which another thread may settle
                return self._by_runner(kept, call, began_s, args, kwargs)
            else:
                reason = kept.why_not_now(trained)
                if reason is None:
                    return self._run(kept, form, tensors, trained)
        except torch.OutOfMemoryError:
            reason = "the plan cannot run: out of memory"
        except CaptureError as error:
            reason = f"the plan cannot run: {error}"
        # After the handlers: an error keeps the memory of the pass that it ended.
        return self.framework.eagerly(str(reason), *args, **kwargs)

    def _eagerly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Without checking the module: eager sees every change itself."""
        assert self._eager is not None
        return self.framework.by(self.reference, self._eager.call, args, kwargs)

    def _by_runner(
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
        result = self.framework.by(partial(kept.run_otherwise, began_s), kept.call, args, kwargs)
        kept.settle()
        return result

    def _kind_of(self, call: PlannedCall, trained: Trained) -> Kind:
        return call, trained, torch.get_num_threads() if self._on_cpu else 0

    def _trained(self, form: Form, tensors: Sequence[Tensor]) -> Trained:
        if not torch.is_grad_enabled():
            return None
        trained = (*form.trained(), *[x.requires_grad for x in tensors])
        return trained if any(trained) else None

    def _run(self, kept: Planned, form: Form, tensors: Sequence[Tensor], trained: Trained) -> Any:
        if kept.under_autocast:  # whose casts are steps of the plan
            with without_autocast(self._device.type):
                outputs = self._outputs(kept, form, tensors, trained)
        elif trained is None:
            outputs = kept.pool.run(*tensors)
        else:
            outputs = self._outputs(kept, form, tensors, trained)
        framework = self.framework
        framework.planned += 1
        if framework.last is not kept.call:
            framework.note(kept.call)
        return kept.outputs.of(outputs)

    def _outputs(
        self, kept: Planned, form: Form, tensors: Sequence[Tensor], trained: Trained
    ) -> tuple[Tensor, ...]:
        if trained is None:
            return kept.pool.run(*tensors)
        return run_with_gradients(kept.pool, tensors, form.parameters(trained))

    def _form_now(self) -> Form:
        with self._lock:
            if self._form.changed():
                self._form = self._new_form()
            return self._form

    def _new_form(self) -> Form:
        """The module as it is; pools of the forms that it had last are kept."""
        form = Form(self.reference, self._held)
        form.why_not = self._why_no_plans or form.why_not
        form.is_home = self._inputs.is_home(form)
        form.kept = self._kept.pop(form.key, {})
        self._kept[form.key] = form.kept
        while len(self._kept) > KEPT_FORMS:
            del self._kept[next(iter(self._kept))]
        return form

    def _looked_at(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        form: Form,
        call: PlannedCall | None,
    ) -> tuple[PlannedCall | None, str | None]:
        """The kind of a call that may be a new one, or why no plan can run it now."""
        reason = self._inputs.why_not(args, kwargs, form)
        if reason is not None:
            return None, reason
        if call is None:
            with self._lock:
                met = self._inputs.meet(args, kwargs)
                self._forget_others()
            if isinstance(met, str):
                return None, met
            call = met
        autocast = state_on(self._device.type)
        return (call if autocast is None else call.under(autocast)), None

    def _forget_others(self) -> None:
        """Drops what was kept for kinds of calls that are no longer remembered."""
        tables: list[dict[Kind, Any]] = [*self._kept.values(), self._form.waited]
        for kept in tables:
            for kind in [kind for kind in kept if not self._inputs.remembers(kind[0])]:
                del kept[kind]

    def _planned(self, form: Form, trained: Trained, call: PlannedCall) -> Planned | str:
        """What runs such a call; why only the framework can."""
        with self._lock, without_autocast(self._device.type):
            kind = self._kind_of(call, trained)
            if kind in form.kept:
                kept: Planned | str = form.kept[kind]
                return kept
            if not self._inputs.is_expected(call):
                return self._unexpected(form, kind)
            try:
                form.kept[kind] = kept = self._new(form, kind)
            except UnsupportedModule as error:
                if call.arguments.autocast is not None:
                    kept = form.kept[kind] = f"autocast is on, under which no plan can be ({error})"
                    return kept
                if not form.is_parametrized:
                    raise
                form.why_not = f"a weight is parametrized in a way without a plan ({error})"
                return form.why_not
            return kept

    def _unexpected(self, form: Form, kind: Kind) -> Planned | str:
        """What runs a call that the module was not made for: at once if there is a plan for it."""
        call, waited = kind[0], form.waited.get(kind, 0)
        unlike = self._inputs.unlike(call.arguments)
        form.waited[kind] = waited + 1
        if 0 < waited < FEW_CALLS or (waited and self.options.fallback == "error"):
            return unlike
        kept: Planned | str | None
        try:
            kept = self._new(form, kind, only_stored=not waited)
        except UnsupportedModule as error:
            kept = f"{unlike}, for which there can be none ({error})"
        if kept is None:
            return unlike
        form.kept[kind] = kept
        return kept

    @overload
    def _new(self, form: Form, kind: Kind) -> Planned: ...

    @overload
    def _new(self, form: Form, kind: Kind, *, only_stored: bool) -> Planned | None: ...

    def _new(self, form: Form, kind: Kind, *, only_stored: bool = False) -> Planned | None:
        call, trained, _ = kind
        graph, outputs = self._extracted(form, trained, call)
        # What changed may be nothing that the graph was read from.
        threads = threads_on(self._device)
        for kept in self._all_kept():
            same = kept.pool.graph.named_digest == graph.named_digest
            if same and kept.threads == threads:
                return Planned(kept.pool, outputs, self._device, call)
        options = self.options if self._inputs.is_expected(call) else self._of_others
        choice = Choice(graph, self._space(), self._held, options, call.arguments)
        pool = choice.planned() if only_stored else choice.pool()
        return None if pool is None else Planned(pool, outputs, self._device, call)

    def _extracted(self, form: Form, trained: Trained, call: PlannedCall) -> tuple[Graph, Outputs]:
        """The layer graph, with the gradients of what gets one."""
        # On a GPU weights are read in place, so nothing is folded into them.
        folds = trained is None and self._on_cpu
        graph, outputs = extract_with_outputs(self.reference, call.arguments, fold=folds)
        if trained is not None:
            wanted = form.wanted(trained, [name for name, _ in graph.inputs])
            graph = differentiate(graph, [name for name in wanted if name in graph.types])
        return graph, outputs

    def _all_kept(self) -> list[Planned]:
        return [*self._spare, *self._in_forms()]

    def _in_forms(self) -> list[Planned]:
        every = (kept for kinds in self._kept.values() for kept in kinds.values())
        return [kept for kept in every if isinstance(kept, Planned)]

    def _space(self) -> SearchSpace:
        return load_search_space(arch_of(self._device))
