"""Which inputs of a captured step are read by nothing but kernels of a plan.

Their addresses in the graph can change from replay to replay, so that no input is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.base.scopes import with_values
from plantune.devices.cuda.patches import Executable, Patch
from plantune.runtime.program.flat import are_alike

# Kernels were chosen for addresses like that of the program's own memory.
ALIGNMENT_BYTES = 16
Find = Callable[[Executable], Sequence[Patch]]


@dataclass(frozen=True)
class Claim:
    """A pass whose kernels read `tensor` in place; `find` gives what tells them of another one."""

    tensor: Tensor
    find: Find


class _Current(threading.local):
    claims: list[Claim] | None = None


_current = _Current()


def claimed(claims: list[Claim]) -> AbstractContextManager[None]:
    """Inside, passes that this thread captures say which tensors they read in place."""
    return with_values(_current, claims=claims)


def claim(tensor: Tensor, find: Find) -> None:
    if _current.claims is not None:
        _current.claims.append(Claim(tensor, find))


class MovingInput:
    """An input that the kernels of a graph read where they are told, stored as `like` is."""

    def __init__(self, like: Tensor, patches: Sequence[Patch]) -> None:
        self._like, self._patches = like.to("meta"), patches
        self._place: int | None = None
        self._copy: Tensor | None = None

    def take(self, tensor: Tensor) -> None:
        """The next launch reads this tensor, in place or copied."""
        like, self._copy = self._like, None
        if tensor.data_ptr() % ALIGNMENT_BYTES or tensor.is_neg() or not are_alike(like, tensor):
            self._copy = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=tensor.device
            )
            tensor = self._copy.copy_(tensor)
        place = tensor.data_ptr()
        if place != self._place:
            self._place = None  # unknown if a patch fails
            for patch in self._patches:
                patch.move(place)
            self._place = place


def moving_input(
    own: Tensor, claims: Sequence[Claim], executable: Executable | None
) -> MovingInput | None:
    """None if something else may read the tensor, or its address cannot be changed."""
    of_it = [each for each in claims if each.tensor.data_ptr() == own.data_ptr()]
    if executable is None or len(of_it) != 1 or not own.numel() or own.requires_grad:
        return None
    (only,) = of_it
    whole = only.tensor.shape == own.shape and are_alike(own, only.tensor)
    patches = only.find(executable) if whole else ()
    return MovingInput(own, patches) if patches else None
