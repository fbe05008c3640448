"""The signature of a module: what its layer graph was read from, but for the values of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from gc import get_referents
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, get_default_dtype, nn
from torch.nn.utils.parametrize import is_parametrized

from plantune.runtime.watched import epoch
from plantune.runtime.watched.live_state import OwnedTensors, Watched, contents_differ

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Torch's hooks for every module of the process.
OF_ALL_MODULES: tuple[dict[Any, Any], ...] = tuple(
    getattr(torch.nn.modules.module, f"_global{kind}") for kind in HOOKS
)
# What every module has; the last is for padding modes that plantune does not plan.
OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"_reversed_padding_repeated_twice"}
# A container with more elements, such as a vocabulary, is watched as one object with a length.
MOST_WATCHED = 1000
CONTAINERS = (tuple, list, dict, set, frozenset, deque)
_requires_grad = attrgetter("requires_grad")


class ModuleSignature:
    """What a module is made of: submodules, their modes, attributes and hooks, the types of their
    tensors. Modules with equal keys have the same layer graph.
    """

    def __init__(self, module: nn.Module, tensors: OwnedTensors) -> None:
        modules = tuple(module.modules())
        hooks = [*(getattr(m, kind) for m in modules for kind in HOOKS), *OF_ALL_MODULES]
        self._watched = Watched([*map(attributes, modules), *(m._modules for m in modules), *hooks])
        self.tensors = tensors
        # What runs the module with this signature, by what gets a gradient.
        self.kept: dict[Any, Any] = {}
        # How often calls came for which nothing is kept.
        self.waited: dict[Any, int] = {}
        self._moves = tensors.moves
        # Of what a forward makes of Python's numbers.
        self._default_dtype = get_default_dtype()
        values = Frozen()
        self.key = (*_structure(modules, values), _types(modules), self._default_dtype)
        self._containers = values.containers
        self._contents = [*chain.from_iterable(self._containers)]
        self.first = leading(module)
        parameters = dict(module.named_parameters())
        self._names, self._parameters = [*parameters], [*parameters.values()]
        # What was asked of `parameters` last.
        self._last: tuple[tuple[bool, ...], Mapping[str, Tensor]] = ((), {})
        self.why_not = _why_not(modules, hooks)
        # Whether it is where, and of the dtype, that its plans are for.
        self.is_home = True
        self.is_parametrized = any(map(is_parametrized, modules))

    def changed(self) -> bool:
        """Whether the module may be another one than when this was made; looks at its tensors."""
        tensors, watched = self.tensors, self._watched
        tensors.look()
        if self._moves != tensors.moves or get_default_dtype() is not self._default_dtype:
            return True
        if watched.seen != epoch.count and watched.changed():
            return True
        return bool(self._containers) and self._contents_changed()

    def looker(self) -> Callable[[], bool]:
        """Says that nothing has changed, as `changed` would, as long as all tensors stay where the
        last look found them. A function of what it looks at alone: each call of the module asks.
        """
        owned, mine, default_dtype = self.tensors, self._watched, self._default_dtype
        snapshot = owned.snapshot
        in_place, others, containers = snapshot.in_place, snapshot.watched, self._containers
        contents = self._contents
        seen, is_counted = -1, mine.is_counted and others.is_counted
        if owned.moves != self._moves:
            return _never

        def is_same() -> bool:
            nonlocal seen
            if owned.snapshot is not snapshot or get_default_dtype() is not default_dtype:
                return False
            count = epoch.count
            if count != seen:
                if others.changed() or mine.changed():
                    return False
                if is_counted:
                    seen = count
            return in_place() and (not containers or not contents_differ(containers, contents))

        return is_same

    def _contents_changed(self) -> bool:
        return contents_differ(self._containers, self._contents)

    def trained(self) -> tuple[bool, ...]:
        """Of each parameter, whether it requires a gradient now."""
        return tuple(map(_requires_grad, self._parameters))

    def trained_alone(self, inputs: Sequence[object]) -> tuple[bool, ...] | None:
        """`trained`, and no gradient of any of these inputs; None if no parameter has one."""
        trained = (*self.trained(), *(False for _ in inputs))
        return trained if any(trained) else None

    def wanted(self, trained: Sequence[bool], inputs: Iterable[str]) -> tuple[str, ...]:
        """The names of those for which `trained` is true: of parameters, then of these inputs."""
        named = zip((*self._names, *inputs), trained, strict=True)
        return tuple(name for name, wanted in named if wanted)

    def parameters(self, trained: tuple[bool, ...]) -> Mapping[str, Tensor]:
        """The parameters for which `trained` is true, by name."""
        asked, found = self._last
        if asked != trained:
            every = zip(self._names, self._parameters, trained, strict=False)
            found = {name: tensor for name, tensor, wanted in every if wanted}
            self._last = trained, found
        return found


def _never() -> bool:
    return False


def leading(module: nn.Module) -> Tensor | None:
    """What says where a module is, and of which dtype: a parameter, else a buffer of floats."""
    buffers = sorted(module.buffers(), key=lambda buffer: not buffer.is_floating_point())
    return next(chain(module.parameters(), buffers), None)


def attributes(module: nn.Module) -> dict[str, Any]:
    """The dict of a module's attributes, as one that can be watched: Python 3.13 keeps the values
    in the object itself at first, and reports no changes there.
    """
    if not get_referents(vars(module)):
        object.__setattr__(module, "__dict__", dict(vars(module)))
    return vars(module)


def _why_not(modules: tuple[nn.Module, ...], hooks: list[Any]) -> str | None:
    """Why such a module cannot run from a plan, whatever it is called with."""
    if any(OF_ALL_MODULES):
        return "torch has hooks for all modules, which a plan cannot call"
    if any(hooks):
        return "submodules have hooks, which a plan cannot call"
    owned = (t for m in modules for t in m._parameters.values() if t is not None)
    if not all(isinstance(t, nn.Parameter) for t in owned):
        if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
            return "TorchScript keeps its parameters: give the module that was scripted or traced"
        return "parameters are replaced by plain tensors, as functional_call does"
    return None


def _structure(modules: tuple[nn.Module, ...], values: Frozen) -> Iterator[object]:
    """Class, submodules and attributes of each module."""
    places = {id(module): index for index, module in enumerate(modules)}
    for module in modules:
        children = tuple((k, places.get(id(m))) for k, m in module._modules.items())
        own = tuple((k, values.frozen(v)) for k, v in vars(module).items() if k not in OF_TORCH)
        yield type(module), children, own


def _types(modules: tuple[nn.Module, ...]) -> tuple[object, ...]:
    """Of each parameter and buffer its type, and which are the same one."""
    order: dict[int, int] = {}
    owned = [owned for m in modules for owned in (m._parameters, m._buffers)]
    named = [(key, t) for tensors in owned for key, t in tensors.items() if t is not None]
    return tuple((key, t.shape, t.dtype, order.setdefault(id(t), len(order))) for key, t in named)


class Frozen:
    """Attributes as hashable values, and the mutable containers that were found among them."""

    def __init__(self) -> None:
        self.containers: list[Iterable[Any]] = []
        self._inside: set[int] = set()

    def frozen(self, value: Any) -> object:
        """Equal for values of equal type that mean the same; other objects equal themselves."""
        kind = type(value)
        if kind in (bool, int, str, bytes, type(None)):
            return kind, value
        if kind in (float, complex) or _is_numpy_scalar(kind):
            return kind, repr(value)  # tells -0.0 from 0.0, and nan equals nan
        if isinstance(value, CONTAINERS) and id(value) not in self._inside:
            return self._contents(value)
        return _Same(value)

    def _contents(self, value: Any) -> object:
        if len(value) > MOST_WATCHED:
            return _Same(value), len(value)
        if isinstance(value, (list, dict, set, deque)):
            self.containers += [value, value.values()] if isinstance(value, dict) else [value]
        self._inside.add(id(value))
        items = value.items() if isinstance(value, dict) else value
        contents = tuple(self.frozen(item) for item in items)
        self._inside.discard(id(value))
        return type(value), contents


def _is_numpy_scalar(kind: type) -> bool:
    return any(base.__module__ == "numpy" and base.__name__ == "generic" for base in kind.__mro__)


def holds_objects(frozen: object) -> bool:
    """Whether part of such a value is an object that is compared by identity."""
    if isinstance(frozen, tuple):
        return any(map(holds_objects, frozen))
    return isinstance(frozen, _Same)


class _Same:
    """An object that is compared by identity, and lives as long as this."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
