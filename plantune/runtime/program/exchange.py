"""Who takes the gradients of a captured backward pass one by one, while the pass goes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from plantune.base.scopes import with_values


class Exchange(Protocol):
    """Such as one with other processes."""

    def place_for(self, parameter: Tensor) -> Tensor | None:
        """Where a pass is to write the gradient of a parameter, of its shape and strides; None if
        it is autograd's, as any other.
        """
        ...

    def arrived(self, found: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Such places, by what is enqueued on the current stream now: written, or with the tensor
        that is to be copied there.
        """
        ...


class _Current:
    """Of all threads: a backward pass is not in that of its forward pass."""

    exchange: Exchange | None = None


def exchanging(exchange: Exchange | None) -> AbstractContextManager[None]:
    """Inside, backward passes in a capture, or in its rehearsal, hand their gradients to it."""
    return with_values(_Current, exchange=exchange)


def current_exchange() -> Exchange | None:
    return _Current.exchange
