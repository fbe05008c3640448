"""Traces a module into ATen ops: what it does when it is called, in the state that it is in.

The module's own forward runs once on tensors without memory, so Python control flow on shapes,
replaced methods and each submodule's mode are what they are in eager. A mode before all of torch's
dispatch records every overload as it was called. make_fx does the same, and loads Dynamo and
inductor for it (torch 2.13: 1.2 s of a first call); torch.export takes twice make_fx's time.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from plantune.errors import UnsupportedModule
from plantune.graph.purity import Overload
from plantune.graph.shapes import META, made_by
from plantune.graph.types import TensorType

# The modes before dispatch are those of the process, not of a thread.
TRACING = threading.Lock()
CONSTANTS = (type(None), bool, int, float, complex, str, torch.Size, torch.dtype, torch.device)
# What torch says where a shape, or the way through a forward, depends on a tensor's values.
BY_VALUES = ("to number", "nonzero", "meta tensors", "data-dependent")
BY_VALUE = "it asks for a tensor's values. A forward must not branch or loop on them"
CONSTANT = "a constant tensor (register it as a buffer)"
# These make tensors of Python's values, and these move tensors: a network is on one device.
FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor)
MOVES = (Tensor.cuda, Tensor.cpu)
# What makes plain Python of a tensor's values.
READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__"}
READS |= {"__bool__", "__int__", "__float__", "__complex__", "__index__"}
# torch's recurrent layers keep lists of their weights, which they make anew for other tensors.
OWN_LISTS = {"_flat_weights", "_flat_weight_refs"}
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Record:
    """One call of an overload, where it stands in the module and in the user's code."""

    overload: Overload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    place: str
    line: str


@dataclass(frozen=True)
class Trace:
    """A traced module: what it called, on which tensors without memory.

    Of the `leaves` of its output those that are tensors are the graph's results.
    """

    records: tuple[Record, ...]
    state: Mapping[str, Tensor]
    inputs: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    structure: TreeSpec


def trace(module: nn.Module, inputs: Sequence[TensorType]) -> Trace:
    """What `module` does with inputs of these types; raises UnsupportedModule."""
    _check_count(module, len(inputs))
    with TRACING:
        return _Tracing(module).run(inputs)


