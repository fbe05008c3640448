"""Methods that run with the GPU of their object as the current one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from plantune.runtime.watched.torch_internals import current_gpu


class HasDevice(Protocol):
    """What has a device of its own."""

    @property
    def device(self) -> torch.device: ...


S = TypeVar("S", bound=HasDevice)
P = ParamSpec("P")
R = TypeVar("R")


def on_its_gpu(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The current GPU says where memory comes from, and whose stream a handle of 0 is; a caller
    may have made another one current.
    """

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if current_gpu() == self.device.index:
            return method(self, *args, **kwargs)
        with torch.cuda.device(self.device):
            return method(self, *args, **kwargs)

    return run
