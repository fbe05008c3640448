"""Traces a module by torch.fx: what it does when it is called, in the state that it is in."""

from __future__ import annotations

import inspect
import operator
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten

from plantune.errors import UnsupportedModule
from plantune.graph.spelling import MODULES

# Of two traces at once, one would leave its patch of nn.Module in place.
TRACING = threading.Lock()
CONSTANTS = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)
# What makes plain Python of a tensor's values.
READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__"}
READS |= {"__bool__", "__int__", "__float__", "__complex__", "__index__"}
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Trace:
    """A traced module. The output of `graph` is a flat tuple, which has this structure."""

    graph: fx.Graph
    structure: TreeSpec


def trace(module: nn.Module, inputs: int) -> Trace:
    """What `module` does with that many inputs; raises UnsupportedModule."""
    _check_count(module, inputs)
    with TRACING:
        return _traced_alone(module, inputs)


def unsupported(module: nn.Module, place: str, what: str, line: str = "") -> UnsupportedModule:
    return UnsupportedModule(
        f"{type(module).__name__}, at {place or 'its own forward'}: {what} is not "
        "known to plantune. Write it with known ops, or add it (CONTRIBUTING, a new op)"
        + (f"; {line}" if line else "")
    )


def state_names(module: nn.Module) -> dict[int, str]:
    """The first name of each parameter and buffer, by identity: tied weights are one value."""
    names: dict[int, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        names.setdefault(id(tensor), name)
    return names


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
    structure: TreeSpec

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self._inputs = inputs

    @property
    def place(self) -> str:
        """The path of the module in whose forward the trace is, or stopped."""
        return str(next(reversed(self.module_stack.values()), ("",))[0])

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """fx would take the forward of the root's class; this calls the root itself, as a user
        does, and leaves arguments that are not given to Python.
        """
        names = [f"x{i}" if i else "x" for i in range(self._inputs)]
        return self._call_root, [self.create_proxy("placeholder", name, (), {}) for name in names]

    def _call_root(self, *args: Any) -> tuple[Any, ...]:
        leaves, self.structure = tree_flatten(self.root(*args))
        for leaf in leaves:
            if not isinstance(leaf, (fx.Proxy, torch.Tensor, *CONSTANTS)):
                raise UnsupportedModule(
                    f"{type(self.root).__name__} returns a {type(leaf).__name__}; tensors are "
                    "known, and tuples, lists, dicts and named tuples of tensors and constants"
                )
        return tuple(leaves)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["line"] = _line(sys._getframe(1))
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = type(m) in MODULES or super().is_leaf_module(m, module_qualified_name)
        parametrized = is_parametrized(m) or isinstance(m, ParametrizationList)
        return known and not parametrized and not _is_patched(m)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return forward(*args, **kwargs)
        if m._forward_hooks or m._forward_pre_hooks:
            raise unsupported(self.root, self.path_of_module(m), "a module with forward hooks")
        if m is self.root:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_arg(self, a: Any) -> Any:
        # fx would keep such a tensor as an attribute of the user's module.
        if isinstance(a, torch.Tensor) and id(a) not in state_names(self.root):
            what = "a constant tensor (register it as a buffer)"
            raise unsupported(self.root, self.place, what, _line(sys._getframe(1)))
        return super().create_arg(a)


class _NoReads(TorchFunctionMode):
    """Refuses to make a plain number of a tensor that was there before, or of what follows from
    one: nothing would see it change.
    """

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer
        self._made: dict[int, Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        own = all(id(tensor) in self._made for tensor in given)
        if not own and getattr(func, "__name__", "") in READS:
            what = f"a tensor's value as a number, by {func.__name__}(),"
            line = _line(sys._getframe(1))
            raise unsupported(self._tracer.root, self._tracer.place, what, line)
        result = func(*args, **(kwargs or {}))
        if own and isinstance(result, torch.Tensor):
            self._made[id(result)] = result
        return result


def _traced_alone(module: nn.Module, inputs: int) -> Trace:
    tracer = _Tracer(inputs)
    tables = [table for child in module.modules() for table in _tables(child)]
    before = [(table, dict(table)) for table in tables]
    try:
        with _NoReads(tracer):
            traced = tracer.trace(module)
    except UnsupportedModule:
        raise
    except Exception as error:
        line = _line_of(error)
        raise UnsupportedModule(
            f"{type(module).__name__}, at {tracer.place or 'its own forward'}: torch.fx cannot "
            f"trace it: {error}. A forward must not branch or loop on the values of tensors"
            + (f"; {line}" if line else "")
        ) from error
    finally:
        assigned = [name for table, then in before for name in _restore(table, then)]
    if assigned:
        raise unsupported(module, "", f"a forward that assigns to self.{assigned[0]}")
    return Trace(traced, tracer.structure)


def _check_count(module: nn.Module, inputs: int) -> None:
    try:
        inspect.signature(module.forward).bind(*range(inputs))
    except TypeError as error:
        less = "fewer inputs than" if "too many" in str(error) else "more inputs than were"
        raise UnsupportedModule(f"{type(module).__name__} takes {less} given") from error


def _is_patched(module: nn.Module) -> bool:
    """Whether somebody replaced a method of a module that has a spelling: on the module itself, as
    adapters do, or on its class.
    """
    kind = type(module)
    if any(callable(getattr(kind, name, None)) for name in vars(module)):
        return True
    methods = [getattr(kind, name, kind.forward) for name in ("forward", "_conv_forward")]
    files = [method.__code__.co_filename for method in methods]
    return any(file != sys.modules[kind.__module__].__file__ for file in files)


def _line(frame: FrameType | None) -> str:
    """The innermost line outside of torch and of this package's tracing."""
    while frame is not None and frame.f_code is not _Tracer._call_root.__code__:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _line_of(error: BaseException) -> str:
    """The innermost such line that an error came through."""
    lines, step = [""], error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE, "<")):
            lines.append(f"{file}:{step.tb_lineno}")
        step = step.tb_next
    return lines[-1]


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
