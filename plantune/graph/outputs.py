"""What a module returns: tensors of its layer graph in tuples, lists, dicts and the like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

TENSOR = object()


@dataclass(frozen=True)
class Outputs:
    """Leaves that are TENSOR stand for the outputs of the graph, in order; others are constants."""

    structure: TreeSpec
    leaves: tuple[Any, ...]

    def __post_init__(self) -> None:
        # Asked in every call.
        object.__setattr__(self, "is_tensor", self.structure.is_leaf())

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """What the module returns where these are the outputs of its graph."""
        if self.is_tensor:  # type: ignore[attr-defined]
            return tensors[0]
        left = iter(tensors)
        leaves = [next(left) if leaf is TENSOR else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)
