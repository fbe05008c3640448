"""What runs each kind of call, in each form of a module; made when the first such call comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch

from plantune.devices.cuda.flags import planned_for
from plantune.devices.machine import arch_of, why_no_plans
from plantune.errors import UnsupportedDevice, UnsupportedModule, UntracedFunction
from plantune.graph.graph import Graph
from plantune.graph.outputs import Outputs
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract_with_outputs
from plantune.runtime.calls.choose import Finder
from plantune.runtime.calls.framework import Options
from plantune.runtime.calls.inputs import PlannedCall, PlannedInputs
from plantune.runtime.calls.planned import (
    Planned,
    TorchSettings,
    Trained,
    heeds_torch_settings,
    torch_settings_of,
)
from plantune.runtime.captured.stock import Stock
from plantune.runtime.watched.form import Form
from plantune.runtime.watched.live_state import HeldTensors
from plantune.runtime.watched.torch_internals import without_autocast, without_saved_hooks
from plantune.space.recurrent import scans_on
from plantune.space.search_space import SearchSpace, load_search_space

# Forms of the module whose stocks are kept, such as the ones in training and in inference mode.
KEPT_FORMS = 4
# Calls of a kind without a stored plan, before what runs unplanned calls is made for it: making
# takes long, and a shape may come once.
FEW_CALLS = 16
Kind = tuple[PlannedCall, Trained, TorchSettings]
T = TypeVar("T")


class Kinds:
    """The kinds of calls that a module answers. `form` is the module as it was last seen."""

    def __init__(
        self, held: HeldTensors, inputs: PlannedInputs, options: Options, device: torch.device
    ) -> None:
        self._held, self._inputs, self._options, self._device = held, inputs, options, device
        self._of_others = replace(options, known=False)
        self._on_cpu = device.type == "cpu"
        self._settings = torch_settings_of(device)
        self.why_no_plans: str | None = None
        with suppress(UnsupportedDevice):  # of a GPU that is not here the call tells
            self.why_no_plans = why_no_plans(device)
        self._lock = threading.Lock()
        # By the form's key. Before a refresh other ones were kept.
        self._kept: dict[object, dict[Kind, Planned | str]] = {}
        self._waited: dict[object, dict[Kind, int]] = {}
        self._spare: list[Planned] = []
        self._read: dict[tuple[Trained, PlannedCall], tuple[Graph, Outputs]] = {}
        self.form = self._new_form()
        self._first_key = self.form.key

    def kind_of(self, call: PlannedCall, trained: Trained) -> Kind:
        return call, trained, self._settings()

    def settings_of(self, kept: Planned) -> Callable[[], TorchSettings] | None:
        """Says torch's settings, if they matter for it: they were `kept.settings`."""
        return self._settings if heeds_torch_settings(kept.stock.graph, self._device) else None

    def keeps(self, form: Form, call: PlannedCall, kept: Planned) -> bool:
        """Whether that runs such calls without gradients from now on."""
        found = form.kept.get((call, None, None)) or form.kept.get(self.kind_of(call, None))
        return found is kept

    def form_now(self) -> Form:
        """The module as it is; stocks of the forms that it had last are kept."""
        with self._lock:
            if self.form.changed():
                self.form = self._new_form()
            return self.form

    def refresh(self) -> None:
        """Has the module read again: its tensors, its attributes and its forward."""
        with self._lock:
            self._held.forget()
            self._spare = self._in_forms()  # those of before the last refresh end here
            self._kept, self._waited = {}, {}
            self.form = self._new_form()

    def weights_changed(self) -> None:
        with self._lock:
            self._held.writes += 1

    def _new_form(self) -> Form:
        form = Form(self._held.module, self._held)
        form.why_not = self.why_no_plans or form.why_not
        form.is_home = self._inputs.is_home(form)
        form.kept = _latest(self._kept, form.key)
        form.waited = _latest(self._waited, form.key)
        self._read = {}
        return form

    def meet(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedCall | str:
        """The kind of a call that may be a new one; why not if it is not remembered."""
        with self._lock:
            met = self._inputs.meet(args, kwargs)
            self._forget_others()
            return met

    def _forget_others(self) -> None:
        """Drops what was kept for kinds of calls that are no longer remembered."""
        tables: list[dict[Kind, Any]] = [*self._kept.values(), *self._waited.values()]
        for kept in tables:
            for kind in [kind for kind in kept if not self._inputs.remembers(kind[0])]:
                del kept[kind]

    def planned(self, form: Form, trained: Trained, call: PlannedCall) -> Planned | str:
        """What runs such a call; why only the framework can."""
        with self._lock, without_autocast(self._device.type):
            kind = self.kind_of(call, trained)
            settings = kind[2]
            with planned_for(None if isinstance(settings, int) else settings):
                found = self._planned(form, kind)
            if self._settings() != settings:
                # Another thread set torch otherwise meanwhile, for which some of it may be.
                form.kept.pop(kind, None)
            elif isinstance(found, Planned) and self.settings_of(found) is None:
                # To ask for them costs 0.7 us of each call (EPYC, 2026-11-23).
                form.kept[call, trained, None] = found
            return found

    def _planned(self, form: Form, kind: Kind) -> Planned | str:
        call = kind[0]
        if kind in form.kept:
            kept: Planned | str = form.kept[kind]
            return kept
        if not self._inputs.is_expected(call):
            return self._unexpected(form, kind)
        try:
            form.kept[kind] = kept = self._new(form, kind)
        except UntracedFunction as error:
            kept = form.kept[kind] = str(error)
            return kept
        except UnsupportedModule as error:
            if call.arguments.autocast is not None:
                kept = form.kept[kind] = f"autocast is on, under which no plan can be ({error})"
                return kept
            if not form.is_parametrized and form.key == self._first_key:
                raise
            what = "a weight is parametrized" if form.is_parametrized else "it was changed"
            form.why_not = f"{what} in a way without a plan ({error})"
            return form.why_not
        return kept

    def _unexpected(self, form: Form, kind: Kind) -> Planned | str:
        """What runs a call that the module was not made for: at once if there is a plan for it."""
        call, waited = kind[0], form.waited.get(kind, 0)
        unlike = self._inputs.unlike(call.arguments)
        form.waited[kind] = waited + 1
        if 0 < waited < FEW_CALLS or (waited and self._options.fallback == "error"):
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

    @without_saved_hooks()
    def _new(self, form: Form, kind: Kind, *, only_stored: bool = False) -> Planned | None:
        call, trained, settings = kind
        if self._options.consistent:
            trained = trained or form.trained_alone(call.arguments.types)
        graph, outputs = self.extracted(form, trained, call)
        self._read = {}  # the graph is the plan's now
        # What changed may be nothing that the graph was read from.
        for kept in self.all_kept():
            same = kept.stock.graph.named_digest == graph.named_digest
            same = same and kept.outputs.calls == outputs.calls
            if same and kept.settings == settings:
                return Planned(kept.stock, outputs, self._device, call, settings)
        options = self._options if self._inputs.is_expected(call) else self._of_others
        choice = Finder(graph, self.space(), self._held, options, call.arguments)
        stock: Stock | None
        if self._options.consistent and trained is not None:
            stock = self._consistent(form, (call, trained, settings), choice)
        else:
            stock = choice.planned() if only_stored else choice.stock()
        return None if stock is None else Planned(stock, outputs, self._device, call, settings)

    def _consistent(self, form: Form, kind: Kind, choice: Finder) -> Stock:
        """Instances of the plan for the largest batch, for whichever batch a call has."""
        call, trained, settings = kind
        leader = self._inputs.leader_of(call)
        if call.plain.arguments == leader.plain.arguments:
            return choice.leading()
        kind = leader, trained, settings
        kept = form.kept.get(kind)
        if not isinstance(kept, Planned):
            kept = form.kept[kind] = self._new(form, kind)
        return choice.following(kept.stock)

    def extracted(self, form: Form, trained: Trained, call: PlannedCall) -> tuple[Graph, Outputs]:
        """The layer graph, with the gradients of what gets one."""
        if form is not self.form:
            return self._extracted(form, trained, call)
        # Before the first call it was checked whether there is one.
        if (trained, call) not in self._read:
            self._read = {(trained, call): self._extracted(form, trained, call)}
        return self._read[trained, call]

    def _extracted(self, form: Form, trained: Trained, call: PlannedCall) -> tuple[Graph, Outputs]:
        # On a GPU weights are read in place, so nothing is folded into them.
        folds = trained is None and self._on_cpu
        graph, outputs = extract_with_outputs(
            self._held.module,
            call.arguments,
            fold=folds,
            derives=trained is not None,
            scans=scans_on(arch_of(self._device)),
        )
        if trained is not None:
            wanted = form.wanted(trained, [name for name, _ in graph.inputs])
            graph = differentiate(graph, [name for name in wanted if name in graph.types])
        return graph, outputs

    def all_kept(self) -> list[Planned]:
        """What runs calls of all kinds, in the forms that are kept."""
        return [*self._spare, *self._in_forms()]

    def _in_forms(self) -> list[Planned]:
        every = (kept for kinds in self._kept.values() for kept in kinds.values())
        return [kept for kept in every if isinstance(kept, Planned)]

    def space(self) -> SearchSpace:
        space = load_search_space(arch_of(self._device))
        if self._on_cpu:
            return space
        device = torch.cuda.get_device_properties(self._device)
        return space.with_multiprocessors(device.multi_processor_count)


def _latest(tables: dict[object, dict[Kind, T]], key: object) -> dict[Kind, T]:
    """The table of that form, which is the last one to be forgotten now."""
    found = tables[key] = tables.pop(key, {})
    while len(tables) > KEPT_FORMS:
        del tables[next(iter(tables))]
    return found
