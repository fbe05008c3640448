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
from plantune.graph.rewrite import fold_scales, without_dead_nodes
from plantune.graph.spelling import (
    FLAGGED_IN_PLACE,
    FUNCTIONS,
    IN_PLACE,
    METHODS,
    MODULES,
    VIEWS,
    Reader,
    Value,
)
from plantune.graph.types import TensorType, dtype_name


def extract(module: nn.Module, *inputs: TensorType, fold: bool | None = None) -> Graph:
    """The layer graph of `module` for inputs of these types, in the module's own training mode.

    `fold` puts the scales of batch norms into the weights before them; it changes what a backward
    pass would differentiate, so it defaults to true only where the module is not training. Raises
    UnsupportedModule naming the place in the module where an operation is unknown.
    """
    try:
        traced = _Tracer().trace(module)
    except Exception as error:
        if isinstance(error, UnsupportedModule):
            raise
        raise UnsupportedModule(
            f"{type(module).__name__} cannot be traced by torch.fx: {error}. Its forward must not "
            "branch or loop on the values of tensors"
        ) from error
    graph = without_dead_nodes(_Extraction(module, inputs).run(traced))
    folds = not module.training if fold is None else fold
    return without_dead_nodes(fold_scales(graph)) if folds else graph


class _Tracer(fx.Tracer):
    """Keeps every module that has a spelling of its own whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in MODULES or super().is_leaf_module(m, module_qualified_name)


class _Extraction(Reader):
    """Reads the traced nodes in order; what is no tensor (sizes, flags) is computed at once."""

    def __init__(self, module: nn.Module, inputs: tuple[TensorType, ...]) -> None:
        self.module = module
        self.builder = GraphBuilder()
        self.known: dict[fx.Node, Any] = {}
        self.order: dict[fx.Node, int] = {}
        self.sources = iter([(f"x{i}" if i else "x", type_) for i, type_ in enumerate(inputs)])
        self.names = _state_names(module)
        self.moved: dict[str, str] = {}
        self.roots: dict[str, str] = {}
        self.place = ""

    def run(self, traced: fx.Graph) -> Graph:
        self.order = {node: index for index, node in enumerate(traced.nodes)}
        for node in traced.nodes:
            self.place = _place(node)
            self.known[node] = self._read(node)
        if next(self.sources, None) is not None:
            raise UnsupportedModule(f"{type(self.module).__name__} takes fewer inputs than given")
        output = self.known[next(node for node in traced.nodes if node.op == "output")]
        values = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(value, Value) for value in values):
            raise UnsupportedModule(f"the module returns {output!r}; tensors or tuples are known")
        self.builder.updates = list(self.moved.items())
        return self.builder.build(tuple(value.name for value in values))

    def _read(self, node: fx.Node) -> Any:
        args, kwargs = self._resolved(node.args), self._resolved(node.kwargs)
        if node.op == "placeholder":
            return self._input(node)
        if node.op == "get_attr":
            return self.state(operator.attrgetter(str(node.target))(self.module))
        if node.op == "output":
            return args[0]
        handler = self._handler(node, args, kwargs)
        try:
            result = handler(*args, **kwargs)
        except UnsupportedModule:
            raise
        except (InvalidGraph, TypeError, KeyError, AttributeError) as error:
            raise self.unsupported(f"{_spelled(node)} in this form ({error})") from error
        if self._is_in_place(node):
            self._replace(node, result)
        elif node.target in VIEWS and isinstance(result, Value):
            self.roots[result.name] = self._root(args[0])
        return result

    def _input(self, node: fx.Node) -> Any:
        source = next(self.sources, None)
        if source is not None:
            return Value(self.builder.input(*source))
        if node.args:
            return node.args[0]
        raise UnsupportedModule(f"{type(self.module).__name__} takes more inputs than were given")

    def _resolved(self, value: Any) -> Any:
        return fx.node.map_aggregate(
            value, lambda item: self.known[item] if isinstance(item, fx.Node) else item
        )

    def _handler(self, node: fx.Node, args: Any, kwargs: Any) -> Callable[..., Any]:
        """What reads this node: the table's entry, or plain Python where no tensor takes part."""
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
            raise self.unsupported("a tensor that is neither parameter nor buffer; register it")
        if name in self.moved:
            return Value(self.moved[name])
        if name not in self.builder.types:
            type_ = TensorType(tuple(tensor.shape), dtype_name(tensor.dtype))
            declare = self.builder.parameter if _is_parameter(tensor) else self.builder.buffer
            declare(name, type_)
        return Value(name)

    def update(self, buffer: torch.Tensor, value: Value) -> None:
        self.moved[self.names[id(buffer)]] = value.name

    def emit_all(self, op: str, *inputs: Value, **attrs: Any) -> tuple[Value, ...]:
        names = [value.name for value in inputs]
        return tuple(map(Value, self.builder.emit(op, *names, place=self.place, **attrs)))

    def type_of(self, value: Value) -> TensorType:
        return self.builder.types[value.name]

    def unsupported(self, what: str) -> UnsupportedModule:
        return UnsupportedModule(
            f"{type(self.module).__name__}, at {self.place or 'its own forward'}: {what} is not "
            "known to plantune. Write it with known ops, or add it (CONTRIBUTING, a new op)"
        )

    def _is_in_place(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(self.module.get_submodule(str(node.target)), "inplace", False))
        flag = node.args[1] if node.target in FLAGGED_IN_PLACE and len(node.args) > 1 else False
        return node.target in IN_PLACE or bool(node.kwargs.get("inplace", flag))

    def _replace(self, node: fx.Node, result: Value) -> None:
        """After an in-place op every name of the old value means the new one."""
        target = node.args[0]
        old = self.known[target]  # type: ignore[index]
        if old.name in {name for name, _ in self.builder.inputs}:
            raise self.unsupported("an in-place op on the input, which belongs to the caller,")
        for other, value in self.known.items():
            if not isinstance(value, Value) or self._root(value) != self._root(old):
                continue
            if value == old:
                self.known[other] = result
            elif any(self.order[user] > self.order[node] for user in other.users):
                raise self.unsupported("an in-place op on a tensor of which a view is used later")

    def _root(self, value: Value) -> str:
        return self.roots.get(value.name, value.name)


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _state_names(module: nn.Module) -> dict[int, str]:
    """The first name of each parameter and buffer, by identity: tied weights are one value."""
    names: dict[int, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        names.setdefault(id(tensor), name)
    return names


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _place(node: fx.Node) -> str:
    """The path of the module in whose forward the node stands."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack)[-1]) if stack else ""


def _spelled(node: fx.Node) -> str:
    if node.op == "call_module":
        return f"module {node.target}"
    if node.op == "call_method":
        return f"method {node.target}"
    return f"function {getattr(node.target, '__name__', node.target)}"
