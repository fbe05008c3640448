"""Which inputs the plans of a tuned module are for, and why not others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plantune.errors import InputMismatch
from plantune.graph.types import TensorType
from plantune.runtime.form import Form
from plantune.runtime.torch_internals import any_autocast


class PlannedInputs:
    """Tensors of one type on one device, for a module that is there in that dtype."""

    def __init__(self, module: nn.Module, type_: TensorType, device: torch.device, name: str):
        self._dtype, self._shape = type_.torch_dtype, type_.shape
        self._device, self._name = device, name
        first = next(module.parameters(), None)
        # A module that casts its input is called with what it was made for, such as bytes.
        self._casts = first is not None and first.dtype != self._dtype

    def is_alike(self, x: Any) -> bool:
        return type(x) is Tensor and x.dtype is self._dtype and x.shape == self._shape

    def is_usual(self, x: Any, form: Form) -> bool:
        """Whether nothing speaks against a plan; if something does, `why_not` says it."""
        return (
            type(x) is Tensor
            and x.dtype is self._dtype
            and x.shape == self._shape
            and x.device == self._device
            and form.is_home
            and not any_autocast()
        )

    def is_home(self, form: Form) -> bool:
        """Whether the module is where, and of the dtype, that it was made for."""
        if form.first is None:
            return True
        home = self._casts or form.first.dtype is self._dtype
        return home and form.first.device == self._device

    def why_not(self, x: Any, form: Form) -> str | None:
        """Why a call with `x` cannot run from a plan, None if it can. Raises InputMismatch."""
        if not isinstance(x, Tensor):
            kind = type(x).__name__
            raise InputMismatch(f"{self._name}: the input must be a tensor, got {kind}")
        state = x if form.first is None else form.first
        autocast = x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
        wanted = self._dtype if self._casts else state.dtype
        if x.device != state.device or (x.dtype != wanted and not autocast):
            raise InputMismatch(
                f"{self._name}: needs a {wanted} tensor on {state.device}, got {x.dtype} on "
                f"{x.device}; convert the input, or move the module"
            )
        if autocast:
            return "autocast is on, which changes what each op computes"
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return f"the input is a {type(x).__name__}, which may compute in its own way"
        if x.dtype != self._dtype or x.device != self._device:
            return f"the module was moved to {x.dtype} on {x.device}"
        if x.shape != self._shape:
            return f"there is a plan for input {self._shape}, got {tuple(x.shape)}"
        return None
