"""A tuned module that has the weights of the module that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from plantune.graph.tracing.arguments import Arguments
from plantune.runtime.captured.program_pool import ProgramPool
from plantune.runtime.module import TunedModule
from plantune.runtime.watched.mirror import Mirror

# What nn.Module reads of its own tables, without asking for an attribute.
READ = ("named_modules", "named_children", "__repr__")


class SharingModule(TunedModule):
    """Has the parameters and buffers of another module, and follows what else changes there: each
    call, and whoever asks for a part of this one, finds it as that module is now.
    """

    def __init__(
        self, reference: nn.Module, arguments: Arguments, *, mirror: Mirror, **how: Any
    ) -> None:
        vars(self)["_mirror"] = mirror
        super().__init__(reference, arguments, **how)

    @property
    def reference(self) -> nn.Module:
        """The module whose meaning this one has: a copy of the given one, as that is now."""
        self._follow()
        return self._reference[0]

    def _follow(self) -> None:
        own = self.__dict__
        if own["_mirror"].follow():
            self._share()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():  # Dynamo leaves the call below to Python, which follows
            self._follow()
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            self._follow()
        return super().forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "_mirror" in self.__dict__:  # not while this is made of its state
            self._follow()
        return super().__getattr__(name)

    def pool(self) -> ProgramPool:
        self._follow()
        return super().pool()

    def refresh(self, *, weights_only: bool = False) -> None:
        if not weights_only:
            self.__dict__["_mirror"].read_again()
            self._share()
        super().refresh(weights_only=weights_only)

    def __getstate__(self) -> dict[str, Any]:
        self._follow()
        return super().__getstate__()


def _following(name: str) -> Callable[..., Any]:
    @wraps(getattr(nn.Module, name))
    def read(self: SharingModule, *args: Any, **kwargs: Any) -> Any:
        self._follow()
        return getattr(super(SharingModule, self), name)(*args, **kwargs)

    return read


for _name in READ:
    setattr(SharingModule, _name, _following(_name))
