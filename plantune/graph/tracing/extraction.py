"""Reads a trace into a layer graph: each record in order, by the table of spellings or as an op of
torch's own name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from plantune.base.canonical import Attrs
from plantune.errors import InvalidGraph, UnsupportedModule, UntracedFunction
from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
from plantune.graph.memory import Memory
from plantune.graph.memory import memory_of as _memory
from plantune.graph.operators.scans import RecurrentLayers
from plantune.graph.ops.overload import attributes
from plantune.graph.ops.overload_backward import DRAWS
from plantune.graph.ops.own_gradient import OWN_GRADIENT
from plantune.graph.spelling import OVERLOADS, NotRead, Reader, Value
from plantune.graph.tracing.purity import (
    OUT,
    Overload,
    draws,
    left_out,
    why_impure,
    without_writing,
)
from plantune.graph.tracing.records import (
    NOTHING,
    Derivative,
    Record,
    counted_last,
    last_used,
    stepped,
    target,
    written,
)
from plantune.graph.tracing.shadow import state_of, unsupported
from plantune.graph.tracing.trace import CONSTANT, Trace
from plantune.graph.tracing.views import View, view_of
from plantune.graph.types import TensorType, dtype_name

VIEWED = "an in-place op on a tensor of which a view is used later"
# What multiplies only operands of one dtype, which torch does not check without memory.
PRODUCTS = tuple(f"aten.{name}" for name in ("conv", "linear", "matmul", "mm", "bmm", "addmm"))
COPIES = ("aten.clone.default", "aten.contiguous.default")


# Reads a Function's own backward pass: its graph as text, what that reads of the forward pass, and
# the places of the inputs that it gives gradients of.
ReadBackward = Callable[["Extraction", Derivative], tuple[str, tuple[Value, ...], tuple[int, ...]]]


def no_scans(layers: RecurrentLayers) -> bool:
    """Recurrent layers stay torch's."""
    return False


