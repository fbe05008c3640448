"""Where a module is, as its own code sees it in a trace: the tensors there are on no device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plantune.graph.tracing.lines import line_in

_getters: Any = Tensor
# Torch's own code may choose another way by them, of which a trace shows less: there they stay.
ASKED: Mapping[Any, Callable[[torch.device], Any]] = {
    _getters.device.__get__: lambda device: device,
    _getters.is_cuda.__get__: lambda device: device.type == "cuda",
    _getters.is_cpu.__get__: lambda device: device.type == "cpu",
    _getters.is_meta.__get__: lambda device: False,
    _getters.get_device: lambda device: -1 if device.index is None else device.index,
}


class DeviceOfModule(TorchFunctionMode):
    """Inside, tensors tell the user's code the device of the module's first one, if there is one: a
    forward may branch on it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        first = next(chain(module.parameters(), module.buffers()), None)
        with torch._C.DisableTorchFunction():  # a trace's own mode would answer
            self._device = None if first is None else first.device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        answer = None if self._device is None else ASKED.get(func)
        if answer is not None and self._device is not None:
            frame = sys._getframe(1)
            # A tuned module inside must know that it is traced.
            ours = str(frame.f_globals.get("__name__")).startswith("plantune.runtime")
            if not ours and line_in(frame, frame.f_lineno) is not None:
                return answer(self._device)
        return func(*args, **(kwargs or {}))
