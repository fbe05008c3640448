"""torch.autograd.Functions, whose own backward pass is recorded beside what their forward calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import autocast_mode
from torch.autograd.function import Function, FunctionCtx, _SingleLevelFunction
from torch.utils._pytree import tree_map_only

from plantune.graph.tracing.autocast import under
from plantune.graph.tracing.records import Derivative, Record

# What `Function.apply` calls, also one that was bound before, as in `flip = Flip.apply`. The class
# has no `apply` of its own: it inherits the core's.
_base: Any = _SingleLevelFunction
CHECKPOINT = "torch.utils.checkpoint"
# A checkpoint of some versions of torch keeps its inputs in one, of which nothing is computed.
_KEEPS = (CHECKPOINT, "_NoopSaveInputs")
# Of these the backward pass runs the given function again, and that function's own one.
_AGAIN = (CHECKPOINT, "CheckpointFunction")
# This one, and those of torch.distributed, talk to other processes, also while they are traced.
_TALKS = ("torch.nn.modules._functions", "SyncBatchNorm")
Answer = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Recorder(Protocol):
    """What the trace offers for recording a Function."""

    def has_gradient(self, value: Any) -> bool: ...

    def add(self, args: tuple[Any, ...], result: Tensor, derivative: Derivative) -> None:
        """Records an alias whose gradient goes by the derivative."""

    def state(self) -> Any:
        """What was recorded so far."""

    def back_to(self, state: Any) -> None:
        """Forgets what was recorded since."""

    def apart(self) -> AbstractContextManager[list[Record]]:
        """Inside, it is recorded there, and gradients are switched off."""


@contextmanager
def each_application(answer: Answer, autocasts: str) -> Iterator[None]:
    """Inside, this thread has `answer` return what the application of a Function does, given the
    Function, the core's own `apply` and the arguments. Other threads apply theirs as ever.

    Functions that cast their inputs under autocast do so for tensors without memory as for those of
    the device that `autocasts`.
    """
    thread = threading.get_ident()
    torch_cast: Any = autocast_mode._cast

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        core: Any = super(_SingleLevelFunction, cls)
        if threading.get_ident() != thread or (cls.__module__, cls.__name__) == _KEEPS:
            return core.apply(*args, **kwargs)
        return answer(cls, core.apply, args, kwargs)

    def cast_here(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        if threading.get_ident() != thread or device_type != autocasts:
            return torch_cast(value, device_type, dtype)
        return tree_map_only(Tensor, lambda x: x.to(dtype) if _is_cast(x) else x, value)

    _base.apply, autocast_mode._cast = classmethod(apply), cast_here
    try:
        yield
    finally:
        autocast_mode._cast = torch_cast
        del _base.apply


class Context(FunctionCtx):
    """What the two passes of a Function share, without a node of autograd's."""

    to_save: tuple[Tensor, ...] = ()
    dirty_tensors: tuple[Tensor, ...] = ()
    non_differentiable: tuple[Tensor, ...] = ()
    materialize_grads = True

    def __init__(self, function: Any, args: Sequence[Any]) -> None:
        self._forward_cls = function
        # Which gradients are asked for is known later; those that are not are not computed.
        self.needs_input_grad = tuple(map(_is_differentiable, args))

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(self.to_save)


def applied(recorder: Recorder, function: Any, args: tuple[Any, ...]) -> Any:
    """What a Function returns, of which both passes are recorded. Raises TypeError or ValueError
    where it is not one that autograd takes.
    """
    named = function.__module__, function.__name__
    if named == _TALKS or named[0].startswith("torch.distributed"):
        raise ValueError("it talks to other processes")
    if named == _AGAIN:
        return _checkpointed(recorder, *args)
    given, before = args, recorder.state()
    with torch.no_grad():
        made = _forward(function, ctx := Context(function, args), args)
        if dirty := ctx.dirty_tensors:  # it writes to copies, whose values come back with gradients
            recorder.back_to(before)
            given = tuple(arg.clone() if _holds(dirty, arg) else arg for arg in args)
            made = _forward(function, ctx := Context(function, args), given)
        outputs = made if isinstance(made, tuple) else (made,)
        silent = (y for y in outputs if _holds(ctx.non_differentiable, y) and _holds(given, y))
        stand_ins = {id(y): y.detach() for y in silent}
    fresh = _differentiated(recorder, function, ctx, outputs, args)
    for arg, copy in zip(args, given, strict=True):
        if copy is not arg:
            stand_ins[id(copy)] = arg.copy_(fresh.get(id(copy), copy))
    stand_ins = {**fresh, **stand_ins}
    results = tuple(stand_ins.get(id(y), y) for y in outputs)
    return results if isinstance(made, tuple) else results[0]


