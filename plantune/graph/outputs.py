"""What a module returns: tensors of its layer graph in tuples, lists, dicts and the like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plantune.graph.nested import mapped

# A tensor, as what holds it may look at what it is given.
TENSOR = torch.empty(0, device="meta")


@dataclass(frozen=True)
class Outputs:
    """`made` is what the module returned in the trace. `calls` are equal where the strides of its
    tensors are, and None if these are always in rows.
    """

    made: Any
    calls: str | None = field(default=None, compare=False)

    @staticmethod
    def like(made: Any, calls: str | None = None) -> Outputs:
        """Without the tensors in it: TENSOR stands for the outputs of the graph, in order."""
        bare = mapped(lambda leaf: TENSOR if isinstance(leaf, Tensor) else leaf, made)
        return Outputs(bare, calls)

    @property
    def is_tensor(self) -> bool:
        """Whether the module returns one tensor alone."""
        return self.made is TENSOR

    def of(self, tensors: Sequence[Tensor]) -> Any:
        """What the module returns where these are the outputs of its graph."""
        if self.made is TENSOR:
            return tensors[0]
        left = iter(tensors)
        return mapped(lambda leaf: next(left) if leaf is TENSOR else leaf, self.made)
