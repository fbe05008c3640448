"""The network of a race: its module with random weights, its float64 copy, and its inputs."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from plantune.graph import Attrs, Graph, TensorType
from plantune.graph.ops.overload import DTYPE, OverloadOp, overload_op
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract
from plantune.graph.tracing.tape import OwnPass, Tape, TapeCall, unpacked
from plantune.graph.types import dtype_name
from plantune.plans.problem import Problem
from plantune.plans.workload import Workload
from plantune.runtime.proof.draws import drawn_inputs


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
    _add(graph, tape.calls, nodes, device, floats)
    outputs = tuple(nodes[number] for number in tape.outputs)
    graph.output(outputs[0] if len(outputs) == 1 else outputs)
    return fx.GraphModule(root, graph)


def _add(
    graph: fx.Graph,
    calls: Iterable[TapeCall],
    nodes: list[fx.Node],
    device: torch.device,
    floats: torch.dtype | None,
) -> None:
    """Adds the calls, whose results join the numbered nodes."""
    silent = False
    for call in calls:
        if call.silent != silent:
            silent = call.silent
            graph.call_function(torch._C._set_grad_enabled, (not silent,))
        attrs = call.attrs
        if floats is not None and DTYPE in attrs:
            attrs = Attrs(attrs, **{DTYPE: dtype_name(floats)})
        if call.own is not None:
            nodes += _applied(graph, call, call.own, nodes, _backward(call.own, device, floats))
        else:
            nodes += _called(graph, replace(call, attrs=attrs), nodes, device)
    if silent:
        graph.call_function(torch._C._set_grad_enabled, (True,))


def _applied(
    graph: fx.Graph, call: TapeCall, own: OwnPass, values: list[fx.Node], backward: fx.GraphModule
) -> list[fx.Node]:
    """The results of a Function, one node each."""
    given = [values[number] for number in call.reads]
    inputs = own.made + own.inputs
    parts = (given[: own.made], given[own.made : inputs], given[inputs:])
    made = graph.call_function(_application(backward), tuple(map(tuple, parts)))
    return [graph.call_function(operator.getitem, (made, at)) for at in range(call.results)]


def _application(backward: fx.GraphModule) -> Callable[..., Any]:
    """A Function with this backward pass, of what its forward made, its inputs and what it reads.
    It has no gradient of what it made, which was made of its inputs.
    """

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, made: Any, read: Any, *inputs: Tensor) -> Any:
            ctx.save_for_backward(*read)
            return made

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return None, None, *backward(*gradients, *ctx.saved_tensors)

    def own(made: Any, inputs: Any, read: Any) -> Any:
        return Own.apply(made, read, *inputs)  # type: ignore[no-untyped-call]

    return own


def _backward(own: OwnPass, device: torch.device, floats: torch.dtype | None) -> fx.GraphModule:
    graph = fx.Graph()
    count = own.made + own.read
    nodes = [graph.placeholder(f"x{at}") for at in range(count)]
    _add(graph, own.calls, nodes, device, floats)
    graph.output(tuple(None if at is None else nodes[at] for at in own.gradients))
    return fx.GraphModule(nn.Module(), graph)


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


Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Raced:
    """The network of a race: the one of the tape, else the reference network that is named. In
    training a call is both passes, or with `steps` a whole step with AdamW.
    """

    problem: Problem
    tape: Tape | None = None
    steps: bool = False


class Subject:
    """A network on a device."""

    def __init__(self, raced: Raced, device: torch.device) -> None:
        problem, tape = raced.problem, raced.tape
        self._tape, self._device = tape, device
        self._trains = problem.mode == "train"
        self.types: tuple[TensorType, ...] = tuple(type_ for _, type_ in problem.tensors)
        made = Workload.of(problem).module() if tape is None else rebuilt(tape, device)
        self.module = _randomised(made.train(self._trains)).to(device)

    @property
    def arguments(self) -> Arguments:
        return Arguments(self.types, examples=self._examples)

    @property
    def draws(self) -> bool:
        """Whether two calls of it differ."""
        return self._tape is not None and self._tape.draws

    def exact(self) -> nn.Module:
        """The network in float64."""
        if self._tape is None:
            return copy.deepcopy(self.module).double()
        exact = rebuilt(self._tape, self._device, torch.float64).double().to(self._device)
        exact.load_state_dict(self.module.state_dict())
        return exact.train(self._trains)

    def inputs(self, random: torch.Generator) -> Inputs:
        """Of a call, where `random` draws them."""
        if all(type_.is_float for type_ in self.types):
            return tuple(_normal(type_, random) for type_ in self.types)
        return tuple(drawn_inputs(self._graph, self._examples, random))

    @cached_property
    def _graph(self) -> Graph:
        return extract(self.module, *self.types, fold=False, derives=self._trains)

    @cached_property
    def _examples(self) -> tuple[Tensor | None, ...]:
        examples = () if self._tape is None else self._tape.examples
        return tuple(
            None if text is None else unpacked(text, type_)
            for text, type_ in zip(examples, self.types, strict=False)
        )


def _normal(type_: TensorType, random: torch.Generator) -> Tensor:
    return torch.randn(type_.shape, generator=random, dtype=type_.torch_dtype, device=random.device)


def _randomised(module: nn.Module) -> nn.Module:
    """No weight is 0 or 1 any more: Fixup's first values would hide a mistake."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.dim() > 1:
                parameter.normal_(std=max(parameter[:1].numel(), 1) ** -0.5)
            else:
                parameter.uniform_(0.5, 1.0)
    return module
