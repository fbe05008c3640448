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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
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
from torch.utils._pytree import tree_leaves, tree_map_only

from plantune.errors import UnsupportedModule, UntracedFunction
from plantune.graph.nested import kind_of, leaves
from plantune.graph.tracing import autocast as casting
from plantune.graph.tracing.arguments import CONSTANTS, Arguments
from plantune.graph.tracing.constants import constant, indices
from plantune.graph.tracing.custom_functions import applied, each_application
from plantune.graph.tracing.devices import DeviceOfModule
from plantune.graph.tracing.lines import files_of, line_in, line_of
from plantune.graph.tracing.modes import modes_as_before
from plantune.graph.tracing.purity import Overload
from plantune.graph.tracing.records import Derivative, Record
from plantune.graph.tracing.shadow import Shadow, unsupported
from plantune.graph.tracing.shapes import META, made_by
from plantune.graph.tracing.side_effects.containers import depend
from plantune.graph.tracing.side_effects.watch import SideEffects
from plantune.graph.tracing.untraced import why_untraced
from plantune.graph.tracing.validation import without_validation

# The modes before dispatch are those of the process, not of a thread.
TRACING = threading.Lock()
ALIAS = torch.ops.aten.alias.default
CONSTANT = "a constant tensor (register it as a buffer)"
FOREIGN = (
    "a parameter that parameters() does not list (keep modules in an nn.ModuleList; where a "
    "function holds them, give share=True)"
)
# These make tensors of Python's values, and these move tensors: a network is on one device.
FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor)
INDEXED = (Tensor.__getitem__, Tensor.__setitem__)
MOVES = (Tensor.cuda, Tensor.cpu)
REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
# A backward pass that is derived from the forward knows nothing of these.
HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
# What makes plain Python of a tensor's values.
READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__"}
READS |= {"__bool__", "__int__", "__float__", "__complex__", "__index__"}
_HERE = str(Path(__file__).parent)
# What these files raise is a mistake of theirs, and says nothing about the module.
_OWN = (str(Path(_HERE).parent / "spelling"), str(Path(_HERE, "shapes.py")))


@dataclass(frozen=True)
class Trace:
    """A traced module: what it called, on which tensors without memory.

    Those of the `leaves` of what it `made` that are tensors are the graph's results.
    """

    records: tuple[Record, ...]
    state: Mapping[str, Tensor]
    inputs: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    made: Any


def trace(module: nn.Module, arguments: Arguments, *, derives: bool | None = None) -> Trace:
    """What `module` does in a call with these arguments; raises UnsupportedModule.

    `derives` says whether a backward pass is derived from it: by default if a submodule trains.
    """
    _check_count(module, arguments)
    if derives is None:
        derives = any(child.training for child in module.modules())
    tracing = _Tracing(module, derives)
    with TRACING, tracing.side_effects:
        return tracing.run(arguments)


class _Tracing:
    """One trace, on a shadow of the module."""

    def __init__(self, module: nn.Module, derives: bool) -> None:
        self.module = module
        self.shadow = Shadow(module)
        self.derives = derives
        self.line = ""
        self.side_effects = SideEffects(module, self.unsupported)
        # Where the module runs, if that is known: whose autocast counts.
        self.kind = _kind_of_device(module)
        # The Functions in whose passes the trace is.
        self.functions: list[str] = []

    def run(self, arguments: Arguments) -> Trace:
        self.kind = arguments.autocast[0] if arguments.autocast else self.kind
        given = [torch.empty(t.shape, dtype=t.torch_dtype, device=META) for t in arguments.types]
        args, kwargs = arguments.given(given)
        before = kind_of((args, kwargs), id)
        with (
            self._refusing(arguments),
            modes_as_before(),
            without_validation(),
            casting.under(arguments.autocast),
            enable_python_dispatcher(),
            torch.set_grad_enabled(self.derives or torch.is_grad_enabled()),
            _Recorder(self) as recorder,
            each_application(partial(self._applied, recorder), self.kind),
            _Calls(self, recorder),
            self.side_effects.watched(recorder.records),
            DeviceOfModule(self.module),
        ):
            made = self.side_effects.made(self.shadow(*args, **kwargs))
        if kind_of((args, kwargs), id) != before:
            raise self.unsupported("a forward that changes a list or dict among its arguments")
        if depend(self.shadow.remembered(), recorder.records, given):
            raise self.unsupported("a forward that keeps what it makes of its inputs")
        for key, kept in self.shadow.assigned.items():
            # What follows from shapes alone is as well made in each call.
            if depend([kept], recorder.records, [*given, *self.shadow.state.values()]):
                raise self.shadow.assigns(key, tensor=True)
        return Trace(
            tuple(recorder.records), self.shadow.state, tuple(given), self._leaves_of(made), made
        )

    def _applied(
        self, recorder: _Recorder, function: Any, core: Any, args: Any, kwargs: Any
    ) -> Any:
        """A Function's result. Where gradients go through it, its own backward pass is part of the
        trace.
        """
        self.functions.append(function.__name__)
        through = self.derives and torch.is_grad_enabled()
        made = applied(recorder, function, args) if through else core(*args, **kwargs)
        self.functions.pop()
        return made

    def unsupported(self, what: str) -> UnsupportedModule:
        return unsupported(self.module, self.shadow.place, what, self.line)

    def _leaves_of(self, made: Any) -> tuple[Any, ...]:
        found = leaves(made)
        for leaf in found:
            if not isinstance(leaf, (Tensor, *CONSTANTS)):
                raise UnsupportedModule(
                    f"{type(self.module).__name__} returns a {type(leaf).__name__}; tensors are "
                    "known, and tuples, lists, dicts and dataclasses of tensors and constants"
                )
        return tuple(found)

    @contextmanager
    def _refusing(self, arguments: Arguments) -> Iterator[None]:
        try:
            yield
        except UnsupportedModule as error:
            if not self.functions:
                raise
            raise UntracedFunction(f"{self.functions[0]}, a Function: {error}") from error
        except Exception as error:
            if files_of(error)[-1].startswith(_OWN):
                raise
            function = self.functions[0] if self.functions else ""
            text = why_untraced(error, function, arguments)
            line, place = line_of(error), self.shadow.place or "its own forward"
            kind = UntracedFunction if function else UnsupportedModule
            raise kind(
                f"{type(self.module).__name__}, at {place}: {text}" + (f"; {line}" if line else "")
            ) from error


