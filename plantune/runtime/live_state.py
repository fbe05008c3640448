"""Watches a module's parameters and buffers, so that the next call sees every change of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

SAMPLES_PER_TENSOR = 16


class LiveState:
    """The tensors of some names in a module, looked up anew at each call.

    A change is seen by identity, address and version. `tensor.data` has a version of its own, so
    writing through it leaves no trace; a few elements of each tensor are compared to see it all the
    same, which finds an optimizer's step but not a change of single elements.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._places = [_place(module, name) for name in names]
        self._seen: tuple[object, ...] = ()
        self._samples: list[Tensor] = []
        self._last: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Name and tensor, as they are now."""
        return {name: owner[key] for name, owner, key in self._places}

    def versions(self) -> tuple[object, ...]:
        """What changes when a tensor is replaced, moved or written in place."""
        now: list[object] = []
        for _, owner, key in self._places:
            tensor = owner[key]
            now += (id(tensor), tensor.data_ptr(), tensor._version)
        return tuple(now)

    def changed(self) -> bool:
        """Whether anything changed since the last call of this."""
        now = self.versions()
        if now != self._seen:
            self._seen = now
            self._samples = [_sample(tensor) for tensor in self.tensors().values()]
            self._last = self._drawn()
            return True
        drawn = self._drawn()
        if self._last is None or torch.equal(drawn, self._last):
            return False
        self._last = drawn
        return True

    def _drawn(self) -> Tensor:
        with torch.no_grad():
            return torch.cat(self._samples) if self._samples else torch.empty(0)


def _place(module: nn.Module, name: str) -> tuple[str, dict[str, Tensor], str]:
    """Where a tensor of that name is kept: the owning module's dict and the key in it."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    holder = owner._parameters if key in owner._parameters else owner._buffers
    return name, holder, key  # type: ignore[return-value]


def _sample(tensor: Tensor) -> Tensor:
    """Up to SAMPLES_PER_TENSOR elements, evenly spread, as a view of the tensor's memory."""
    step = max(tensor.numel() // SAMPLES_PER_TENSOR, 1)
    count = min(tensor.numel(), SAMPLES_PER_TENSOR)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().as_strided((count,), (step,))
    # As integers: NaN equals itself then, and all dtypes fit one tensor.
    return flat.view(words[tensor.dtype.itemsize])
