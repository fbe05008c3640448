"""A network made again from its tape, for a process that does not have its class."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, fx, nn

from plantune.canonical import Attrs
from plantune.graph.ops.overload import DTYPE, OverloadOp, overload_op
from plantune.graph.tape import Tape, TapeCall, unpacked
from plantune.graph.types import TensorType, dtype_name


def rebuilt(tape: Tape, device: torch.device, floats: torch.dtype | None = None) -> nn.Module:
    """A module on the CPU that calls what the tape says, and returns its one output or a tuple.

    Weights have the names that they had and values that mean nothing, buffers the values that they
    had. What it makes besides results of its inputs, it makes on `device`. With `floats` it
    converts to no other dtype.
    """
    root = nn.Module()
    for name, type_ in tape.parameters:
        owner, last = _owner(root, name)
        values = torch.zeros(type_.shape, dtype=type_.torch_dtype)
        owner.register_parameter(last, nn.Parameter(values, requires_grad=name in tape.trained))
    for (name, type_), text in zip(tape.buffers, tape.values, strict=True):
        owner, last = _owner(root, name)
        owner.register_buffer(last, _values(type_, text))
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{at}") for at in range(len(tape.inputs))]
    nodes += [graph.get_attr(name) for name, _ in (*tape.parameters, *tape.buffers)]
    for call in tape.calls:
        attrs = call.attrs
        if floats is not None and DTYPE in attrs:
            attrs = Attrs(attrs, **{DTYPE: dtype_name(floats)})
        nodes += _called(graph, replace(call, attrs=attrs), nodes, device)
    outputs = tuple(nodes[number] for number in tape.outputs)
    graph.output(outputs[0] if len(outputs) == 1 else outputs)
    return fx.GraphModule(root, graph)


def _called(
    graph: fx.Graph, call: TapeCall, values: list[fx.Node], device: torch.device
) -> list[fx.Node]:
    """The results of a call, one node each."""
    op = cast("OverloadOp", overload_op(call.overload))
    args, named = op.arguments([values[number] for number in call.reads], call.attrs, device)
    made = graph.call_function(op.overload, args, named)
    if len(op.overload._schema.returns) == 1 and not _is_list(op.overload):
        return [made][: call.results]
    parts = [graph.call_function(operator.getitem, (made, at)) for at in range(call.results)]
    return parts


def _is_list(overload: torch._ops.OpOverload) -> bool:
    return isinstance(overload._schema.returns[0].type, torch.ListType)


def _owner(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The submodule that holds what has this name, made if it is missing, and the last part."""
    *places, name = path.split(".")
    owner = root
    for place in places:
        if place not in owner._modules:
            owner.add_module(place, nn.Module())
        owner = cast("nn.Module", owner._modules[place])
    return owner, name


def _values(type_: TensorType, text: str | None) -> Tensor:
    if text is not None:
        return unpacked(text, type_)
    return torch.full(type_.shape, int(type_.is_float), dtype=type_.torch_dtype)
