"""Watches what a module's layer graph was read from, besides the values of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import call, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from plantune.runtime.live_state import CPU, HeldTensors

PLAIN = frozenset((bool, int, float, str, tuple, type(None)))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_training = itemgetter("training")
Places = list[tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], Any]]]


class Form:
    """A module's submodules, their settings (stride, momentum, ...) and its tensors' types, as they
    were when this was made. Where one of them changed, the module needs another layer graph.

    It is asked in every call, so it looks at a whole dict at a time: 16 us for se_resnet9_fixup, 10
    of them for its tensors (2026-11-20).
    """

    def __init__(self, module: nn.Module, otherwise: torch.device = CPU) -> None:
        self._modules = tuple(module.modules())
        self._attributes = [vars(m) for m in self._modules]
        self._children = [m._modules for m in self._modules]
        self._sizes = [*map(len, self._children)]
        settings = [place for m in self._modules for place in _settings(m)]
        self._settings = [get for _, get in settings], [held for held, _ in settings]
        self._set = [*map(call, *self._settings)]
        self.tensors = HeldTensors(module, otherwise)
        self._moves = self.tensors.moves
        self._named = _named(module)
        self._types = self._types_now()
        self._has_parameters = self._has_parameters_now()
        self._hooks = [getattr(m, kind) for m in self._modules for kind in HOOKS]

    def changed(self) -> bool:
        """Whether the module is not what it was when this was made; looks at its tensors."""
        try:
            if [*map(call, *self._settings)] != self._set:
                return True
        except KeyError:
            return True
        return [*map(len, self._children)] != self._sizes or self._tensors_changed()

    def _tensors_changed(self) -> bool:
        """Other tensors, or other memory in the same ones, may have other types."""
        self.tensors.look()
        if self._moves != self.tensors.moves:  # by this look, or by one that a backward pass took
            self._moves = self.tensors.moves
            if self._types_now() != self._types:
                return True
            self._has_parameters = self._has_parameters_now()
        return False

    def _types_now(self) -> list[object]:
        """Shape and dtype of every tensor, and how many differ: tying weights changes that."""
        tensors = self.tensors.present
        return [*((t.shape, t.dtype) for t in tensors), len({id(t) for t in tensors})]

    def training(self) -> tuple[bool, ...]:
        """The mode of each submodule."""
        return tuple(map(_training, self._attributes))

    def first_tensor(self) -> Tensor | None:
        """A parameter or buffer, as it is now: its device and dtype are the module's."""
        return next(iter(self.tensors.present), None)

    def trained(self) -> tuple[str, ...]:
        """The names of the parameters that require a gradient now."""
        return tuple([name for name, held, key in self._named if held[key].requires_grad])

    def parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of these names that there are, as they are now."""
        wanted = frozenset(names)
        return {name: held[key] for name, held, key in self._named if name in wanted}

    def has_parameters(self) -> bool:
        """Whether every parameter is one, and no plain tensor in its place."""
        return self._has_parameters

    def _has_parameters_now(self) -> bool:
        held = (t for m in self._modules for t in m._parameters.values() if t is not None)
        return all(isinstance(t, nn.Parameter) for t in held)

    def has_hooks(self) -> bool:
        """Whether torch would call something besides the modules themselves."""
        everywhere = torch.nn.modules.module._has_any_global_hook()
        return bool(everywhere) or any(self._hooks)


def _settings(module: nn.Module) -> Places:
    """Where a module keeps its children and plain attributes, and what gets them from there.

    The mode is apart.
    """
    own = vars(module)
    plain = [k for k, v in own.items() if type(v) in PLAIN and k[0] != "_" and k != "training"]
    kept = [(own, plain), (module._modules, [*module._modules])]
    return [(held, itemgetter(*keys)) for held, keys in kept if keys]


def _named(module: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Each parameter's name, and the dict and key under which its module keeps it."""
    places = {}
    for path, owner in module.named_modules():
        for key in owner._parameters:
            places[f"{path}.{key}" if path else key] = (owner._parameters, key)
    return [(name, *places[name]) for name, _ in module.named_parameters()]
