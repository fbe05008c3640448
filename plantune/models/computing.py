"""Modules that keep their parameters in one dtype and compute in another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_classes: dict[tuple[type[nn.Module], torch.dtype], type[nn.Module]] = {}


def computing_in(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module itself, which from now on casts its parameters in each call, so that it computes
    as if it had been brought to `dtype`. Gradients go to the parameters as they are. Batch norms
    keep theirs, as their statistics do.
    """
    module.__class__ = _class_of(type(module), dtype)
    return module


class _Casting(nn.Module):
    """What `computing_in` puts in front of a class."""

    kind: type[nn.Module]
    computes_in: torch.dtype

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self.kind, self.computes_in), self.__dict__


def _class_of(kind: type[nn.Module], dtype: torch.dtype) -> type[nn.Module]:
    if (kind, dtype) not in _classes:
        told = {"kind": kind, "computes_in": dtype, "__module__": kind.__module__}
        told["forward"] = _casting(kind.forward)
        _classes[kind, dtype] = type(kind.__name__, (_Casting, kind), told)
    return _classes[kind, dtype]


def _casting(function: Any) -> Any:
    """Takes what the network's own forward takes, and says so."""

    @wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _cast(self, self.computes_in):
            return function(self, *args, **kwargs)

    return forward


def _empty(kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    of_both = _class_of(kind, dtype)
    return of_both.__new__(of_both)


@contextmanager
def _cast(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, casts are in the place of parameters; a parameter that is shared has one."""
    held = [(m, dict(m._parameters)) for m in module.modules() if not isinstance(m, _BatchNorm)]
    made: dict[int, Tensor] = {}
    try:
        for owner, own in held:
            for name, parameter in own.items():
                if parameter is not None and parameter.is_floating_point():
                    if id(parameter) not in made:
                        made[id(parameter)] = parameter.to(dtype)
                    owner._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        yield
    finally:
        for owner, own in held:
            owner._parameters.update(own)