def unsupported(module: nn.Module, place: str, what: str, line: str = "") -> UnsupportedModule:
    return UnsupportedModule(
        f"{type(module).__name__}, at {place or 'its own forward'}: {what} cannot be part of a "
        "plan. Optimize the modules around it, or write it in another way"
        + (f"; {line}" if line else "")
    )


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Each parameter and buffer under its first name: tied weights are one value."""
    named = (*module.named_parameters(), *module.named_buffers())
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), (name, tensor))
    return dict(first.values())


class _Tracing:
    """One trace. It runs a shadow of the module: other objects of the same classes with the same
    attributes, whose parameters and buffers have no memory. Nothing of the module itself changes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.state = state_of(module)
        # What stands for each parameter and buffer, by its identity.
        self.stand_ins = {id(tensor): _without_memory(tensor) for tensor in self.state.values()}
        self.trains = any(child.training for child in module.modules())
        self.path: list[str] = []
        self.line = ""

    @property
    def place(self) -> str:
        """The path of the module in whose forward the trace is, or stopped."""
        return self.path[-1] if self.path else ""

    def run(self, inputs: Sequence[TensorType]) -> Trace:
        shadows = self._shadows()
        given = [torch.empty(t.shape, dtype=t.torch_dtype, device=META) for t in inputs]
        before = [dict(table) for shadow in shadows.values() for table in _tables(shadow)]
        with (
            self._refusing(),
            # A caller's autocast is not the module's own.
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            enable_python_dispatcher(),
            _Recorder(self) as recorder,
            _Calls(self),
        ):
            made = shadows[id(self.module)](*given)
        self._check_assigned(shadows.values(), before)
        leaves, structure = self._flat(made)
        state = {name: self.stand_ins[id(tensor)] for name, tensor in self.state.items()}
        return Trace(tuple(recorder.records), state, tuple(given), leaves, structure)

    def _shadows(self) -> dict[int, nn.Module]:
        """A shadow of each submodule, by the identity of what it stands for."""
        made: dict[int, nn.Module] = {}
        for path, child in self.module.named_modules():
            self._check_module(path, child)
            shadow = object.__new__(type(child))
            shadow.__dict__.update(vars(child))
            for table in ("_parameters", "_buffers"):
                shadow.__dict__[table] = {
                    key: tensor if tensor is None else self.stand_ins[id(tensor)]
                    for key, tensor in vars(child)[table].items()
                }
            shadow.__dict__["_modules"] = dict(child._modules)
            made[id(child)] = shadow
            shadow.__dict__["_forward_pre_hooks"] = {0: self._enters(path)}
            shadow.__dict__["_forward_hooks"] = {0: self._leaves}
        for shadow in made.values():
            children = shadow._modules
            children.update({k: made[id(c)] for k, c in children.items() if c is not None})
            for name, value in vars(shadow).items():
                if isinstance(value, types.MethodType) and id(value.__self__) in made:
                    own = types.MethodType(value.__func__, made[id(value.__self__)])
                    shadow.__dict__[name] = own
        return made

    def unsupported(self, what: str) -> UnsupportedModule:
        return unsupported(self.module, self.place, what, self.line)

    def _enters(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self.path.append(path)

        return enter

    def _leaves(self, module: nn.Module, args: Any, result: Any) -> None:
        self.path.pop()

    def _check_module(self, path: str, child: nn.Module) -> None:
        if isinstance(child, torch.jit.ScriptModule):
            raise unsupported(self.module, path, "a scripted module")
        if child._forward_hooks or child._forward_pre_hooks:
            raise unsupported(self.module, path, "a module with forward hooks")

    def _check_assigned(self, shadows: Any, before: list[dict[str, Any]]) -> None:
        now = [table for shadow in shadows for table in _tables(shadow)]
        for table, then in zip(now, before, strict=True):
            for key in {**then, **table}:
                if table.get(key) is not then.get(key) and key not in OWN_LISTS:
                    raise unsupported(self.module, "", f"a forward that assigns to self.{key}")

    def _flat(self, made: Any) -> tuple[tuple[Any, ...], TreeSpec]:
        leaves, structure = tree_flatten(made, lambda leaf: isinstance(leaf, torch.Size))
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                raise UnsupportedModule(
                    f"{type(self.module).__name__} returns a {type(leaf).__name__}; tensors are "
                    "known, and tuples, lists, dicts and named tuples of tensors and constants"
                )
        return tuple(leaves), structure

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except UnsupportedModule:
            raise
        except Exception as error:
            line = _line_of(error)
            said = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
            said = BY_VALUE if any(words in said for words in BY_VALUES) else said
            raise UnsupportedModule(
                f"{type(self.module).__name__}, at {self.place or 'its own forward'}: torch cannot "
                f"trace it: {said}" + (f"; {line}" if line else "")
            ) from error


class _Recorder(ProxyTorchDispatchMode):
    """Torch lets only its own tracers run before its dispatch, so this derives from one."""

    def __init__(self, tracing: _Tracing) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.records: list[Record] = []
        self._tracing = tracing
        self._grad = torch.is_grad_enabled()

    def __enter__(self) -> _Recorder:
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self, *error)

    def __torch_dispatch__(
        self, func: Overload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = made_by(func, args, kwargs or {})
        if result is None:
            with no_python_dispatcher():  # whose rules for views load SymPy
                result = func(*args, **(kwargs or {}))
        tracing = self._tracing
        record = Record(func, args, kwargs or {}, result, tracing.place, tracing.line)
        if torch.is_grad_enabled() != self._grad and tracing.trains:
            raise tracing.unsupported("a forward that switches gradients on or off")
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise tracing.unsupported("a forward under autocast")
        self.records.append(record)
        return result


# Torch hides each such method from Dynamo, for which it would import it.
_record = getattr(_Recorder.__torch_dispatch__, "__wrapped__", None)
if _record is not None:
    setattr(_record, "__dynamo_disable", _record)  # Python would mangle the name


class _Calls(TorchFunctionMode):
    """Notes the line of the user's code from which torch is called, and keeps the trace to tensors
    without memory: values that it would compute with now, nothing would see change.
    """

    def __init__(self, tracing: _Tracing) -> None:
        super().__init__()
        self._tracing = tracing

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._tracing.line = _line(sys._getframe(1))
        if func in FROM_VALUES:
            raise self._tracing.unsupported(CONSTANT)
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: self._stand_in(func, tensor), (args, kwargs or {})
        )
        if "device" in kwargs or func in _device_constructors():
            kwargs["device"] = META
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            args = (args[0], META, *args[2:])
        return args[0] if func in MOVES else func(*args, **kwargs)

    def _stand_in(self, func: Any, tensor: Tensor) -> Tensor:
        """What stands for a parameter or buffer that a closure holds."""
        if tensor.is_meta:
            return tensor
        found = self._tracing.stand_ins.get(id(tensor))
        if found is None:
            read = f"a tensor's value as a number, by {func.__name__}(),"
            what = read if getattr(func, "__name__", "") in READS else CONSTANT
            raise self._tracing.unsupported(what)
        return found


def _without_memory(tensor: Tensor) -> Tensor:
    """In row-major order: a graph depends on no strides."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty


def _check_count(module: nn.Module, inputs: int) -> None:
    try:
        inspect.signature(module.forward).bind(*range(inputs))
    except TypeError as error:
        less = "fewer inputs than" if "too many" in str(error) else "more inputs than were"
        raise UnsupportedModule(f"{type(module).__name__} takes {less} given") from error


def _line(frame: FrameType | None) -> str:
    """The innermost line outside of torch and of this package's tracing."""
    while frame is not None and frame.f_code is not _Tracing.run.__code__:
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
