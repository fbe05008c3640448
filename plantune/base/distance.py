"""How far a result is from the reference, as a part of the reference's size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# By norm, and by the worst element as a part of the largest.
KINDS = (2, math.inf)


@dataclass(frozen=True)
class Distance:
    """Errors as parts of the result's size: ours, the framework's, and what is allowed beside
    twice the latter.
    """

    ours: float
    theirs: float
    tolerance: float

    @property
    def bound(self) -> float:
        return 2 * self.theirs + self.tolerance

    @property
    def share(self) -> float:
        """1 at the bound; above it the result is wrong. What overflows in PyTorch may here too."""
        return 0.0 if math.isinf(self.bound) else part(self.ours, self.bound)


def part(off: float, size: float) -> float:
    """Any error relative to zero is infinite."""
    return off / size if size else math.inf if off else 0.0


@dataclass(frozen=True)
class Exact:
    """A value of the reference, with what comparing needs of it each time."""

    value: Tensor

    @cached_property
    def sizes(self) -> tuple[float, ...]:
        """Its norm of each kind; what is not finite has no size."""
        size = _wide(self.value).flatten().nan_to_num(0, 0, 0)
        return tuple(_norm(size, kind) for kind in KINDS)

    @cached_property
    def not_finite(self) -> Tensor | None:
        """Where the value is NaN or infinite, None if it is finite everywhere."""
        mask = ~self.value.isfinite()
        return mask if mask.any() else None

    def errors(self, result: Tensor) -> tuple[float, ...]:
        """The norms of the difference as parts of the value's."""
        return tuple(map(part, self.off(result), self.sizes))

    def off(self, result: Tensor) -> tuple[float, ...]:
        """The norms of the difference; infinite if values are not numbers or shapes differ."""
        if result.shape != self.value.shape:
            return (math.inf,) * len(KINDS)
        difference = self._difference(result)
        return tuple(_norm(difference, kind) for kind in KINDS)

    def worst(self, result: Tensor) -> str:
        """The element that is furthest off, and what it is instead of what."""
        off = self._difference(result).abs().nan_to_num(math.inf)
        index = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
        got, wanted = result[index].item(), self.value[index].item()
        return f"{list(index)} is {got:.6g} instead of {wanted:.6g}"

    def _difference(self, result: Tensor) -> Tensor:
        """In double; zero where both are not finite."""
        # Promoted on the way: a copy in double took as long as the rest of the comparison.
        own = _wide(result) if result.dtype == torch.bool else result
        off = own - _wide(self.value)
        if self.not_finite is not None:
            off[self.not_finite & ~result.isfinite()] = 0
        return off


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.double()


def _norm(x: Tensor, kind: float) -> float:
    norm = float(torch.linalg.vector_norm(x, kind)) if x.numel() else 0.0
    return math.inf if math.isnan(norm) else norm
