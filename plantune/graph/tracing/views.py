"""Views of a tensor: how each is made of its base, and what of the base a write to it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plantune.graph.spelling import Value
from plantune.graph.tracing.purity import Overload

ATEN = torch.ops.aten
Emit = Callable[[Overload, Sequence[Any]], Value]
# What makes the base with a new part, of the base, the part, and what the view was made with.
PARTS: Mapping[str, Overload] = {
    "aten.slice.Tensor": ATEN.slice_scatter.default,
    "aten.select.int": ATEN.select_scatter.default,
}
# All of the base in another shape. A `reshape` is a view or a copy, as strides have it.
SHAPES = frozenset(f"aten.{name}" for name in ("view.default", "unsqueeze.default", "squeeze.dim"))
# Their own inverses.
SWAPS = frozenset(("aten.transpose.int", "aten.t.default"))


@dataclass(frozen=True)
class View:
    """How a view was made: of which memory, by which overload, with which further arguments."""

    base: Any
    overload: Overload
    rest: tuple[Any, ...]
    base_shape: tuple[int, ...]

    def again(self, base: Value, emit: Emit) -> Value:
        """The view of what the base is now."""
        return emit(self.overload, (base, *self.rest))

    def written(self, base: Value, part: Value, emit: Emit) -> Value:
        """The base with `part` where the view is."""
        name = str(self.overload)
        if name in SHAPES:
            return emit(ATEN.reshape.default, (part, self.base_shape))
        if name in SWAPS:
            return emit(self.overload, (part, *self.rest))
        return emit(PARTS[name], (base, part, *self.rest))


def view_of(base: Any, overload: Overload, args: Sequence[Any], kwargs: Any) -> View | None:
    """How a call of an overload makes a view of its first argument, which is at `base`; None if
    that is not known.
    """
    known = str(overload) in {*PARTS, *SHAPES, *SWAPS} and not kwargs
    if not known or any(isinstance(value, Tensor) for value in args[1:]):
        return None
    return View(base, overload, tuple(args[1:]), tuple(args[0].shape))