def _kind_of_device(module: nn.Module) -> str:
    """Of its parameters and buffers; empty if it has none, or some of several kinds."""
    kinds = {tensor.device.type for tensor in chain(module.parameters(), module.buffers())}
    return kinds.pop() if len(kinds) == 1 else ""


class _Recorder(ProxyTorchDispatchMode):
    """Torch lets only its own tracers run before its dispatch, so this derives from one."""

    def __init__(self, tracing: _Tracing) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.records: list[Record] = []
        # By identity; the records keep them.
        self._differentiable: set[int] = set()
        self._tracing = tracing
        self._grad = torch.is_grad_enabled()
        # As they are cast, by their identity and dtype.
        self._parameters: dict[tuple[int, torch.dtype], Tensor] = {}

    def __enter__(self) -> _Recorder:
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self, *error)

    def __torch_dispatch__(
        self, func: Overload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # record_function computes nothing
            return func(*args, **kwargs)
        autocast = self._autocasts()
        if autocast is not None:
            wanted = casting.casts(func, args, kwargs, autocast)
            if wanted is None:
                return self._parts_of(func, args, kwargs)
            args, kwargs = self._cast((args, kwargs), wanted)
        result = made_by(func, args, kwargs)
        if result is None:
            with no_python_dispatcher():  # whose rules for views load SymPy
                result = func(*args, **kwargs)
        tracing = self._tracing
        if any(map(_is_wrapped, tree_leaves((args, kwargs, result)))):
            raise tracing.unsupported("what the forward computes by torch.func or torch.vmap")
        silent = tracing.derives and torch.is_grad_enabled() != self._grad
        if silent and not self._grad:
            raise tracing.unsupported("a forward that switches gradients on")
        record = Record(func, args, kwargs, result, tracing.shadow.place, tracing.line, silent)
        self.records.append(record)
        self._note_gradients(record)
        return result

    def _note_gradients(self, record: Record) -> None:
        given, made = (tree_leaves(x) for x in ((record.args, record.kwargs), record.result))
        if torch.is_grad_enabled() and any(map(self.has_gradient, given)):
            self._differentiable.update(id(leaf) for leaf in made if isinstance(leaf, Tensor))

    def has_gradient(self, value: Any) -> bool:
        """Whether it would require one in eager: here not all that is made passes autograd."""
        return id(value) in self._differentiable or (
            isinstance(value, Tensor) and value.requires_grad
        )

    def add(self, args: tuple[Any, ...], result: Tensor, derivative: Derivative) -> None:
        place, line = self._tracing.shadow.place, self._tracing.line
        record = Record(ALIAS, args[:1], {}, result, place, line, derivative=derivative)
        self.records.append(record)
        if any(map(self.has_gradient, args[1:])):
            self._differentiable.add(id(result))

    def state(self) -> tuple[int, dict[tuple[int, torch.dtype], Tensor]]:
        return len(self.records), dict(self._parameters)

    def back_to(self, state: tuple[int, dict[tuple[int, torch.dtype], Tensor]]) -> None:
        count, self._parameters = state
        del self.records[count:]

    @contextmanager
    def apart(self) -> Iterator[list[Record]]:
        held = self.records, self._parameters, self._grad
        self.records, self._parameters, self._grad = [], dict(self._parameters), False
        try:
            with torch.no_grad():
                yield self.records
        finally:
            self.records, self._parameters, self._grad = held

    def _autocasts(self) -> casting.Autocast | None:
        """Autocast as the forward has it at this moment, on the kind of device where it runs."""
        found = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if not found:
            return None
        if self._tracing.kind not in found:
            raise self._tracing.unsupported("a forward under autocast")
        return casting.state_on(self._tracing.kind)

    def _cast(self, given: Any, wanted: casting.Dtypes) -> Any:
        """The arguments with tensors in these dtypes. A parameter is cast once, as torch does."""
        left = iter(wanted)

        def cast(tensor: Tensor) -> Tensor:
            dtype = next(left)
            if tensor.dtype == dtype:
                return tensor
            if (key := (id(tensor), dtype)) in self._parameters:
                return self._parameters[key]
            made: Tensor = self.__torch_dispatch__(casting.TO_DTYPE, (), (tensor, dtype))
            self.records[-1] = replace(self.records[-1], inserted=True)
            if isinstance(tensor, nn.Parameter):
                self._parameters[key] = made
            return made

        return tree_map_only(Tensor, cast, given)

    def _parts_of(self, func: Overload, args: tuple[Any, ...], kwargs: Any) -> Any:
        """The result of an overload that is traced by what it is made of."""
        if func.name().startswith(casting.RECURRENT):
            raise self._tracing.unsupported(f"{func} under autocast")
        with self:
            return func.decompose(*args, **kwargs)


# Torch hides each such method from Dynamo, for which it would import it.
_record = getattr(_Recorder.__torch_dispatch__, "__wrapped__", None)
if _record is not None:
    setattr(_record, "__dynamo_disable", _record)  # Python would mangle the name


class _Calls(TorchFunctionMode):
    """Notes the line of the user's code from which torch is called, and keeps the trace to tensors
    without memory: values that it would compute with now, nothing would see change.
    """

    def __init__(self, tracing: _Tracing, recorder: _Recorder) -> None:
        super().__init__()
        self._tracing, self._recorder = tracing, recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._tracing.line = _line(sys._getframe(1))
        if func in FROM_VALUES:
            return self._constant(func, args, kwargs or {})
        if func in INDEXED:
            args = (args[0], indices(args[1]), *args[2:])
        if func == REQUIRES_GRAD:
            return self._recorder.has_gradient(args[0])
        if func in HOOKS:
            raise self._tracing.unsupported(f"{func.__name__}()")
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: self._stand_in(func, tensor), (args, kwargs or {})
        )
        makes = func in _device_constructors() or (
            func is torch.normal and ("size" in kwargs or len(args) > 2)
        )
        if "device" in kwargs or makes:
            kwargs["device"] = META
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
            args = (args[0], META, *args[2:])
        return args[0] if func in MOVES else func(*args, **kwargs)

    def _constant(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """What it makes of a few numbers, which are part of the forward's code."""
        dtype = kwargs.get("dtype")
        if func is Tensor.new_tensor:
            like, *args = args  # type: ignore[assignment]
            dtype = dtype or like.dtype
        plain = len(args) == 1 and not set(kwargs) - {"dtype", "device"}
        made = constant(args[0], dtype) if plain else None
        if made is None:
            raise self._tracing.unsupported(CONSTANT)
        return made

    def _stand_in(self, func: Any, tensor: Tensor) -> Tensor:
        """What stands for a parameter or buffer that a closure holds."""
        if tensor.is_meta:
            return tensor
        found = self._tracing.shadow.stand_ins.get(id(tensor))
        if found is None:
            read = f"a tensor's value as a number, by {func.__name__}(),"
            held = self._tracing.shadow.attribute_of(tensor)
            kind = FOREIGN if isinstance(tensor, nn.Parameter) else CONSTANT
            what = f"{kind}, {held}," if held else kind
            what = read if getattr(func, "__name__", "") in READS else what
            raise self._tracing.unsupported(what)
        return found


def _is_wrapped(leaf: Any) -> bool:
    """Whether torch.func follows a tensor to differentiate what is made of it, or to batch it."""
    return isinstance(leaf, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(leaf)


def _check_count(module: nn.Module, arguments: Arguments) -> None:
    try:
        inspect.signature(module.forward).bind(*arguments.args, **arguments.kwargs)
    except TypeError as error:
        raise UnsupportedModule(f"{type(module).__name__} cannot be called so: {error}") from error


def _line(frame: FrameType | None) -> str:
    """The innermost line outside of torch and of this package's tracing."""
    while frame is not None and frame.f_code is not _Tracing.run.__code__:
        found = line_in(frame, frame.f_lineno)
        if found is not None:
            return found
        frame = frame.f_back
    return ""
