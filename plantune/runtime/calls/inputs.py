"""Which calls the plans of a tuned module are for, and why not others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plantune.errors import InputMismatch, InvalidGraph
from plantune.graph.nested import kind_of, tensors_in
from plantune.graph.tracing.arguments import CONSTANTS, Arguments, ordered
from plantune.graph.tracing.autocast import Autocast
from plantune.graph.types import TensorType
from plantune.runtime.watched.module_signature import ModuleSignature, leading
from plantune.runtime.watched.torch_internals import any_autocast

# Kinds of calls that are remembered: shapes, constants, arguments by place and by name. Once there
# are so many, a new one must come this often before the oldest is forgotten for it.
MOST_CALLS = 16
OFTEN = 64
# Kinds whose calls are counted.
MOST_COUNTED = 256


class PlannedCall:
    """Calls with tensors of these types in these places, and with these other arguments."""

    def __init__(self, arguments: Arguments, order: Sequence[int], device: torch.device) -> None:
        self.arguments = arguments
        # Without autocast, and under it by its dtype.
        self.plain = self
        self._under: dict[torch.dtype, PlannedCall] = {}
        self._order, self._device = tuple(order), device
        types = arguments.types
        # Of tensors by their place alone, which are told from others at a glance.
        plain = not arguments.kwargs and arguments.args == types and [*order] == sorted(order)
        self.count = len(types) if plain else -1
        # Whether `is_like` knows such calls.
        self.is_plain = self.count > 0 and arguments.autocast is None
        # Whether such arguments, and no named ones, are a call of this kind. Of other calls than
        # tensors by their place this does not know.
        self.is_like = _likeness([(t.torch_dtype, t.shape) for t in types], self.count, device)

    def under(self, autocast: Autocast) -> PlannedCall:
        """The same call under autocast, which is another problem."""
        dtype = autocast[1]
        if dtype not in self._under:
            call = PlannedCall(
                replace(self.arguments, autocast=autocast), self._order, self._device
            )
            call.plain = self
            self._under.setdefault(dtype, call)
        return self._under[dtype]

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Those of such a call, in the order of the graph's inputs."""
        if len(args) == self.count:
            return args
        found = tensors_in((args, kwargs))
        return tuple([found[at] for at in self._order])


def _likeness(
    expected: Sequence[tuple[torch.dtype, tuple[int, ...]]], count: int, device: torch.device
) -> Callable[[tuple[Any, ...]], bool]:
    """Tells calls with so many such tensors from others; a function, as each call asks."""
    strided = torch.strided
    if count == 1:  # as most are: a loop takes 0.3 us
        ((dtype, shape),) = expected

        def is_like(args: tuple[Any, ...]) -> bool:
            if len(args) != 1:
                return False
            x = args[0]
            return (
                type(x) is Tensor
                and x.dtype is dtype
                and x.shape == shape
                and x.device == device
                and x.layout is strided
            )

        return is_like

    def are_like(args: tuple[Any, ...]) -> bool:
        if len(args) != count:
            return False
        every = zip(args, expected, strict=False)
        return all(type(x) is Tensor and (x.dtype, x.shape) == of for x, of in every) and all(
            x.device == device and x.layout is strided for x in args
        )

    return are_like


