"""Brings what changes in a module to a copy of it that shares its parameters and buffers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import nn

from plantune.errors import UnsupportedModule
from plantune.runtime.watched import epoch
from plantune.runtime.watched.copies import copied, copied_value, shared_state
from plantune.runtime.watched.live_state import Watched, contents_differ
from plantune.runtime.watched.module_signature import HOOKS as CALLED
from plantune.runtime.watched.module_signature import Frozen, attributes, holds_objects

# What is nn.Module's own and torch.compile's; of it, tables that twins share, and those of hooks.
OF_TORCH = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
SHARED = ("_parameters", "_buffers")
HOOKS = tuple(sorted(name for name in OF_TORCH if "_hooks" in name))
FLAGS = ("_is_full_backward_hook", "_non_persistent_buffers_set")
# What is looked at before each call; the other tables of hooks change with one of these.
LOOKED_AT = ("_modules", *CALLED)


@dataclass(frozen=True)
class _Seen:
    """A part of the module as its twin was last made like it; what it names lives as long."""

    part: nn.Module
    twin: nn.Module
    kind: type[nn.Module]
    children: Mapping[str, nn.Module | None]
    attributes: Mapping[str, object]
    hooks: Mapping[str, Mapping[Any, Any]]
    # Whether its mode is another one than that of the module as a whole.
    is_apart: bool


class Mirror:
    """Has the twin of each part of a module follow it: its class, submodules, attributes, hooks and
    mode. What is changed in a twin stays until the module changes in that place.

    Modes are followed while both are in the same one as a whole: an actor stays in eval mode while
    the module that it shares its weights with is trained.
    """

    def __init__(self, module: nn.Module, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        self.module = module
        self._twin = pairs[0][1]
        self._lock = threading.Lock()
        self._watched, self._values = _watch(module), Frozen()
        self._seen = {id(part): self._as_now(part, twin) for part, twin in pairs}
        self._contents = self._now_inside()

    @staticmethod
    def of(module: nn.Module, twins: Mapping[int, Any]) -> Mirror:
        """`twins` has the copy of each part by its id, as a memo of `copy.deepcopy` does."""
        return Mirror(module, [(part, twins[id(part)]) for part in module.modules()])

    def follow(self) -> bool:
        """Makes the twins like the module if that changed; whether it did. Raises UnsupportedModule
        as long as something in it cannot be copied.
        """
        if not self._changed():
            return False
        with self._lock:
            if self._changed():
                self._bring()
        return True

    def read_again(self) -> None:
        """Also copies objects among the attributes again, whose own changes are not seen."""
        with self._lock:
            for place, seen in self._seen.items():
                plain = {k: v for k, v in seen.attributes.items() if not holds_objects(v)}
                self._seen[place] = replace(seen, attributes=plain)
            self._bring()

    def __reduce__(self) -> Any:
        return Mirror, (self.module, [(seen.part, seen.twin) for seen in self._seen.values()])

    def __deepcopy__(self, memo: dict[int, Any]) -> Mirror:
        known = memo.get(id(self.module))
        module = copied(self.module, memo) if known is None else known
        twins = [(memo[id(s.part)], copy.deepcopy(s.twin, memo)) for s in self._seen.values()]
        return Mirror(module, twins)

    def _changed(self) -> bool:
        watched = self._watched
        if watched.seen != epoch.count and watched.changed():
            return True
        containers = self._values.containers
        return bool(containers) and contents_differ(containers, self._contents)

    def _now_inside(self) -> list[Any]:
        return [*chain.from_iterable(self._values.containers)]

    def _as_now(self, part: nn.Module, twin: nn.Module) -> _Seen:
        own = [(name, value) for name, value in vars(part).items() if name not in OF_TORCH]
        return _Seen(
            part,
            twin,
            type(part),
            dict(part._modules),
            {name: self._values.frozen(value) for name, value in own},
            {name: dict(getattr(part, name)) for name in HOOKS},
            part.training != self.module.training,
        )

    def _bring(self) -> None:
        # Watched first: what changes meanwhile is found in the next call.
        watched, self._values = _watch(self.module), Frozen()
        memo = {**shared_state(self.module), **{p: s.twin for p, s in self._seen.items()}}
        alike = self.module.training == self._twin.training
        seen: dict[int, _Seen] = {}
        for part in self.module.modules():
            known = self._seen.get(id(part))
            try:
                if known is None:
                    seen[id(part)] = self._new(part, memo, alike)
                else:
                    seen[id(part)] = self._moved(known, memo, alike)
            except UnsupportedModule:
                raise
            except Exception as error:  # A copy runs the part's own methods.
                raise UnsupportedModule(self._why_not(part, error)) from error
        self._seen, self._watched, self._contents = seen, watched, self._now_inside()

    def _new(self, part: nn.Module, memo: dict[int, Any], alike: bool) -> _Seen:
        """Of a part that came in: on its own, or inside of another new one."""
        twin = memo[id(part)] if id(part) in memo else copied(part, memo)
        if not alike:
            vars(twin)["training"] = self._twin.training
        return self._as_now(part, twin)

    def _moved(self, before: _Seen, memo: dict[int, Any], alike: bool) -> _Seen:
        now = self._as_now(before.part, before.twin)
        part, twin = now.part, now.twin
        if now.kind is not before.kind:
            object.__setattr__(twin, "__class__", now.kind)
        _bring_children(before, now, memo)
        _bring_attributes(before, now, memo)
        for name in HOOKS:
            _bring_hooks(before.hooks[name], now.hooks[name], getattr(twin, name), memo)
        for name in SHARED:
            if vars(twin)[name] is not vars(part)[name]:
                vars(twin)[name] = vars(part)[name]
        for name in FLAGS:
            if vars(twin)[name] != vars(part)[name]:
                vars(twin)[name] = copy.copy(vars(part)[name])
        if not alike:
            return replace(now, is_apart=before.is_apart)
        if now.is_apart != before.is_apart:
            vars(twin)["training"] = part.training
        return now

    def _why_not(self, part: nn.Module, error: Exception) -> str:
        name = next(name for name, each in self.module.named_modules() if each is part)
        what = f"self.{name}" if name else "it"
        return (
            f"{type(self.module).__name__} shares its weights with a tuned module, which cannot "
            f"follow a change of {what}: {error}. Take that back, or optimize it anew"
        )


def _watch(module: nn.Module) -> Watched:
    parts = [*module.modules()]
    tables = [getattr(part, name) for part in parts for name in LOOKED_AT]
    return Watched([*map(attributes, parts), *tables])


def _bring_children(before: _Seen, now: _Seen, memo: dict[int, Any]) -> None:
    """In the module's order; children that the twin alone was given come last."""
    table, made = now.twin._modules, dict[str, nn.Module | None]()
    for name, child in now.children.items():
        if name in before.children and before.children[name] is child:
            made.update({name: table[name]} if name in table else {})
        elif child is None or id(child) in memo:
            made[name] = child and memo[id(child)]
        else:
            made[name] = copied(child, memo)
    known = {*before.children, *made}
    made.update((name, child) for name, child in table.items() if name not in known)
    if [*table.items()] != [*made.items()]:
        table.clear()
        table.update(made)


def _bring_attributes(before: _Seen, now: _Seen, memo: dict[int, Any]) -> None:
    own, theirs = vars(now.twin), vars(now.part)
    for name, value in now.attributes.items():
        if name not in before.attributes or before.attributes[name] != value:
            own[name] = copied_value(theirs[name], memo)
    for name in before.attributes.keys() - now.attributes.keys():
        own.pop(name, None)


def _bring_hooks(
    before: Mapping[Any, Any], now: Mapping[Any, Any], table: dict[Any, Any], memo: dict[int, Any]
) -> None:
    for number in now.keys() - before.keys():
        table[number] = copied_value(now[number], memo)
    for number in before.keys() - now.keys():
        table.pop(number, None)
