"""Tensors that stand for many, as those of a vmap do: taken apart for kernels, and put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_functorch: Any = torch._C._functorch
# The earlier kind, which torch.autograd.grad(is_grads_batched=True) has still.
_is_legacy: Any = getattr(_functorch, "is_legacy_batchedtensor", lambda x: False)

Tensors = Sequence[Tensor | None]


class Vmap:
    """The innermost one in which tensors are."""

    def __init__(self, level: int, *, legacy: bool) -> None:
        self._level, self._legacy = level, legacy

    @staticmethod
    def of(tensors: Tensors) -> Vmap | None:
        """None if none of them stands for many."""
        given = [x for x in tensors if x is not None]
        if any(map(_is_legacy, given)):
            torch._C._vmapmode_increment_nesting()
            return Vmap(torch._C._vmapmode_decrement_nesting(), legacy=True)
        found = filter(_functorch.is_batchedtensor, given)
        level = max(map(_functorch.maybe_get_level, found), default=None)
        return None if level is None else Vmap(level, legacy=False)

    def taken_apart(self, tensors: Tensors) -> list[tuple[Tensor | None, ...]]:
        """For each of the many, what all tensors are for it."""
        parts = [None if x is None else self._parts(x) for x in tensors]
        count = max(len(part) for part in parts if part is not None)
        wide = [part or (None,) for part in parts]
        return [tuple(part[at % len(part)] for part in wide) for at in range(count)]

    def _parts(self, x: Tensor) -> Sequence[Tensor]:
        """One alone if it is the same for all."""
        if self._legacy:
            plain = torch._remove_batch_dim(x, self._level, 0, 0) if _is_legacy(x) else x
            return plain.unbind() if plain is not x else (x,)
        plain, at = _functorch._unwrap_batched(x, self._level)
        return (x,) if at is None else plain.unbind(at)

    def together(self, tensors: Sequence[Tensor]) -> Tensor:
        """One that stands for these."""
        stacked = torch.stack([*tensors])
        if self._legacy:
            return torch._add_batch_dim(stacked, 0, self._level)
        made: Tensor = _functorch._add_batch_dim(stacked, 0, self._level)
        return made