class Extraction(Reader):
    """Reads the records in order. A tensor of the trace is known by its identity, else by its
    memory: torch may hand out another object for what it has just made.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: tuple[TensorType, ...],
        traced: Trace,
        read_backward: ReadBackward,
        scans: Callable[[RecurrentLayers], bool] = no_scans,
    ) -> None:
        self.module, self.traced, self._scans = module, traced, scans
        self.read_backward = read_backward
        self.tensors = state_of(module)
        self.builder = GraphBuilder()
        self.builder.reserved = frozenset(self.tensors)
        self.state = {_memory(tensor): name for name, tensor in traced.state.items()}
        self.known: dict[int, Value] = {}
        self.newest: dict[Memory, Value] = {}
        self.memories: dict[int, Memory] = {}
        self.views: dict[Memory, View] = {}
        self.moved: dict[str, str] = {}
        self.lines: dict[str, str] = {}
        self.owners = {_memory(tensor).storage: name for name, tensor in traced.state.items()}
        for at, (tensor, type_) in enumerate(zip(traced.inputs, inputs, strict=True)):
            name = self._input(f"x{at}" if at else "x", type_)
            self._know(tensor, Value(name))
            self.owners[_memory(tensor).storage] = name
        self.records = counted_last(traced.records)
        self.written, self.stepped = written(traced.records), stepped(self.records)
        self.last_used = last_used(self.records, traced.leaves)
        self.now = 0
        # The names of what the record that is read now made, and of all that is made under no_grad,
        # with what stands for it where gradients go.
        self.fresh: set[str] = set()
        self.silent: dict[str, Value | None] = {}

    def run(self) -> Graph:
        for now, record in enumerate(self.records):
            self.now = now
            self._read(record)
        values = [self._given(leaf) for leaf in self.traced.leaves if isinstance(leaf, Tensor)]
        if not values:
            raise UnsupportedModule(f"{type(self.module).__name__} returns no tensor")
        self.builder.updates = list(self.moved.items())
        return self.builder.build(tuple(value.name for value in values))

    def _input(self, name: str, type_: TensorType) -> str:
        """The input's name, which is another one if a parameter or buffer has that."""
        while name in self.builder.reserved:
            name = f"{name}_"
        return self.builder.input(name, type_)

    def _read(self, record: Record) -> None:
        if record.derivative is not None:
            self._differentiate(record.derivative)
            return
        given = self._value if record.silent else self._given
        args, kwargs = tree_map_only(Tensor, given, (record.args, dict(record.kwargs)))
        self.fresh.clear()
        if record.overload._schema.is_mutable:
            self._write(record, args, kwargs)
            return
        made = tree_leaves(self._call(record, record.overload, args, kwargs))
        tensors = [leaf for leaf in tree_leaves(record.result) if isinstance(leaf, Tensor)]
        same = {id(leaf) for leaf in tree_leaves((record.args, dict(record.kwargs)))}
        for tensor, value in zip(tensors, made, strict=True):
            if record.silent and id(tensor) in same:
                continue  # torch returned what it was given, which keeps its gradient
            self._note_view(record, tensor)
            self._know(tensor, self._silenced(value) if record.silent else value)

    def _differentiate(self, derivative: Derivative) -> None:
        """One node for all outputs of a Function, which each has a record of."""
        if id(derivative.results[0]) in self.known:
            return
        made, inputs = map(self._value, derivative.made), map(self._given, derivative.inputs)
        values = [*made, *inputs]
        try:
            text, read, targets = self.read_backward(self, derivative)
        except UnsupportedModule as error:
            raise UntracedFunction(str(error)) from error
        attrs = {"count": len(derivative.made), "inputs": len(derivative.inputs)}
        outputs = self.emit_all(
            OWN_GRADIENT, *values, *read, targets=targets, backward=text, **attrs
        )
        for tensor, value in zip(derivative.results, outputs, strict=True):
            self._know(tensor, value)

    def _note_view(self, record: Record, tensor: Tensor) -> None:
        """If this is the first tensor there, and a view of the call's first argument."""
        base, memory = record.args[0] if record.args else None, _memory(tensor)
        if memory in self.newest or not isinstance(base, Tensor):
            return
        at = _memory(base)
        view = view_of(at, record.overload, record.args, record.kwargs)
        if view is not None and at.storage == memory.storage:
            self.views[memory] = view

    def _know(self, tensor: Tensor, value: Value) -> None:
        memory = _memory(tensor)
        self.known[id(tensor)] = self.newest[memory] = value
        self.memories[id(tensor)] = memory

    def torch_op(self, overload: Overload, *args: Any, **kwargs: Any) -> Value:
        (value,) = self._overload(overload, args, kwargs)
        return value

    def _call(self, record: Record, overload: Overload, args: Any, kwargs: Any) -> Any:
        """What an overload makes, by the table if it has it, else as an op of torch's."""
        reader = OVERLOADS.get(str(overload))
        if reader is not None and not self._copies_written(record):
            try:
                return reader(self, *args, **kwargs)
            except (NotRead, InvalidGraph):
                pass  # with these arguments it is not an op of ours
        return self._overload(overload, args, kwargs)

    def _copies_written(self, record: Record) -> bool:
        """Whether it keeps what a buffer holds before the forward writes to it: a backward pass may
        read the copy afterwards.
        """
        source = record.args[0] if record.args else None
        if str(record.overload) not in COPIES or not isinstance(source, Tensor):
            return False
        at = _memory(source).storage
        return at in self.owners and at in self.written and at != _memory(record.result).storage

    def _overload(self, overload: Overload, args: Any, kwargs: Any) -> tuple[Value, ...]:
        impure = why_impure(overload, args, kwargs)
        if impure is not None:
            raise self._unsupported(f"{overload}, which {impure},")
        inputs: list[Value] = []

        def place(value: Any) -> int | None:
            if not isinstance(value, Value):
                return None
            if value not in inputs:
                inputs.append(value)
            return inputs.index(value)

        try:
            attrs = attributes(overload, args, kwargs, place)
            if draws(overload, args, kwargs):
                floats = (type_.dtype for type_ in map(self.type_of, inputs) if type_.is_float)
                attrs = Attrs(attrs, **{DRAWS: next(floats, "float32")})
            if not inputs:
                inputs.append(self._anchor())
            self._check_dtypes(overload, inputs)
            return self.emit_all(str(overload), *inputs, **attrs)
        except InvalidGraph as error:
            raise self._unsupported(f"{overload} in this form ({error})") from error

    def _anchor(self) -> Value:
        """Where what is made of no tensor is to be: beside a weight, so that it follows from
        weights alone, or beside the network's input if there is none.
        """
        weights = (name for name, held in self.tensors.items() if isinstance(held, nn.Parameter))
        name = next(weights, None)
        return Value(self.builder.inputs[0][0]) if name is None else self._state(name)

    def _check_dtypes(self, overload: Overload, inputs: list[Value]) -> None:
        dtypes = {self.type_of(value).dtype for value in inputs if self.type_of(value).is_float}
        if len(dtypes) > 1 and str(overload).startswith(PRODUCTS):
            raise InvalidGraph(f"dtypes differ: {' and '.join(sorted(dtypes))}")

    def _write(self, record: Record, args: Any, kwargs: Any) -> None:
        """An overload that writes to its first argument or to `out`: that gets the result."""
        plain = without_writing(record.overload)
        if plain is None:
            raise self._unsupported(f"in-place op {record.overload}")
        named = {**kwargs, **left_out(record.overload, plain, args, kwargs)}
        old = named.pop(OUT) if OUT in named else args[0]
        (result,) = tree_leaves(self._call(record, plain, args, named))
        memory = _memory(target(record))
        if record.silent:
            result = self._silenced(result)
            if memory.storage not in self.owners and old.name not in self.silent:
                raise self._unsupported("an in-place op under no_grad on what has a gradient")
        self._replace(memory, old, result)

    def _given(self, tensor: Tensor) -> Value:
        """The value of a tensor where gradients are on: none goes into what no_grad made."""
        return self._heard(self._value(tensor))

    def _heard(self, value: Value) -> Value:
        if value.name not in self.silent:
            return value
        found = self.silent[value.name] or self._detached(value)
        self.silent[value.name] = found
        return found

    def _silenced(self, value: Value) -> Value:
        """A value that is made under no_grad; another one if it is also known where gradients are
        on.
        """
        if value.name in self.silent:
            return value
        if value.name not in self.fresh:
            found = self._detached(value)
            self.silent[found.name] = found
            return found
        self.silent[value.name] = None
        return value

    def _detached(self, value: Value) -> Value:
        is_float = self.type_of(value).is_float
        return self.torch_op(torch.ops.aten.detach.default, value) if is_float else value

    def _state(self, name: str) -> Value:
        """A parameter or buffer; a buffer as last updated."""
        if name in self.moved:
            return Value(self.moved[name])
        if name not in self.builder.types:
            tensor = self.tensors[name]
            is_parameter = isinstance(tensor, nn.Parameter)
            declare = self.builder.parameter if is_parameter else self.builder.buffer
            try:
                declare(name, TensorType(tuple(tensor.shape), dtype_name(tensor.dtype)))
            except InvalidGraph as error:
                raise self._unsupported(f"{name}, {error},") from error
        return Value(name)

    def update(self, buffer: Value, value: Value) -> None:
        name = self._buffer(buffer)
        if name is None:
            raise NotRead("statistics that are not a buffer")
        self._check_views(_memory(self.traced.state[name]))
        self.moved[name] = value.name

    def _buffer(self, value: Value) -> str | None:
        """The buffer whose newest value this is."""
        buffers = (name for name, _ in self.builder.buffers)
        return next((name for name in buffers if self.moved.get(name, name) == value.name), None)

    def emit_all(self, op: str, *inputs: Value, **attrs: Any) -> tuple[Value, ...]:
        names = [value.name for value in inputs]
        record = self.records[self.now]
        made = self.builder.emit(op, *names, place=record.place, **attrs)
        self.fresh.update(made)
        self.lines[made[0]] = record.line
        return tuple(map(Value, made))

    def scans(self, layers: RecurrentLayers) -> bool:
        return self._scans(layers)

    def is_stepped(self) -> bool:
        return self.now in self.stepped

    def is_inserted(self) -> bool:
        return self.records[self.now].inserted

    def type_of(self, value: Value) -> TensorType:
        return self.builder.types[value.name]

    def _unsupported(self, what: str) -> UnsupportedModule:
        record = (*self.records, NOTHING)[self.now]
        return unsupported(self.module, record.place, what, record.line)

    def _value(self, tensor: Tensor) -> Value:
        memory = _memory(tensor)
        if memory in self.state:
            return self._state(self.state[memory])
        value = self.known.get(id(tensor), self.newest.get(memory))
        if value is None:
            raise self._unsupported(CONSTANT)
        return value

    def _replace(self, memory: Memory, old: Value, result: Value) -> None:
        """`result` is written where `old` was."""
        func = self.records[self.now].overload
        if self.type_of(old) != self.type_of(result):
            raise self._unsupported(f"{func}, an in-place op whose result has another type,")
        owner = self.owners.get(memory.storage)
        if owner is None:
            self._renew(memory, result)
        elif self._buffer(old) == owner:
            self._check_views(memory)
            self.moved[owner] = result.name
        elif owner in dict(self.builder.inputs):
            raise self._unsupported("an in-place op on the input, which belongs to the caller,")
        elif owner in dict(self.builder.buffers):
            self._renew(memory, result, _memory(self.traced.state[owner]))
        else:
            raise self._unsupported(f"{func}, an in-place op on a parameter,")

    def _renew(self, memory: Memory, result: Value, buffer: Memory | None = None) -> None:
        """What is in the memory of a forward's own tensor or in a part of a buffer, and all that
        shares its storage.
        """
        self._set(memory, result)
        others = [m for m in self.newest if m.storage == memory.storage and m != memory]
        if buffer is None and all(self.last_used.get(m, -1) <= self.now for m in others):
            return
        silent = self.records[self.now].silent and buffer is None
        if silent and any(self.newest[other].name not in self.silent for other in others):
            raise self._unsupported("an in-place op under no_grad on a part of what has a gradient")
        whole = buffer or next(m for m in self.newest if m.storage == memory.storage)
        renewed = [memory]
        while (view := self.views.get(renewed[-1])) is not None:
            result = view.written(self._whole(view.base), result, self._emitted)
            self._set(view.base, result)
            renewed.append(view.base)
        if buffer is not None and renewed[-1] != whole:
            raise self._unsupported(VIEWED)
        # In the order in which they were made: each after what it is a view of.
        for other in (other for other in others if other not in renewed):
            view = self.views.get(other)
            if view is None or renewed[-1] != whole:
                raise self._unsupported(VIEWED)
            self._set(other, view.again(self._whole(view.base), self._emitted))

    def _whole(self, memory: Memory) -> Value:
        """What is in the memory of which a part is written."""
        value = self._state(self.state[memory]) if memory in self.state else self.newest[memory]
        return value if self.records[self.now].silent else self._heard(value)

    def _set(self, memory: Memory, value: Value) -> None:
        if memory in self.state:
            self.moved[self.state[memory]] = value.name
            return
        same = [at for at, held in self.memories.items() if held == memory]
        self.known.update(dict.fromkeys(same, value))
        self.newest[memory] = value

    def _emitted(self, overload: Overload, args: Sequence[Any]) -> Value:
        record = self.records[self.now]
        (value,) = tree_leaves(self._call(record, overload, args, {}))
        return self._silenced(value) if record.silent else Value(value.name)

    def _check_views(self, memory: Memory) -> None:
        """What sees the memory in another shape would have to change with it."""
        views = (other for other in self.newest if other.storage == memory.storage)
        if any(self.last_used.get(view, -1) > self.now for view in views if view != memory):
            raise self._unsupported(VIEWED)
