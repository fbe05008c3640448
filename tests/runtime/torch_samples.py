"""One sample call of each entry of the lists by which torch tests its own functions and modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class Function(nn.Module):
    """A function with all of its arguments that are not tensors."""

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        super().__init__()
        leaves, self._spec = tree_flatten(arguments)
        self._function = function
        self._leaves = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self._places = tuple(at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor))

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self._leaves)
        for at, tensor in zip(self._places, tensors, strict=True):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self._function(*args, **kwargs)


@dataclass(frozen=True)
class Sample:
    name: str
    module: nn.Module
    tensors: tuple[Tensor, ...]


class NoSample(Exception):
    """The list has no sample of an entry."""


def of_functions() -> Iterator[partial[Sample]]:
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        yield partial(_of_function, info, name=f"{info.name} {info.variant_test_name}".strip())


def of_modules() -> Iterator[partial[Sample]]:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        yield partial(_of_module, info, name=info.name)


def _of_function(info: Any, name: str) -> Sample:
    dtypes = sorted(info.dtypes, key=lambda dtype: (dtype != torch.float32, str(dtype)))
    given = next(iter(info.sample_inputs("cpu", dtypes[0])), None) if dtypes else None
    if given is None:
        raise NoSample
    return _sample(name, info.op, ((given.input, *given.args), given.kwargs))


def _of_module(info: Any, name: str) -> Sample:
    given = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=False
    )[0]
    made = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
    call = given.forward_input
    return _sample(name, made, (tuple(call.args), call.kwargs))


def _sample(name: str, function: Callable[..., Any], arguments: Any) -> Sample:
    """A module that is the function becomes a submodule."""
    held = tree_flatten(arguments)[0]
    tensors = tuple(leaf.detach() for leaf in held if isinstance(leaf, Tensor))
    return Sample(name, Function(function, arguments).eval(), tensors)
