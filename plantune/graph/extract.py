"""From a torch module to a layer graph: torch.fx traces, each node is read at one input shape."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import fx, nn

from plantune.errors import InvalidGraph, UnsupportedModule
from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
from plantune.graph.outputs import TENSOR, Outputs
from plantune.graph.rewrite import fold_scales, round_constants_once, without_dead_nodes
from plantune.graph.spelling import (
    FUNCTIONS,
    IN_PLACE,
    METHODS,
    MODULES,
    VIEWS,
    Reader,
    Value,
)
from plantune.graph.trace import state_names, trace, unsupported
from plantune.graph.types import TensorType, dtype_name

# What a reader, or plain Python on sizes, raises if a call does not fit.
NOT_READ = (
    InvalidGraph,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


def extract(module: nn.Module, *inputs: TensorType, fold: bool | None = None) -> Graph:
    """The layer graph of `module` for inputs of these types, in the training mode that each of its
    submodules has.

    `fold` puts the scales of batch norms into the weights before them; it changes what a backward
    pass would differentiate, so it defaults to true only if the module is not training. Raises
    UnsupportedModule naming the place in the module where an operation is unknown.
    """
    return extract_with_outputs(module, *inputs, fold=fold)[0]


def extract_with_outputs(
    module: nn.Module, *inputs: TensorType, fold: bool | None = None
) -> tuple[Graph, Outputs]:
    """As `extract`, with what the module makes of the graph's outputs."""
    traced = trace(module, len(inputs))
    extraction = _Extraction(module, inputs)
    graph = without_dead_nodes(extraction.run(traced.graph))
    if not module.training if fold is None else fold:
        graph = without_dead_nodes(round_constants_once(without_dead_nodes(fold_scales(graph))))
    return graph, Outputs(traced.structure, extraction.leaves)


