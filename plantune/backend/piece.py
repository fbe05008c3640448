"""One captured graph, run from plans for each set of parameters that it is called with."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import attrgetter, is_, itemgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslator

from plantune.backend.allowance import Allowance
from plantune.backend.captured import Captured, Code, Inputs
from plantune.backend.limits import SCALARS, detached, why_not
from plantune.base.warning import warn
from plantune.errors import InputMismatch, UnsupportedDevice, UnsupportedModule
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.lines import lines_of
from plantune.graph.tracing.shadow import DOOR
from plantune.runtime.calls.framework import UnplannedCall
from plantune.runtime.module import TunedModule


def name_of(graph: fx.GraphModule) -> str:
    """To be asked while Dynamo captures it. It names plans, so it is a word."""
    names = (re.sub(r"\W", "", name) for name in _names(graph))
    return next(filter(None, names), "function")


def _names(graph: fx.GraphModule) -> Iterator[str]:
    frame = InstructionTranslator.current_tx()
    owners = (value for value in frame.f_locals.values() if isinstance(value, nn.Module))
    yield from (type(owner).__name__ for owner in owners)
    for node in graph.graph.nodes:
        for _, kind in node.meta.get("nn_module_stack", {}).values():
            yield str(getattr(kind, "__name__", kind))
    yield frame.f_code.co_name


def line_of(graph: fx.GraphModule) -> str:
    """Where it begins; empty if torch has noted that nowhere."""
    found = (lines_of(node) for node in graph.graph.nodes)
    return next(filter(None, found), [""])[0]


# What says that a call has no plan, before anything of it has run.
REFUSED = (UnsupportedModule, UnsupportedDevice, InputMismatch)
# Parameters that so many calls came without may be those of a module that is gone.
IDLE_CALLS = 64
Given = tuple[Any, ...]


@dataclass
class Owner:
    """The graph with one set of parameters and buffers, tuned for each size that it came with."""

    state: Given
    module: Captured
    tuned: dict[Given, TunedModule] = field(default_factory=dict)
    last_call: int = 0

    def has(self, state: Given) -> bool:
        return all(map(is_, self.state, state))


class Piece:
    """Takes all inputs of the graph, parameters and buffers too: Dynamo calls one piece for all
    modules of the same code.

    `why_not` says why the framework runs it, None if plans do. Its first call warns of that, unless
    it computes scalars alone.
    """

    def __init__(
        self, graph: fx.GraphModule, examples: Sequence[Any], allowance: Allowance
    ) -> None:
        self.name, self.line = name_of(graph), line_of(graph)
        self._eager, self._code = graph.forward, Code(graph, detached(graph))
        self._inputs = Inputs.of(graph, examples)
        self._owned, self._given = _getter(self._inputs.owned), _getter(self._inputs.given)
        # Whatever size is not the same in all calls is an input of its own.
        numbers = (place for place, value in enumerate(examples) if not isinstance(value, Tensor))
        self._sizes = _getter(numbers)
        # Dynamo captures another graph where either differs.
        trains = torch.is_grad_enabled() and any(map(_requires_grad, examples))
        self._mode = "train" if trains else "infer"
        self._owners: list[Owner] = []
        self._last: Owner | None = None
        self._calls = 0
        self._lock, self._allowance = threading.Lock(), allowance
        self.why_not = why_not(graph)
        self._is_said = self.why_not is SCALARS
        self._number = next(_numbers)
        _alive.add(self)

    def __call__(self, *values: Any) -> Any:
        self._calls += 1
        if self.why_not is not None:
            return self._by_torch(values)
        owner, given = self._owner_of(self._owned(values)), self._given(values)
        try:
            return self._code.whole(self._tuned_for(owner, self._sizes(values), given)(*given))
        except REFUSED as error:
            # It has come by that door.
            reason = str(error).replace(f"{DOOR}, or write", "Write")
            self.why_not = reason.replace(f". {DOOR}", "").replace(f"; else {DOOR}", "")
            self._owners, self._last = [], None
        return self._by_torch(values)

    def stats(self) -> tuple[int, int]:
        """How many calls ran from plans, and how many through the framework."""
        tuned = [each for owner in self._owners for each in owner.tuned.values()]
        planned = sum(each.stats().planned for each in tuned)
        return planned, self._calls - planned

    def _owner_of(self, state: Given) -> Owner:
        owner = self._last
        if owner is None or not owner.has(state):
            with self._lock:
                known = (other for other in self._owners if other.has(state))
                owner = self._last = next(known, None) or self._new(state)
        owner.last_call = self._calls
        return owner

    def _new(self, state: Given) -> Owner:
        longest = max(IDLE_CALLS, 4 * len(self._owners))
        self._owners = [b for b in self._owners if self._calls - b.last_call < longest]
        kind = type(self.name, (Captured,), {})  # whose name errors and plans have
        module = kind(self._code, self._inputs, state).train(self._mode == "train")
        self._owners.append(Owner(state, module))
        return self._owners[-1]

    def _tuned_for(self, owner: Owner, sizes: Given, given: Given) -> TunedModule:
        known = owner.tuned.get(sizes)
        if known is not None and self._allowance.waits and not _is_capturing():
            self._allowance.spend()
            known = owner.tuned.get(sizes)
        # A tuned module that is asked whether it is true takes as long as all of this.
        return self._new_tuned(owner, sizes, given) if known is None else known

    def _new_tuned(self, owner: Owner, sizes: Given, given: Given) -> TunedModule:
        first = next((value for value in given if isinstance(value, Tensor)), None)
        if first is None:
            raise UnsupportedModule("it has no tensor among its inputs")
        with self._lock:
            if sizes in owner.tuned:  # by another thread
                return owner.tuned[sizes]
            arguments, place = Arguments.of(owner.module, given, {}), first.device
            tuned = owner.tuned[sizes] = TunedModule(
                owner.module, arguments, name=self.name, mode=self._mode, device=place
            )
            self._allowance.join(tuned, partial(owner.tuned.pop, sizes, None))
            return tuned

    def _by_torch(self, values: Given) -> Any:
        """Runs the graph as it was captured, which is said once."""
        if not self._is_said:
            self._is_said = True
            text = f"{self.name} ({self.line}): {self.why_not}; the framework runs this piece"
            warn(text, UnplannedCall)
        return self._eager(*values)


def pieces() -> list[Piece]:
    """Those that there are now, in the order in which Dynamo captured them."""
    return sorted(_alive, key=attrgetter("_number"))


_alive: WeakSet[Piece] = WeakSet()
_numbers = count()


def _requires_grad(example: Any) -> bool:
    return isinstance(example, Tensor) and example.requires_grad


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _getter(places: Iterable[int]) -> Callable[[Given], Given]:
    """Takes the values at these places."""
    wanted = tuple(places)
    if len(wanted) > 1:
        return itemgetter(*wanted)
    if wanted:
        return lambda values: (values[wanted[0]],)
    return lambda values: ()
