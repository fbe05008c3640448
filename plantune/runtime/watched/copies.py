"""Copies a module with all that its replaced methods hold."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plantune.errors import UnsupportedModule

M = TypeVar("M", bound=nn.Module)
LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}


def copied(module: M, memo: dict[int, Any] | None = None) -> M:
    """A deep copy that shares nothing with the module but what `memo` shares.

    `copy.deepcopy` keeps functions as they are: where a child's forward was replaced by a function
    that holds the child, as adapters do, the copy would go on computing with the original. `memo`
    says of objects by their id what takes their place.
    """
    memo = {} if memo is None else memo
    memo.update(_computed(module))
    memo.update(_locks(module))
    before = dict(memo)
    try:
        result = copy.deepcopy(module, memo)
    except Exception as error:
        for place in _uncopied(module, before):
            raise UnsupportedModule(
                f"{type(module).__name__} cannot be copied, because of self.{place}: {error}. Set "
                "it after optimize, or give its class a __deepcopy__"
            ) from error
        raise
    rebind(result, memo)
    for child in result.modules():
        # Copies are apart in memory: cuDNN would gather them in each call, and warn of it.
        if isinstance(child, nn.RNNBase):
            child.flatten_parameters()
    return result


def _locks(module: nn.Module) -> dict[int, Any]:
    """Locks of a copy's own."""
    values = (value for child in module.modules() for value in vars(child).values())
    return {id(value): LOCKS[type(value)]() for value in values if type(value) in LOCKS}


def _uncopied(module: nn.Module, memo: dict[int, Any]) -> Iterator[str]:
    """The paths of attributes that `copy.deepcopy` refuses."""
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            try:
                if name != "_modules":
                    copy.deepcopy(value, dict(memo))
            except Exception:
                yield f"{path}.{name}" if path else name


def _computed(module: nn.Module) -> dict[int, Any]:
    """Copies of tensors that the last call left among the attributes, such as the weight that
    weight_norm or pruning computes: `copy.deepcopy` refuses tensors with a history.
    """
    values = (values for m in module.modules() for values in (vars(m), m._buffers))
    left = (x for each in values for x in each.values() if isinstance(x, Tensor) and not x.is_leaf)
    return {id(x): x.detach().clone() for x in left}


def shared_state(module: nn.Module) -> dict[int, Any]:
    """A memo with which a copy of the module has its parameters and buffers, and the very tables
    that hold them: what is put into these is there for both. Raises UnsupportedModule where copies
    cannot share them.
    """
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        raise UnsupportedModule(
            f"{type(module).__name__} cannot share its weights: copies of what TorchScript made "
            "have their own. Give the module that was scripted or traced"
        )
    shared = [*module.parameters(), *module.buffers()]
    tables = [table for child in module.modules() for table in (child._parameters, child._buffers)]
    return {id(kept): kept for kept in (*shared, *tables)}


def rebind(module: nn.Module, memo: dict[int, Any]) -> None:
    """Has functions among the attributes of a deep copy, made with `memo`, hold copies too."""
    for child in module.modules():
        for name, value in vars(child).items():
            if isinstance(value, FunctionType):
                vars(child)[name] = _copied(value, memo)


def copied_value(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of what an attribute or a table of hooks holds, made as `copied` does."""
    if isinstance(value, Tensor) and not value.is_leaf and id(value) not in memo:
        return value.detach().clone()  # the last call left it there
    if type(value) in LOCKS:
        return LOCKS[type(value)]()
    return _copied(value, memo) if callable(value) else copy.deepcopy(value, memo)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType):
        return _copied_function(value, memo)
    if isinstance(value, (nn.Module, MethodType, Tensor)):
        return copy.deepcopy(value, memo)
    return value


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    cells = tuple(CellType() for _ in function.__closure__ or ())
    result = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, cells or None
    )
    result.__qualname__, result.__module__ = function.__qualname__, function.__module__
    vars(result).update(vars(function))
    memo[id(function)] = result
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _copied(original.cell_contents, memo)
        except ValueError:  # It is empty.
            continue
    defaults, by_name = function.__defaults__, function.__kwdefaults__
    result.__defaults__ = defaults and tuple(_copied(value, memo) for value in defaults)
    result.__kwdefaults__ = by_name and {k: _copied(v, memo) for k, v in by_name.items()}
    return result
