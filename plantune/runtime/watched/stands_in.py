"""Gives a module the parameters, attributes and methods of another one, for which it stands in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import getattr_static, isfunction
from types import MethodType
from typing import Any

from torch import nn

# What nn.Module does with parameters and buffers. A network's class may do it in its own way, with
# other keys in a state_dict for example, so the reference is asked.
ASKED = (
    *("state_dict", "load_state_dict", "get_extra_state", "set_extra_state"),
    *("_save_to_state_dict", "_load_from_state_dict"),
    *("parameters", "named_parameters", "buffers", "named_buffers"),
    *("apply", "_apply", "to", "cpu", "cuda", "to_empty", "share_memory", "type"),
    *("float", "double", "half", "bfloat16"),
    *("train", "eval", "requires_grad_", "zero_grad"),
)
# Tables that a stand-in shares with its reference.
SHARED = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
# What a stand-in has of its own; all else is the reference's.
OWN = frozenset(vars(nn.Module())) | {"_reference", "_calls", "_arguments", "training"}


class StandsIn(nn.Module):
    """Has the parameters, buffers, submodules and attributes of `reference`, and changes them as
    that would.
    """

    def __init__(self, reference: nn.Module) -> None:
        super().__init__()
        self.training = reference.training
        # In a tuple, so that nn.Module does not register it as a child.
        self._reference = (reference,)
        self._share()

    def _share(self) -> None:
        for table in SHARED:
            vars(self)[table] = getattr(self.reference, table)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._share()

    @property
    def reference(self) -> nn.Module:
        """The module whose meaning this one has; it shares all parameters."""
        return self._reference[0]

    def __getattr__(self, name: str) -> Any:
        """What the reference has under that name. Its methods get this module as `self`, so that
        what they call runs from the plan, unless they need their class (`super`).
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in OWN:
                raise
        reference = self.reference
        found = getattr_static(reference, name, None)
        if name not in vars(reference) and isfunction(found) and _is_free(found):
            return MethodType(found, self)
        return getattr(reference, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN:
            super().__setattr__(name, value)
            if name not in ("training", *SHARED) or "_reference" not in vars(self):
                return
        elif hasattr(type(self), name):
            raise AttributeError(f"{name!r} is the tuned module's own; set it on its reference")
        setattr(self.reference, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.reference, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.reference)})

    def __getitem__(self, key: Any) -> Any:
        return self.reference[key]  # type: ignore[index]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.reference[key] = value  # type: ignore[operator]

    def __delitem__(self, key: Any) -> None:
        del self.reference[key]  # type: ignore[operator]
        self._share()

    def __contains__(self, key: Any) -> bool:
        return key in self.reference  # type: ignore[operator]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.reference)  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return len(self.reference)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True


def _is_free(function: Any) -> bool:
    """Whether a method takes any object as `self`: one that calls `super()` needs its class."""
    return "__class__" not in function.__code__.co_freevars


def _asking(name: str) -> Callable[..., Any]:
    @wraps(getattr(nn.Module, name))
    def ask(self: StandsIn, *args: Any, **kwargs: Any) -> Any:
        reference = self.reference
        result = getattr(reference, name)(*args, **kwargs)
        vars(self)["training"] = reference.training
        self._share()
        return self if result is reference else result

    return ask


for _name in ASKED:
    setattr(StandsIn, _name, _asking(_name))
