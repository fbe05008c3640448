"""Gives a tuned module's `forward` the signature of its reference's, which trainers read."""

from __future__ import annotations

from inspect import Parameter, Signature, signature
from types import FunctionType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

T = TypeVar("T", bound=nn.Module)
_SELF = Parameter("self", Parameter.POSITIONAL_ONLY)
# By the forward of the reference, and the class whose copies they are.
_made: WeakKeyDictionary[Any, dict[type, type]] = WeakKeyDictionary()


def class_for(kind: type[T], reference: nn.Module) -> type[T]:
    """`kind` itself but for what `inspect.signature` says of its modules and of their `forward`:
    both take what the reference's forward does. There is one such class for all references of one
    forward; `kind` itself serves a reference whose forward has no signature, as TorchScript's.
    """
    kind = plain(kind)
    forward = reference.forward
    try:
        known = _made.setdefault(getattr(forward, "__func__", forward), {})
        if kind not in known:
            known[kind] = _class_of(kind, signature(forward))
    except (TypeError, ValueError):  # no Python function, or one that cannot be kept
        return kind
    return known[kind]


def plain(kind: type[T]) -> type[T]:
    """The class with a name that can be imported, of which this one may be a copy."""
    return next(each for each in kind.__mro__ if "__signature__" not in vars(each))


def bare(kind: type[T]) -> T:
    """Without its state, which follows; for pickle."""
    return kind.__new__(kind)


def _class_of(kind: type[T], of_calls: Signature) -> type[T]:
    namespace = {
        "forward": _with_signature(kind.forward, of_calls),
        "__signature__": of_calls,
        **{name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")},
    }
    made: type[T] = type(kind.__name__, (kind,), namespace)
    return made


def _with_signature(function: Any, of_calls: Signature) -> FunctionType:
    """The same code, so that nothing is called in between."""
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, function.__closure__
    )
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__doc__ = function.__doc__
    parameters = (_SELF, *of_calls.parameters.values())
    made.__signature__ = of_calls.replace(parameters=parameters)  # type: ignore[attr-defined]
    return made
