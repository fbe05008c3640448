"""From a torch module to a layer graph: torch.fx traces, each node is read at one input shape."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import fx, nn

from plantune.errors import InvalidGraph, UnsupportedModule
from plantune.graph.builder import GraphBuilder
from plantune.graph.graph import Graph
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
from plantune.graph.types import TensorType, dtype_name

# Two traces at once would leave the one's hold on nn.Module behind.
TRACING = threading.Lock()
# What a reader, or plain Python on sizes, raises where a call does not fit.
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
    """The layer graph of `module` for inputs of these types, in the module's own training mode.

    `fold` puts the scales of batch norms into the weights before them; it changes what a backward
    pass would differentiate, so it defaults to true only where the module is not training. Raises
    UnsupportedModule naming the place in the module where an operation is unknown.
    """
    graph = without_dead_nodes(_Extraction(module, inputs).run(_traced(module)))
    folds = not module.training if fold is None else fold
    if not folds:
        return graph
    return without_dead_nodes(round_constants_once(without_dead_nodes(fold_scales(graph))))


class _Proxy(fx.Proxy):
    """Records `y += 1` as the write in place that it is; fx alone would record `y + 1`."""

    def _in_place(self, function: Callable[..., Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.itruediv, other)


class _Tracer(fx.Tracer):
    """Keeps every module that has a spelling of its own whole.

    While fx traces, it catches the calls and attributes of all modules of the process; those of
    other threads go on as if nothing was.
    """

    # As a real tensor a buffer would be computed with, and written to, while tracing.
    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    @property
    def place(self) -> str:
        """The path of the module in whose forward the trace is, or stopped."""
        return str(next(reversed(self.module_stack.values()), ("",))[0])

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in MODULES or super().is_leaf_module(m, module_qualified_name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        if m._forward_hooks or m._forward_pre_hooks:
            raise _unsupported(self.root, self.path_of_module(m), "a module with forward hooks")
        return super().call_module(m, forward, args, kwargs)

    def create_arg(self, a: Any) -> Any:
        # fx would keep such a tensor as an attribute of the user's module.
        if isinstance(a, torch.Tensor) and id(a) not in _state_names(self.root):
            raise _unsupported(self.root, self.place, "a constant tensor (register it as a buffer)")
        return super().create_arg(a)


def _traced(module: nn.Module) -> fx.Graph:
    with TRACING:
        return _traced_alone(module)


def _traced_alone(module: nn.Module) -> fx.Graph:
    tracer = _Tracer()
    tables = [table for child in module.modules() for table in _tables(child)]
    before = [(table, dict(table)) for table in tables]
    try:
        traced = tracer.trace(module)
    except UnsupportedModule:
        raise
    except Exception as error:
        raise UnsupportedModule(
            f"{type(module).__name__}, at {tracer.place or 'its own forward'}: torch.fx cannot "
            f"trace it: {error}. A forward must not branch or loop on the values of tensors"
        ) from error
    finally:
        assigned = [name for table, then in before for name in _restore(table, then)]
    if assigned:
        raise _unsupported(module, "", f"a forward that assigns to self.{assigned[0]}")
    return traced


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where an assignment to an attribute of a module can go."""
    return (vars(module), module._parameters, module._buffers, module._modules)


def _restore(table: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Undoes what a traced forward assigned; the names of it."""
    changed = [key for key in {**then, **table} if table.get(key) is not then.get(key)]
    for key in changed:
        if key in then:
            table[key] = then[key]
        else:
            del table[key]
    return changed


def _unsupported(module: nn.Module, place: str, what: str) -> UnsupportedModule:
    return UnsupportedModule(
        f"{type(module).__name__}, at {place or 'its own forward'}: {what} is not "
        "known to plantune. Write it with known ops, or add it (CONTRIBUTING, a new op)"
    )


class _Extraction(Reader):
    """Reads the traced nodes in order; what is no tensor (sizes, flags) is computed at once."""

    def __init__(self, module: nn.Module, inputs: tuple[TensorType, ...]) -> None:
        names = _state_names(module)
        self.module = module
        self.builder = GraphBuilder()
        self.builder.reserved = frozenset(names.values())
        self.known: dict[fx.Node, Any] = {}
        self.order: dict[fx.Node, int] = {}
        self.sources = iter([(f"x{i}" if i else "x", type_) for i, type_ in enumerate(inputs)])
        self.names = names
        self.moved: dict[str, str] = {}
        self.roots: dict[str, str] = {}
        self.now, self.place = 0, ""

    def run(self, traced: fx.Graph) -> Graph:
        self.order = {node: index for index, node in enumerate(traced.nodes)}
        for node in traced.nodes:
            self.now, self.place = self.order[node], _place(node)
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
        except NOT_READ as error:
            raise self.unsupported(f"{_spelled(node)} in this form ({error})") from error
        if self._is_in_place(node):
            self._replace(node, result)
        elif self._is_view(node) and isinstance(result, Value):
            self.roots[result.name] = self._root(args[0])
        return result

    def _input(self, node: fx.Node) -> Any:
        source = next(self.sources, None)
        if source is not None:
            if source[0] in self.builder.reserved:
                raise UnsupportedModule(
                    f"{type(self.module).__name__} has a parameter or buffer called {source[0]!r}, "
                    "the name of the graph's input: rename it"
                )
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
        return _unsupported(self.module, self.place, what)

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
    # The keys count repeated calls (block@1); the values begin with the path.
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _spelled(node: fx.Node) -> str:
    if node.op == "call_module":
        return f"module {node.target}"
    if node.op == "call_method":
        return f"method {node.target}"
    return f"function {getattr(node.target, '__name__', node.target)}"
