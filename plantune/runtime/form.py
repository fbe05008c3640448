"""Watches what a module's layer graph was read from, besides the values of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PLAIN = frozenset((bool, int, float, str, tuple, type(None)))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Form:
    """A module's submodules, their settings (stride, momentum, ...) and its tensors' types, as they
    were when this was made. Where one of them changed, the module needs another layer graph.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = tuple(module.modules())
        self._children = [m._modules for m in self._modules]
        self._sizes = [len(children) for children in self._children]
        self._settings = [entry for m in self._modules for entry in _settings(m)]
        self._tensors = [held for m in self._modules for held in (m._parameters, m._buffers)]
        self._types = self._types_now()
        self._hooks = [getattr(m, kind) for m in self._modules for kind in HOOKS]

    def changed(self) -> bool:
        """Whether the module is not what it was when this was made."""
        missing = object()
        return (
            any(held.get(key, missing) is not value for held, key, value in self._settings)
            or [len(children) for children in self._children] != self._sizes
            or self._types_now() != self._types
        )

    def _types_now(self) -> list[object]:
        """Shape and dtype of every tensor, and how many differ: tying weights changes that."""
        tensors = [t for held in self._tensors for t in held.values() if t is not None]
        return [*((t.shape, t.dtype) for t in tensors), len({id(t) for t in tensors})]

    def training(self) -> tuple[bool, ...]:
        """The mode of each submodule."""
        return tuple(m.training for m in self._modules)

    def has_parameters(self) -> bool:
        """Whether every parameter is one, and no plain tensor in its place."""
        held = (t for m in self._modules for t in m._parameters.values() if t is not None)
        return all(isinstance(t, nn.Parameter) for t in held)

    def has_hooks(self) -> bool:
        """Whether torch would call something besides the modules themselves."""
        everywhere = torch.nn.modules.module._has_any_global_hook()
        return bool(everywhere) or any(self._hooks)


def _settings(module: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Where each child and plain attribute is kept, and what it is now; the mode is apart."""
    own = vars(module)
    plain = [key for key, value in own.items() if type(value) in PLAIN and key[0] != "_"]
    return [
        *((own, key, own[key]) for key in plain if key != "training"),
        *((module._modules, key, child) for key, child in module._modules.items()),
    ]
