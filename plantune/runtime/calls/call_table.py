"""What runs each kind of call, for each signature of a module; made when the first one comes."""

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
from plantune.runtime.captured.program_pool import ProgramPool
from plantune.runtime.watched.live_state import OwnedTensors
from plantune.runtime.watched.module_signature import ModuleSignature
from plantune.runtime.watched.torch_internals import without_autocast, without_saved_hooks
from plantune.space.recurrent import scans_on
from plantune.space.search_space import SearchSpace, load_search_space

# Signatures of the module whose pools are kept, such as the ones in training and in inference mode.
KEPT_SIGNATURES = 4
# Calls of a kind without a stored plan, before what runs unplanned calls is made for it: making
# takes long, and a shape may come once.
FEW_CALLS = 16
CallKey = tuple[PlannedCall, Trained, TorchSettings]
T = TypeVar("T")


class CallTable:
    """The kinds of calls that a module answers. `signature` is the module as it was last seen."""

    def __init__(
        self, owned: OwnedTensors, inputs: PlannedInputs, options: Options, device: torch.device
    ) -> None:
        self._owned, self._inputs, self._options, self._device = owned, inputs, options, device
        self._of_others = replace(options, known=False)
        self._on_cpu = device.type == "cpu"
        self._settings = torch_settings_of(device)
        self.why_no_plans: str | None = None
        with suppress(UnsupportedDevice):  # of a GPU that is not here the call tells
            self.why_no_plans = why_no_plans(device)
        self._lock = threading.Lock()
        # By the signature's key. A refresh starts new tables.
        self._kept: dict[object, dict[CallKey, Planned | str]] = {}
        self._waited: dict[object, dict[CallKey, int]] = {}
        self._spare: list[Planned] = []
        self._read: dict[tuple[Trained, PlannedCall], tuple[Graph, Outputs]] = {}
        self.signature = self._new_signature()
        self._first_key = self.signature.key

    def key_of(self, call: PlannedCall, trained: Trained) -> CallKey:
        return call, trained, self._settings()

    def settings_of(self, kept: Planned) -> Callable[[], TorchSettings] | None:
        """Says torch's settings, if they matter for it: they were `kept.settings`."""
        return self._settings if heeds_torch_settings(kept.pool.graph, self._device) else None

    def keeps(self, signature: ModuleSignature, call: PlannedCall, kept: Planned) -> bool:
        """Whether that runs such calls without gradients from now on."""
        found = signature.kept.get((call, None, None)) or signature.kept.get(
            self.key_of(call, None)
        )
        return found is kept

    def signature_now(self) -> ModuleSignature:
        """The module as it is; pools of the signatures that it had last are kept."""
        with self._lock:
            if self.signature.changed():
                self.signature = self._new_signature()
            return self.signature

    def refresh(self) -> None:
        """Has the module read again: its tensors, its attributes and its forward."""
        with self._lock:
            self._owned.forget()
            self._spare = self._in_signatures()  # those of before the last refresh end here
            self._kept, self._waited = {}, {}
            self.signature = self._new_signature()

    def weights_changed(self) -> None:
        with self._lock:
            self._owned.writes += 1

    def _new_signature(self) -> ModuleSignature:
        signature = ModuleSignature(self._owned.module, self._owned)
        signature.why_not = self.why_no_plans or signature.why_not
        signature.is_home = self._inputs.is_home(signature)
        signature.kept = _latest(self._kept, signature.key)
        signature.waited = _latest(self._waited, signature.key)
        self._read = {}
        return signature

    def register(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedCall | str:
        """The kind of a call that may be a new one; why not if it is not remembered."""
        with self._lock:
            found = self._inputs.register(args, kwargs)
            self._forget_others()
            return found

    def _forget_others(self) -> None:
        """Drops what was kept for kinds of calls that are no longer remembered."""
        tables: list[dict[CallKey, Any]] = [*self._kept.values(), *self._waited.values()]
        for kept in tables:
            for key in [key for key in kept if not self._inputs.remembers(key[0])]:
                del kept[key]

    def planned(
        self, signature: ModuleSignature, trained: Trained, call: PlannedCall
    ) -> Planned | str:
        """What runs such a call; why only the framework can."""
        with self._lock, without_autocast(self._device.type):
            key = self.key_of(call, trained)
            settings = key[2]
            with planned_for(None if isinstance(settings, int) else settings):
                found = self._planned(signature, key)
            if self._settings() != settings:
                # Another thread set torch otherwise meanwhile, for which some of it may be.
                signature.kept.pop(key, None)
            elif isinstance(found, Planned) and self.settings_of(found) is None:
                # To ask for them costs 0.7 us of each call (EPYC, 2026-11-23).
                signature.kept[call, trained, None] = found
            return found

    def _planned(self, signature: ModuleSignature, key: CallKey) -> Planned | str:
        call = key[0]
        if key in signature.kept:
            kept: Planned | str = signature.kept[key]
            return kept
        if not self._inputs.is_expected(call):
            return self._unexpected(signature, key)
        try:
            signature.kept[key] = kept = self._new(signature, key)
        except UntracedFunction as error:
            kept = signature.kept[key] = str(error)
            return kept
        except UnsupportedModule as error:
            if call.arguments.autocast is not None:
                kept = signature.kept[key] = f"autocast is on, under which no plan can be ({error})"
                return kept
            if not signature.is_parametrized and signature.key == self._first_key:
                raise
            what = "a weight is parametrized" if signature.is_parametrized else "it was changed"
            signature.why_not = f"{what} in a way without a plan ({error})"
            return signature.why_not
        return kept

    def _unexpected(self, signature: ModuleSignature, key: CallKey) -> Planned | str:
        """What runs a call that the module was not made for: at once if there is a plan for it."""
        call, waited = key[0], signature.waited.get(key, 0)
        unlike = self._inputs.unlike(call.arguments)
        signature.waited[key] = waited + 1
        if 0 < waited < FEW_CALLS or (waited and self._options.fallback == "error"):
            return unlike
        kept: Planned | str | None
        try:
            kept = self._new(signature, key, only_stored=not waited)
        except UnsupportedModule as error:
            kept = f"{unlike}, for which there can be none ({error})"
        if kept is None:
            return unlike
        signature.kept[key] = kept
        return kept

    @overload
    def _new(self, signature: ModuleSignature, key: CallKey) -> Planned: ...

    @overload
    def _new(
        self, signature: ModuleSignature, key: CallKey, *, only_stored: bool
    ) -> Planned | None: ...

    @without_saved_hooks()
    def _new(
        self, signature: ModuleSignature, key: CallKey, *, only_stored: bool = False
    ) -> Planned | None:
        call, trained, settings = key
        if self._options.consistent:
            trained = trained or signature.trained_alone(call.arguments.types)
        graph, outputs = self.extracted(signature, trained, call)
        self._read = {}  # the graph is the plan's now
        # What changed may be nothing that the graph was read from.
        for kept in self.all_kept():
            same = kept.pool.graph.named_digest == graph.named_digest
            same = same and kept.outputs.calls == outputs.calls
            if same and kept.settings == settings:
                return Planned(kept.pool, outputs, self._device, call, settings)
        options = self._options if self._inputs.is_expected(call) else self._of_others
        choice = Finder(graph, self.space(), self._owned, options, call.arguments)
        pool: ProgramPool | None
        if self._options.consistent and trained is not None:
            pool = self._consistent(signature, (call, trained, settings), choice)
        else:
            pool = choice.planned() if only_stored else choice.pool()
        return None if pool is None else Planned(pool, outputs, self._device, call, settings)

    def _consistent(self, signature: ModuleSignature, key: CallKey, choice: Finder) -> ProgramPool:
        """Instances of the plan for the largest batch, for whichever batch a call has."""
        call, trained, settings = key
        leader = self._inputs.leader_of(call)
        if call.plain.arguments == leader.plain.arguments:
            return choice.leading()
        key = leader, trained, settings
        kept = signature.kept.get(key)
        if not isinstance(kept, Planned):
            kept = signature.kept[key] = self._new(signature, key)
        return choice.following(kept.pool)

    def extracted(
        self, signature: ModuleSignature, trained: Trained, call: PlannedCall
    ) -> tuple[Graph, Outputs]:
        """The layer graph, with the gradients of what gets one."""
        if signature is not self.signature:
            return self._extracted(signature, trained, call)
        # Before the first call it was checked whether there is one.
        if (trained, call) not in self._read:
            self._read = {(trained, call): self._extracted(signature, trained, call)}
        return self._read[trained, call]

    def _extracted(
        self, signature: ModuleSignature, trained: Trained, call: PlannedCall
    ) -> tuple[Graph, Outputs]:
        # On a GPU weights are read in place, so nothing is folded into them.
        folds = trained is None and self._on_cpu
        graph, outputs = extract_with_outputs(
            self._owned.module,
            call.arguments,
            fold=folds,
            derives=trained is not None,
            scans=scans_on(arch_of(self._device)),
        )
        if trained is not None:
            wanted = signature.wanted(trained, [name for name, _ in graph.inputs])
            graph = differentiate(graph, [name for name in wanted if name in graph.types])
        return graph, outputs

    def all_kept(self) -> list[Planned]:
        """What runs calls of all kinds, in the signatures that are kept."""
        return [*self._spare, *self._in_signatures()]

    def _in_signatures(self) -> list[Planned]:
        every = (kept for table in self._kept.values() for kept in table.values())
        return [kept for kept in every if isinstance(kept, Planned)]

    def space(self) -> SearchSpace:
        space = load_search_space(arch_of(self._device))
        if self._on_cpu:
            return space
        device = torch.cuda.get_device_properties(self._device)
        return space.with_multiprocessors(device.multi_processor_count)


def _latest(tables: dict[object, dict[CallKey, T]], key: object) -> dict[CallKey, T]:
    """The table of that signature, which is the last one to be forgotten now."""
    found = tables[key] = tables.pop(key, {})
    while len(tables) > KEPT_SIGNATURES:
        del tables[next(iter(tables))]
    return found
