"""How far a plan's results are from the reference's, beside how far the framework's are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.base.distance import Distance, Exact, part
from plantune.base.tolerances import tolerance
from plantune.graph.graph import Graph

Results = dict[str, Tensor]
GRADIENT = "the gradient of "
BUFFER = "the new value of "
# The gradient of a convolution's bias before a batch norm is zero: what the framework has there is
# rounding alone, of which another order of the sum has 2.9 times as much (float32, 16 images). What
# is wrong has hundreds of times as much in 16 bits, and millions in float32.
NOISE = 32.0


@dataclass(frozen=True)
class Pooled(Distance):
    """Errors over all draws, by the roots of their sums of squares: `squares` are the plan's, the
    framework's, and the size's. On one draw the framework's error of a single number may be zero.
    """

    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def bound(self) -> float:
        return NOISE * self.theirs + self.tolerance if self.theirs > 1 else super().bound

    @staticmethod
    def of(squares: tuple[float, float, float], tolerated: float) -> Pooled:
        ours, theirs, size = map(math.sqrt, squares)
        return Pooled(part(ours, size), part(theirs, size), tolerated, squares)


Distances = dict[str, Distance]


def distances(
    graph: Graph, ours: Results, theirs: Results, exact: Results
) -> Iterator[tuple[str, Distance]]:
    """Of each output by norm and by its worst element, of each buffer by norm. So of each gradient:
    they jump where the input of a ReLU is within a rounding of zero. Each is judged for itself.
    """
    known = {name: Exact(value) for name, value in exact.items()}
    coarsest = narrowest(graph)

    def tolerated(of: str, name: str) -> float:
        dtype = coarsest.get(name, ours[name].dtype)
        return tolerance(of, dtype, ours[name].numel())

    for name in names_of(graph):
        errors = zip(known[name].errors(ours[name]), known[name].errors(theirs[name]), strict=True)
        for what, (own, other) in zip((name, f"an element of {name}"), errors, strict=True):
            yield what, Distance(own, other, tolerated("network", name))
    for name in exact:
        if name.startswith(BUFFER):
            off = (known[name].off(ours[name])[0], known[name].off(theirs[name])[0])
            own, other, size = (norm**2 for norm in (*off, known[name].sizes[0]))
            yield name, Pooled.of((own, other, size), tolerated("network", name))
        if name.startswith(GRADIENT):
            off = (known[name].off(ours[name])[0], known[name].off(theirs[name])[0])
            own, other, size = (norm**2 for norm in (*off, _size(name, known)))
            yield name, Pooled.of((own, other, size), tolerated("gradient", name))


def joined(before: Mapping[str, Distance], now: Mapping[str, Distance]) -> Distances:
    """The distances of all draws so far: the worst of each, of buffers and gradients pooled."""
    return {what: _joined(before[what], d) if what in before else d for what, d in now.items()}


def _joined(one: Distance, other: Distance) -> Distance:
    if isinstance(one, Pooled) and isinstance(other, Pooled):
        ours, theirs, size = (a + b for a, b in zip(one.squares, other.squares, strict=True))
        return Pooled.of((ours, theirs, size), one.tolerance)
    return Distance(max(one.ours, other.ours), max(one.theirs, other.theirs), one.tolerance)


def widened(one: Distance, other: Distance) -> Distance:
    """With the framework's error of two runs, the larger one."""
    if isinstance(one, Pooled) and isinstance(other, Pooled):
        (ours, theirs, size), (_, again, _) = one.squares, other.squares
        return Pooled.of((ours, max(theirs, again), size), one.tolerance)
    return Distance(one.ours, max(one.theirs, other.theirs), one.tolerance)


def names_of(graph: Graph) -> list[str]:
    return [f"output {index}" for index in range(len(graph.outputs))]


def is_finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


def _size(name: str, exact: Mapping[str, Exact]) -> float:
    """The norm of a gradient. That of a scalar may be a sum that cancels: the largest of them says
    how large its terms are.
    """
    single = exact[name].value.numel() == 1
    alike = [n for n, e in exact.items() if n.startswith(GRADIENT) and e.value.numel() == 1]
    return max(exact[n].sizes[0] for n in (alike if single else [name]))


def narrowest(graph: Graph) -> dict[str, torch.dtype]:
    """By the names of results that are floats, the dtype of the coarsest value that they follow
    from: what was rounded to 16 bits on the way is as far off in float32 later.
    """
    found = {name: type_.torch_dtype for name, type_ in graph.sources if type_.is_float}
    for node in graph.nodes:
        given = [found[value] for value in node.inputs if value in found]
        for value in node.outputs:
            if graph.types[value].is_float:
                found[value] = max([graph.types[value].torch_dtype, *given], key=_rounding)
    results = [
        *zip(names_of(graph), graph.outputs, strict=True),
        *((f"{GRADIENT}{name}", value) for name, value in graph.gradients),
        *((f"{BUFFER}{name}", value) for name, value in graph.updates),
    ]
    return {name: found[value] for name, value in results if value in found}


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
