"""How far a plan's results are from the reference's, beside how far the framework's are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.graph.graph import Graph
from plantune.tolerances import tolerance

Results = dict[str, Tensor]
GRADIENT = "the gradient of "


@dataclass(frozen=True)
class Distance:
    """Errors as parts of the result's size, the worst of all draws: the plan's, the framework's,
    and what is added to the bound.
    """

    ours: float
    theirs: float
    constant: float

    @property
    def bound(self) -> float:
        return 2 * self.theirs + self.constant

    def joined(self, other: Distance) -> Distance:
        ours, theirs = max(self.ours, other.ours), max(self.theirs, other.theirs)
        return Distance(ours, theirs, self.constant)


@dataclass(frozen=True)
class Pooled(Distance):
    """Errors over all draws, by the roots of their sums of squares: `squares` are the plan's, the
    framework's, and the size's. On one draw the framework's error of a single number may be zero.
    """

    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @staticmethod
    def of(squares: tuple[float, float, float], constant: float) -> Pooled:
        ours, theirs, size = map(math.sqrt, squares)
        return Pooled(_part(ours, size), _part(theirs, size), constant, squares)

    def joined(self, other: Distance) -> Distance:
        assert isinstance(other, Pooled)
        ours, theirs, size = (a + b for a, b in zip(self.squares, other.squares, strict=True))
        return Pooled.of((ours, theirs, size), self.constant)


Distances = dict[str, Distance]


def distances(
    graph: Graph, ours: Results, theirs: Results, exact: Results
) -> Iterator[tuple[str, Distance]]:
    """Of each output by norm and by its worst element, of each gradient by norm: gradients jump
    where the input of a ReLU is within a rounding of zero. Each is judged for itself.
    """
    for name in names_of(graph):
        size = exact[name].double()
        for what, kind in ((name, 2), (f"an element of {name}", math.inf)):
            own, other = (
                _part(_norm_of_error(name, results, exact, kind), _norm(size, kind))
                for results in (ours, theirs)
            )
            yield what, Distance(own, other, _tolerance("network", ours[name]))
    for name in exact:
        if name.startswith(GRADIENT):
            own, other = (
                _norm_of_error(name, results, exact, 2) ** 2 for results in (ours, theirs)
            )
            yield (
                name,
                Pooled.of(
                    (own, other, _size(name, exact) ** 2), _tolerance("gradient", ours[name])
                ),
            )


def joined(before: Mapping[str, Distance], now: Mapping[str, Distance]) -> Distances:
    return {what: d.joined(before[what]) if what in before else d for what, d in now.items()}


def names_of(graph: Graph) -> list[str]:
    return [f"output {index}" for index in range(len(graph.outputs))]


def is_finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


def _norm_of_error(name: str, results: Results, exact: Results, kind: float) -> float:
    """The norm of the difference; infinite if anything is not finite."""
    result, wanted = results[name], exact[name].double()
    if not is_finite(result) or result.shape != wanted.shape:
        return math.inf
    return _norm(result.double() - wanted, kind)


def _norm(value: Tensor, kind: float) -> float:
    return float(torch.linalg.vector_norm(value, kind)) if value.numel() else 0.0


def _part(off: float, size: float) -> float:
    return off / size if size else math.inf if off else 0.0


def _size(name: str, exact: Results) -> float:
    """The norm of a gradient. That of a scalar may be a sum that cancels: the largest of them says
    how large its terms are.
    """
    single = exact[name].numel() == 1
    alike = [n for n, v in exact.items() if n.startswith(GRADIENT) and v.numel() == 1]
    return max(_norm(exact[n].double(), 2) for n in (alike if single else [name]))


def _tolerance(of: str, result: Tensor) -> float:
    return tolerance(of, result.dtype, result.numel())