class _Extraction(Reader):
    """Reads the traced nodes in order; other values (sizes, flags) are computed at once."""

    def __init__(self, module: nn.Module, inputs: tuple[TensorType, ...]) -> None:
        names = state_names(module)
        self.module = module
        self.builder = GraphBuilder()
        self.builder.reserved = frozenset(names.values())
        self.known: dict[fx.Node, Any] = {}
        self.order: dict[fx.Node, int] = {}
        self.sources = iter([(f"x{i}" if i else "x", type_) for i, type_ in enumerate(inputs)])
        self.names = names
        self.moved: dict[str, str] = {}
        self.roots: dict[str, str] = {}
        self.now, self.place, self.line = 0, "", ""
        self.leaves: tuple[Any, ...] = ()

    def run(self, traced: fx.Graph) -> Graph:
        self.order = {node: index for index, node in enumerate(traced.nodes)}
        for node in traced.nodes:
            self.now, self.place = self.order[node], _place(node)
            self.line = node.meta.get("line", "")
            self.known[node] = self._read(node)
        output = self.known[next(node for node in traced.nodes if node.op == "output")]
        values = [leaf.name for leaf in output if isinstance(leaf, Value)]
        if not values:
            raise UnsupportedModule(f"{type(self.module).__name__} returns no tensor")
        self.leaves = tuple(map(_leaf, output))
        self.builder.updates = list(self.moved.items())
        return self.builder.build(tuple(values))

    def _read(self, node: fx.Node) -> Any:
        args, kwargs = self._resolved(node.args), self._resolved(node.kwargs)
        if node.op == "placeholder":
            return self._input()
        if node.op == "get_attr":
            return self.state(operator.attrgetter(str(node.target))(self.module))
        if node.op == "output":
            return args[0]
        handler = self._handler(node, args, kwargs)
        try:
            result = handler(*args, **kwargs)
        except UnsupportedModule:
            raise
        except NOT_READ as error:
            raise self.unsupported(f"{_spelled(node)} in this form ({error})") from error
        if self._is_in_place(node):
            self._replace(node, result)
        elif self._is_view(node) and isinstance(result, Value):
            self.roots[result.name] = self._root(args[0])
        return result

    def _input(self) -> Value:
        name, type_ = next(self.sources)
        if name in self.builder.reserved:
            raise UnsupportedModule(
                f"{type(self.module).__name__} has a parameter or buffer called {name!r}, the name "
                "of the graph's input: rename it"
            )
        return Value(self.builder.input(name, type_))

    def _resolved(self, value: Any) -> Any:
        return fx.node.map_aggregate(
            value, lambda item: self.known[item] if isinstance(item, fx.Node) else item
        )

    def _handler(self, node: fx.Node, args: Any, kwargs: Any) -> Callable[..., Any]:
        """What reads this node: the table's entry, or plain Python if no tensor takes part."""
        if node.op == "call_module":
            child = self.module.get_submodule(str(node.target))
            if type(child) not in MODULES:
                raise self.unsupported(f"module {type(child).__name__}")
            entry = MODULES[type(child)]
            return lambda *a, **k: entry(self, child, *a, **k)
        if not any(isinstance(item, Value) for item in _leaves((args, kwargs))):
            if node.op == "call_method":
                return lambda owner, *a, **k: getattr(owner, str(node.target))(*a, **k)
            return cast("Callable[..., Any]", node.target)
        table: dict[Any, Any] = METHODS if node.op == "call_method" else FUNCTIONS
        if node.target not in table:
            raise self.unsupported(_spelled(node))
        entry = table[node.target]
        return lambda *a, **k: entry(self, *a, **k)

    def state(self, tensor: torch.Tensor) -> Value:
        """A parameter or buffer under its name in the state_dict; a buffer as last updated."""
        name = self.names.get(id(tensor))
        if name is None:
            raise self.unsupported("a tensor that is neither parameter nor buffer (register it)")
        if name in self.moved:
            return Value(self.moved[name])
        if name not in self.builder.types:
            type_ = TensorType(tuple(tensor.shape), dtype_name(tensor.dtype))
            declare = self.builder.parameter if _is_parameter(tensor) else self.builder.buffer
            declare(name, type_)
        return Value(name)

    def update(self, buffer: torch.Tensor, value: Value) -> None:
        self._rebind(self.state(buffer), value)
        self.moved[self.names[id(buffer)]] = value.name

    def emit_all(self, op: str, *inputs: Value, **attrs: Any) -> tuple[Value, ...]:
        names = [value.name for value in inputs]
        return tuple(map(Value, self.builder.emit(op, *names, place=self.place, **attrs)))

    def type_of(self, value: Value) -> TensorType:
        return self.builder.types[value.name]

    def unsupported(self, what: str) -> UnsupportedModule:
        return unsupported(self.module, self.place, what, self.line)

    def _is_in_place(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(self.module.get_submodule(str(node.target)), "inplace", False))
        # torch gives the flag of its functions by name, however they were called.
        return node.target in IN_PLACE or bool(node.kwargs.get("inplace", False))

    def _is_view(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self.module.get_submodule(str(node.target))) in VIEWS
        return node.target in VIEWS

    def _replace(self, node: fx.Node, result: Value) -> None:
        old = self.known[node.args[0]]  # type: ignore[index]
        if not isinstance(old, Value):  # a size, which Python has changed already
            return
        if self._root(old) in {name for name, _ in self.builder.inputs}:
            raise self.unsupported("an in-place op on the input, which belongs to the caller,")
        if self._root(old) in self.builder.reserved.union(self.moved.values()):
            raise self.unsupported("an in-place op on a parameter or buffer")
        if self.type_of(old).dtype != self.type_of(result).dtype:
            raise self.unsupported("an in-place op whose result has another dtype")
        self._rebind(old, result)

    def _rebind(self, old: Value, result: Value) -> None:
        """After a write in place every name of the old value means the new one."""
        for other, value in self.known.items():
            if not isinstance(value, Value) or self._root(value) != self._root(old):
                continue
            if value == old:
                self.known[other] = result
            elif any(self.order[user] > self.now for user in other.users):
                raise self.unsupported("an in-place op on a tensor of which a view is used later")

    def _root(self, value: Value) -> str:
        return self.roots.get(value.name, value.name)


def _leaf(value: Any) -> Any:
    if isinstance(value, Value):
        return TENSOR
    return torch.Size(value) if isinstance(value, tuple) else value


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _place(node: fx.Node) -> str:
    """The path of the module in whose forward the node stands."""
    if node.op == "call_module":
        return str(node.target)
    # The keys count repeated calls (block@1); the values begin with the path.
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _spelled(node: fx.Node) -> str:
    if node.op == "call_module":
        return f"module {node.target}"
    if node.op == "call_method":
        return f"method {node.target}"
    return f"function {getattr(node.target, '__name__', node.target)}"
