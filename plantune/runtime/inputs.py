"""Which calls the plans of a tuned module are for, and why not others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plantune.errors import InputMismatch, InvalidGraph
from plantune.graph.arguments import CONSTANTS, Arguments, ordered
from plantune.graph.nested import kind_of, tensors_in
from plantune.graph.types import TensorType
from plantune.runtime.form import Form
from plantune.runtime.torch_internals import any_autocast

# Ways to write the arguments of one call that are remembered: by place, by name.
MOST_SPELLINGS = 64


class PlannedCall:
    """Calls with tensors of these types in these places, and with these other arguments."""

    def __init__(self, arguments: Arguments, order: Sequence[int]) -> None:
        self.arguments = arguments
        self._order = tuple(order)
        types = arguments.types
        # Of tensors by their place alone, which are told from others at a glance.
        plain = not arguments.kwargs and arguments.args == types and [*order] == sorted(order)
        self._count = len(types) if plain else -1
        self._expected = [(type_.torch_dtype, type_.shape) for type_ in types]

    def is_like(self, args: tuple[Any, ...]) -> bool:
        """Whether such arguments, and no named ones, are a call of this kind. Of other calls than
        tensors by their place this does not know.
        """
        if len(args) != self._count:
            return False
        for x, (dtype, shape) in zip(args, self._expected, strict=True):
            if type(x) is not Tensor or x.dtype is not dtype or x.shape != shape:
                return False
        return True

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Those of such a call, in the order of the graph's inputs."""
        if len(args) == self._count:
            return args
        found = tensors_in((args, kwargs))
        return tuple([found[at] for at in self._order])


class PlannedInputs:
    """Calls of one kind with tensors on one device, of a module that is there in their dtype."""

    def __init__(self, module: nn.Module, arguments: Arguments, device: torch.device, name: str):
        self._module, self._device, self._name = module, device, name
        self._types = arguments.types
        first = next(module.parameters(), None)
        floats = (type_.torch_dtype for type_ in self._types if type_.is_float)
        self._dtype = next(floats, None)
        # A module that casts its input is called with what it was made for, such as bytes.
        self._casts = first is not None and first.dtype != self._dtype
        self.expected = PlannedCall(arguments, range(len(self._types)))
        self._spelt: dict[Hashable, PlannedCall | None] = {}

    def call_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedCall | None:
        """The kind of such a call; None if there can be no plan for it."""
        if not kwargs and self.expected.is_like(args):
            return self.expected
        try:
            key = kind_of((args, kwargs), _kind_of_leaf)
        except _Foreign:
            return None
        if key not in self._spelt:
            if len(self._spelt) >= MOST_SPELLINGS:
                self._spelt.clear()
            self._spelt[key] = self._spelling(args, kwargs)
        return self._spelt[key]

    def _spelling(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedCall | None:
        try:
            arguments, order = ordered(self._module, args, kwargs)
        except InvalidGraph:  # Of a dtype that graphs do not have.
            return None
        expected = self.expected.arguments
        same = _without_layouts(arguments) == _without_layouts(expected)
        return PlannedCall(expected, order) if same else None

    def is_usual(self, tensors: Sequence[Tensor], form: Form) -> bool:
        """Whether nothing speaks against a plan for a call of a known kind; if something does,
        `why_not` says it.
        """
        for x in tensors:
            if x.device != self._device:
                return False
        return form.is_home and not any_autocast()

    def is_home(self, form: Form) -> bool:
        """Whether the module is where, and of the dtype, that it was made for."""
        if form.first is None:
            return True
        home = self._casts or form.first.dtype is self._dtype
        return home and form.first.device == self._device

    def why_not(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], form: Form) -> str:
        """Why such a call cannot run from a plan. Raises InputMismatch."""
        tensors = tensors_in((args, kwargs))
        if not tensors and (args or kwargs):
            kinds = ", ".join(type(arg).__name__ for arg in (*args, *kwargs.values()))
            raise InputMismatch(f"{self._name}: the input must be a tensor, got {kinds}")
        device = self._device if form.first is None else form.first.device
        autocast = device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)
        self._check_first(tensors, form, device, autocast)
        if autocast:
            return "autocast is on, which changes what each op computes"
        if form.first is not None and not form.is_home:
            return f"the module was moved to {form.first.dtype} on {device}"
        for x in tensors:
            if x.device != device:
                return f"an input is on {x.device}, the module on {device}"
        return self._other(args, kwargs)

    def _check_first(
        self, tensors: Sequence[Tensor], form: Form, device: torch.device, autocast: bool
    ) -> None:
        """The first input is where the module is, and of its dtype if it was in the example."""
        if not tensors:
            return
        x, state = tensors[0], form.first
        follows = state is not None and self._types[0].is_float and not self._casts
        wanted = state.dtype if state is not None and follows else x.dtype
        if x.device != device or (x.dtype != wanted and not autocast):
            raise InputMismatch(
                f"{self._name}: needs a {wanted} tensor on {device}, got {x.dtype} on {x.device}; "
                "convert the input, or move the module"
            )

    def _other(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """What tells a call from those that there are plans for."""
        try:
            kind_of((args, kwargs), _kind_of_leaf)
            arguments, _ = ordered(self._module, args, kwargs)
        except (_Foreign, InvalidGraph) as error:
            return str(error)
        expected = self.expected.arguments
        wanted, got = expected.text(), arguments.text()
        if wanted == got:
            wanted, got = expected.text(dtypes=True), arguments.text(dtypes=True)
        return f"there is a plan for input {wanted}, got {got}"


class _Foreign(Exception):
    """An argument that a plan cannot depend on."""


def _kind_of_leaf(leaf: Any) -> Hashable:
    kind = type(leaf)
    if kind is Tensor or kind is nn.Parameter:
        return leaf.dtype, leaf.shape
    if isinstance(leaf, Tensor):
        raise _Foreign(f"the input is a {kind.__name__}, which may compute in its own way")
    if kind not in CONSTANTS:
        raise _Foreign(f"an argument is a {kind.__name__}; a plan depends on tensors and constants")
    return kind, repr(leaf) if kind in (float, complex) else leaf


def _without_layouts(arguments: Arguments) -> Any:
    """Tensors are brought into the layout that a plan expects."""
    return kind_of((arguments.args, dict(arguments.kwargs)), _constant_or_type)


def _constant_or_type(leaf: Any) -> Hashable:
    return (leaf.dtype, leaf.shape) if isinstance(leaf, TensorType) else _kind_of_leaf(leaf)
