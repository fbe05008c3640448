"""A traced module as data: each overload that it called, so that another process can run it.

The module's class may be one that only its own process has, as in a notebook. What the framework
makes of the tape is what it makes of the module, without the cost of the module's own Python.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plantune.base.canonical import Attrs
from plantune.errors import InvalidGraph, UnsupportedModule
from plantune.graph.graph import Named
from plantune.graph.memory import Memory, memory_of
from plantune.graph.ops.overload import attributes
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.purity import draws
from plantune.graph.tracing.records import Derivative, Record
from plantune.graph.tracing.trace import trace
from plantune.graph.types import TensorType, dtype_name

# The namespaces of ops that every process with torch has.
OF_TORCH = ("aten", "prims", "quantized")
# Of one buffer or input that is sent with its values.
PACKED_BYTES = 1 << 20


@dataclass(frozen=True)
class TapeCall:
    """One call of an overload, which is `silent` under no_grad. Tensors are numbered: inputs,
    parameters, buffers, then results. With `own` it is what a Function returns.
    """

    overload: str
    reads: tuple[int, ...]
    attrs: Attrs
    results: int
    silent: bool
    own: OwnPass | None = None


@dataclass(frozen=True)
class OwnPass:
    """The backward pass of a Function. The call reads the `made` results of its forward, its
    `inputs`, then the tensors that this pass has `read`. Here the gradients of the results are
    numbered first, what it reads next, then what the `calls` make; `gradients` are those of the
    inputs.
    """

    made: int
    inputs: int
    read: int
    calls: tuple[TapeCall, ...]
    gradients: tuple[int | None, ...]


@dataclass(frozen=True)
class Tape:
    """What a module does with tensors of these types; `outputs` are the tensors it returns, and the
    `trained` parameters get gradients. If it `draws` random numbers, two calls differ.

    `values` are those of buffers, and `examples` those of inputs that hold integers, which may have
    to fit together: bytes in base64, None of what any number serves for, or is large.
    """

    inputs: tuple[TensorType, ...]
    parameters: Named
    buffers: Named
    calls: tuple[TapeCall, ...]
    outputs: tuple[int, ...]
    trained: tuple[str, ...]
    draws: bool
    values: tuple[str | None, ...]
    examples: tuple[str | None, ...]


def tape_of(module: nn.Module, arguments: Arguments, *, derives: bool | None = None) -> Tape:
    """What a module does in a call. Raises UnsupportedModule as a trace does, and for a call with
    an argument that is not data. `derives` is a trace's.
    """
    return _Taping(module, arguments, derives).tape()


class _Numbers:
    """Numbers tensors by their identity, else by their memory: torch may hand out another object
    for what it has just made.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._known: dict[int, int] = {}
        self._newest: dict[Memory, int] = {}
        self._count = 0
        for tensor in tensors:
            self.number(tensor)

    def number(self, tensor: Tensor) -> None:
        self._known[id(tensor)] = self._newest[memory_of(tensor)] = self._count
        self._count += 1

    def of(self, tensor: Tensor) -> int:
        found = self._known.get(id(tensor))
        return self._newest[memory_of(tensor)] if found is None else found

    def has(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known or memory_of(tensor) in self._newest


class _Taping:
    def __init__(self, module: nn.Module, arguments: Arguments, derives: bool | None) -> None:
        self._module, self._arguments = module, arguments
        self._traced = trace(module, arguments, derives=derives)
        self._numbers = _Numbers()

    def tape(self) -> Tape:
        named = self._traced.state.items()
        parameters = [(name, t) for name, t in named if isinstance(t, nn.Parameter)]
        buffers = [(name, t) for name, t in named if not isinstance(t, nn.Parameter)]
        for tensor in (*self._traced.inputs, *(t for _, t in (*parameters, *buffers))):
            self._numbers.number(tensor)
        calls = self._calls(self._traced.records, self._numbers)
        tensors = [leaf for leaf in self._traced.leaves if isinstance(leaf, Tensor)]
        outputs = tuple(map(self._numbers.of, tensors))
        draws = any(_draws(record) for record in self._traced.records)
        values = tuple(packed(self._module.get_buffer(name)) for name, _ in buffers)
        examples = tuple(map(packed, self._arguments.examples))
        return Tape(
            self._arguments.types,
            _types(parameters),
            _types(buffers),
            calls,
            outputs,
            tuple(name for name, tensor in parameters if tensor.requires_grad),
            draws,
            values,
            examples,
        )

    def _calls(self, records: Iterable[Record], numbers: _Numbers) -> tuple[TapeCall, ...]:
        calls = (
            self._call(r, numbers) if r.derivative is None else self._own(r.derivative, numbers)
            for r in records
        )
        return tuple(call for call in calls if call is not None)

    def _own(self, derivative: Derivative, numbers: _Numbers) -> TapeCall | None:
        """Of the first of a Function's results the call that makes them all."""
        if numbers.has(derivative.results[0]):
            return None
        read = _read_of_forward(derivative)
        own = _Numbers((*derivative.seeds, *read))
        calls = self._calls(derivative.records, own)
        gradients = tuple(None if g is None else own.of(g) for g in derivative.gradients)
        made, inputs = derivative.made, derivative.inputs
        reads = tuple(map(numbers.of, (*made, *inputs, *read)))
        for tensor in derivative.results:
            numbers.number(tensor)
        passed = OwnPass(len(made), len(inputs), len(read), calls, gradients)
        return TapeCall("", reads, Attrs(), len(made), False, passed)

    def _call(self, record: Record, numbers: _Numbers) -> TapeCall:
        if record.overload.namespace not in OF_TORCH:
            raise UnsupportedModule(
                f"{type(self._module).__name__}: {record.overload} ({record.line}) is an op that "
                "code outside of torch registers. A search measures in another process, which "
                "does not have it; optimize runs it"
            )
        reads: list[int] = []

        def place(value: Any) -> int | None:
            if not isinstance(value, Tensor):
                return None
            number = numbers.of(value)
            if number not in reads:
                reads.append(number)
            return reads.index(number)

        try:
            attrs = attributes(record.overload, record.args, record.kwargs, place)
        except InvalidGraph as error:
            raise UnsupportedModule(f"{record.overload} at {record.line}: {error}") from error
        results = [leaf for leaf in tree_leaves(record.result) if isinstance(leaf, Tensor)]
        for tensor in results:
            numbers.number(tensor)
        return TapeCall(str(record.overload), tuple(reads), attrs, len(results), record.silent)


def _read_of_forward(derivative: Derivative) -> list[Tensor]:
    """What the backward pass of a Function reads and does not make, each once."""
    own, read = _Numbers(derivative.seeds), dict[int, Tensor]()
    for record in derivative.records:
        _note_others((record.args, dict(record.kwargs)), own, read)
        for leaf in tree_leaves(record.result):
            if isinstance(leaf, Tensor) and id(leaf) not in read:
                own.number(leaf)
    _note_others(derivative.gradients, own, read)
    return list(read.values())


def _note_others(given: Any, own: _Numbers, read: dict[int, Tensor]) -> None:
    for leaf in tree_leaves(given):
        if isinstance(leaf, Tensor) and not own.has(leaf):
            read[id(leaf)] = leaf


def _draws(record: Record) -> bool:
    if record.derivative is not None:
        return any(map(_draws, record.derivative.records))
    return draws(record.overload, record.args, record.kwargs)


def packed(tensor: Tensor | None) -> str | None:
    """The values of a tensor that is not large."""
    if tensor is None or tensor.numel() * tensor.element_size() > PACKED_BYTES:
        return None
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return base64.b64encode(bytes(values.tolist())).decode()


def unpacked(text: str, type_: TensorType) -> Tensor:
    """What `packed` made a text of."""
    held = bytearray(base64.b64decode(text))
    made = torch.frombuffer(held, dtype=type_.torch_dtype) if held else torch.empty(0)
    return made.reshape(type_.shape)


def _types(named: Sequence[tuple[str, Tensor]]) -> Named:
    return tuple((name, TensorType(tuple(t.shape), dtype_name(t.dtype))) for name, t in named)
