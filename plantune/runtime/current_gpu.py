"""Methods that run with the GPU of their object as the current one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from plantune.runtime.torch_internals import current_gpu

M = TypeVar("M", bound=Callable[..., Any])


def on_its_gpu(method: M) -> M:
    """A method of an object with a `_device`. The current GPU says where memory comes from, and
    whose stream a handle of 0 is; a caller may have made another one current.
    """

    @wraps(method)
    def run(self: Any, *args: Any) -> Any:
        if current_gpu() == self._device.index:
            return method(self, *args)
        with torch.cuda.device(self._device):
            return method(self, *args)

    return cast(M, run)
