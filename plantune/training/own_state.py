"""What a training step may change beside weights: the runs before a capture must leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

# Such as a running center or a queue of keys. What is larger is more likely data.
MOST_BYTES = 1 << 26
# A function of a library's may lead to hundreds of others.
MOST_NAMED = 300
CODE = (FunctionType, MethodType, partial, nn.Module)


def state_of(modules: Sequence[nn.Module], loss: Callable[..., Any]) -> list[Tensor]:
    """Buffers of the modules, and of what the loss's code names: modules, such as the discriminator
    that judges a generator, and small tensors.
    """
    found: dict[int, Tensor] = {}
    code: Any = loss
    if not isinstance(loss, CODE):
        code = code.__call__
    for thing in (*modules, *_named(code)):
        if isinstance(thing, nn.Module):
            found |= {id(buffer): buffer for buffer in thing.buffers()}
        elif isinstance(thing, Tensor) and _may_be_state(thing):
            found[id(thing)] = thing
    return [*found.values()]


def _may_be_state(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        return False
    small = tensor.numel() * tensor.element_size() <= MOST_BYTES
    return small and not (tensor.requires_grad or tensor.is_inference())


def _named(code: Any) -> list[Any]:
    """What is found from a function by the names in its code, and in functions that it names."""
    found, seen = [code], {id(code)}
    for thing in found:  # which grows
        if len(found) > MOST_NAMED:
            break
        new = [each for each in _inside(thing) if id(each) not in seen]
        found += new
        seen.update(map(id, new))
    return found


def _inside(thing: Any) -> Sequence[Any]:
    if isinstance(thing, partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    if isinstance(thing, nn.Module):
        return (thing.forward,)
    if isinstance(thing, MethodType):
        attributes = getattr(thing.__self__, "__dict__", {})
        return (thing.__self__, thing.__func__, *attributes.values())
    if isinstance(thing, FunctionType) and not str(thing.__module__).startswith("torch."):
        return _variables(thing)
    return ()


def _variables(function: FunctionType) -> list[Any]:
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    with suppress(ValueError):  # a variable that is not set yet
        found = getclosurevars(function)
        return [*defaults, *found.nonlocals.values(), *found.globals.values()]
    return defaults