class PlannedInputs:
    """The kinds of calls that a module has met, with tensors on one device. The first of those that
    were expected stands for them all where one is asked for.
    """

    def __init__(
        self, module: nn.Module, expected: Sequence[Arguments], device: torch.device, name: str
    ) -> None:
        self._module, self._device, self._name = module, device, name
        self._types = expected[0].types
        first = leading(module)
        floats = (type_.torch_dtype for type_ in self._types if type_.is_float)
        self._dtype = next(floats, None)
        # A module that casts its input is called with what it was made for, such as bytes.
        self._casts = first is not None and first.dtype != self._dtype
        self.expected, *self._also = (
            PlannedCall(each, range(len(each.types)), device) for each in expected
        )
        self._known: dict[Hashable, PlannedCall] = {}
        self._counts: dict[Hashable, int] = {}

    def known(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedCall | None:
        """The kind of such a call, if it is remembered."""
        for call in self._also if not kwargs else ():
            if call.is_like(args):
                return call
        try:
            return self._known.get(_key_of(args, kwargs))
        except _Foreign:
            return None

    def register(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedCall | str:
        """The kind of a call against which nothing speaks; why not if it is not remembered."""
        try:
            key = _key_of(args, kwargs)
            arguments, order = ordered(self._module, args, kwargs)
        except (_Foreign, InvalidGraph) as error:
            return str(error)
        if len(self._known) >= MOST_CALLS:
            if not self._comes_often(key):
                return self.unlike(arguments)
            del self._known[next(iter(self._known))]
        found = PlannedCall(self._expected_as(arguments) or arguments, order, self._device)
        self._known[key] = found
        return found

    def _all_expected(self) -> list[Arguments]:
        return [call.arguments for call in (self.expected, *self._also)]

    def leader_of(self, call: PlannedCall) -> PlannedCall:
        """The largest expected call, under the autocast of this one."""
        every = (self.expected, *self._also)
        largest = max(every, key=lambda each: sum(type_.numel for type_ in each.arguments.types))
        autocast = call.arguments.autocast
        return largest if autocast is None else largest.under(autocast)

    def _expected_as(self, arguments: Arguments) -> Arguments | None:
        """The expected call that this one is, however it is written."""
        wanted = _without_layouts(arguments)
        every = self._all_expected()
        return next((each for each in every if _without_layouts(each) == wanted), None)

    def _comes_often(self, key: Hashable) -> bool:
        count = self._counts.pop(key, 0) + 1
        if count >= OFTEN:
            return True
        while len(self._counts) >= MOST_COUNTED:
            del self._counts[next(iter(self._counts))]
        self._counts[key] = count
        return False

    def remembers(self, call: PlannedCall) -> bool:
        return call.plain in (self.expected, *self._also, *self._known.values())

    def is_expected(self, call: PlannedCall) -> bool:
        """Whether the module was made for such calls, however they are written."""
        return any(call.plain.arguments is each for each in self._all_expected())

    def unlike(self, arguments: Arguments) -> str:
        """What tells a call from the one that the module was made for."""
        every, got = self._all_expected(), arguments.text()
        wanted = [each.text() for each in every]
        if got in wanted:
            wanted, got = [each.text(dtypes=True) for each in every], arguments.text(dtypes=True)
        if got in wanted:
            wanted, got = [each.as_written() for each in every], arguments.as_written()
        return f"it was made for input {' and '.join(wanted)}, got {got}"

    def is_home(self, signature: ModuleSignature) -> bool:
        """Whether the module is where, and of the dtype, that it was made for."""
        if signature.first is None:
            return True
        home = self._casts or signature.first.dtype is self._dtype
        return home and signature.first.device == self._device

    def why_not(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], signature: ModuleSignature
    ) -> str | None:
        """Why no call of its kind can run from a plan now. Raises InputMismatch."""
        tensors = tensors_in((args, kwargs))
        if not tensors and (args or kwargs):
            kinds = ", ".join(type(arg).__name__ for arg in (*args, *kwargs.values()))
            raise InputMismatch(f"{self._name}: the input must be a tensor, got {kinds}")
        device = self._device if signature.first is None else signature.first.device
        autocast = device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)
        self._check_first(tensors, signature, device, autocast)
        if signature.first is not None and not signature.is_home:
            return f"the module was moved to {signature.first.dtype} on {device}"
        for x in tensors:
            if x.device != device:
                return f"an input is on {x.device}, the module on {device}"
        return None

    def _check_first(
        self,
        tensors: Sequence[Tensor],
        signature: ModuleSignature,
        device: torch.device,
        autocast: bool,
    ) -> None:
        """The first input is where the module is, and of its dtype if it was in the example."""
        if not tensors:
            return
        x, state = tensors[0], signature.first
        follows = state is not None and self._types[0].is_float and not self._casts
        wanted = state.dtype if state is not None and follows else x.dtype
        if x.device != device or (x.dtype != wanted and not autocast):
            raise InputMismatch(
                f"{self._name}: needs a {wanted} tensor on {device}, got {x.dtype} on {x.device}; "
                "convert the input, or move the module"
            )


class _Foreign(Exception):
    """An argument that a plan cannot depend on."""


def _key_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Under autocast a network takes numbers in dtypes that it refuses else."""
    return any_autocast(), kind_of((args, kwargs), _kind_of_leaf)


def _kind_of_leaf(leaf: Any) -> Hashable:
    kind = type(leaf)
    if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
        raise _Foreign(f"an input is a {leaf.layout} tensor")
    if kind is Tensor or kind is nn.Parameter:
        return leaf.dtype, leaf.shape, leaf.device
    if isinstance(leaf, Tensor):
        raise _Foreign(f"the input is a {kind.__name__}, which may override torch's operations")
    if kind not in CONSTANTS:
        raise _Foreign(f"an argument is a {kind.__name__}; a plan depends on tensors and constants")
    return kind, repr(leaf) if kind in (float, complex) else leaf


def _without_layouts(arguments: Arguments) -> Any:
    """Tensors are brought into the layout that a plan expects."""
    return kind_of((arguments.args, dict(arguments.kwargs)), _constant_or_type)


def _constant_or_type(leaf: Any) -> Hashable:
    return (leaf.dtype, leaf.shape) if isinstance(leaf, TensorType) else _kind_of_leaf(leaf)