def _forward(function: Any, ctx: Context, args: tuple[Any, ...]) -> Any:
    if function.setup_context is _SingleLevelFunction.setup_context:
        return function.forward(ctx, *args)
    made = function.forward(*args)
    function.setup_context(ctx, args, made)
    return made


def _differentiated(
    recorder: Recorder, function: Any, ctx: Context, outputs: Sequence[Any], args: Sequence[Any]
) -> dict[int, Tensor]:
    """What stands for each output that has a gradient, by the output's identity."""
    named = {id(y): y for y in outputs if _is_differentiable(y)}
    made = tuple(y for y in named.values() if not _holds(ctx.non_differentiable, y))
    with recorder.apart():  # what they hold comes by the derivative
        results = tuple(torch.empty_strided(y.shape, y.stride(), dtype=y.dtype) for y in made)
        seeds = tuple(torch.empty(y.shape, dtype=y.dtype) for y in made)
    waiting = {id(y): seed for y, seed in zip(made, seeds, strict=True)}
    with under(None), recorder.apart() as records:
        given = [_seed(y, waiting, ctx) for y in outputs]
        found = _backward(function)(ctx, *given)
        gradients = _checked(found if isinstance(found, tuple) else (found,), args)
    inputs = tuple(arg for arg in args if _is_differentiable(arg))
    derivative = Derivative(made, results, inputs, seeds, tuple(records), gradients)
    for y, result in zip(made, results, strict=True):
        recorder.add((y, *inputs), result, derivative)
    return {id(y): result for y, result in zip(made, results, strict=True)}


def _seed(output: Any, waiting: dict[int, Tensor], ctx: Context) -> Tensor | None:
    """What the backward pass is given for an output."""
    if id(output) in waiting:
        return waiting.pop(id(output))
    if not isinstance(output, Tensor) or not ctx.materialize_grads:
        return None
    return torch.zeros(output.shape, dtype=output.dtype)


def _backward(function: Any) -> Callable[..., Any]:
    own: Callable[..., Any] = function.backward
    if function.vjp is not Function.vjp:
        own = function.vjp
    boxed = getattr(function, "boxed_grads_call", False)
    return (lambda ctx, *given: own(ctx, [*given])) if boxed else own


def _checked(found: tuple[Any, ...], args: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """The gradients of those arguments that can have one, as autograd takes them."""
    found, rest = found[: len(args)], found[len(args) :]
    if len(found) < len(args) or any(extra is not None for extra in rest):
        raise ValueError(f"backward returns {len(found) + len(rest)} gradients of {len(args)}")
    pairs = list(zip(args, found, strict=True))
    if any(g is not None and not isinstance(arg, Tensor) for arg, g in pairs):
        raise ValueError("backward returns a gradient of what is not a tensor")
    return tuple(_fitting(g, arg) for arg, g in pairs if _is_differentiable(arg))


def _fitting(gradient: Any, arg: Tensor) -> Tensor | None:
    if gradient is None:
        return None
    if not isinstance(gradient, Tensor):
        raise TypeError(f"backward returns a {type(gradient).__name__} as a gradient")
    summed = gradient if gradient.shape == arg.shape else gradient.sum_to_size(arg.shape)
    return summed if summed.dtype == arg.dtype else summed.to(arg.dtype)


def _checkpointed(recorder: Recorder, run: Callable[..., Any], _: bool, *args: Any) -> Any:
    """A plan keeps what it needs, so only the gradients count, which torch computes of outputs of
    the function alone, and only if it knows of gradients of its inputs.
    """
    if not any(map(recorder.has_gradient, args)):
        raise ValueError(
            "checkpoint(use_reentrant=True) drops the gradients of weights where no input has one; "
            "use_reentrant=False does not"
        )
    return run(*args)


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _holds(tensors: Sequence[Any], value: Any) -> bool:
    return any(value is each for each in tensors)
