"""Leaves of autograd's graph in the place of parameters, for as long as one pass takes.

Autograd keeps one node for each parameter, on the stream on which it was first needed, for as long
as any graph holds it. A capture on another stream would wait for that one, which it must not: a
loss of the default stream that a user keeps is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from plantune.base.scopes import with_values


class _Current(threading.local):
    leaves: Mapping[int, Tensor] = {}


_current = _Current()


def standing_in(leaves: Mapping[int, Tensor]) -> AbstractContextManager[None]:
    """Inside, passes of plans give their gradients to these; the keys are ids of parameters."""
    return with_values(_current, leaves=leaves)


def leaves_of(parameters: Iterable[Tensor]) -> Iterable[Tensor]:
    """What stands for each of these now."""
    leaves = _current.leaves
    return [leaves.get(id(p), p) for p in parameters] if leaves else parameters


def own_leaf(parameter: Tensor) -> Tensor:
    """The parameter's memory as a leaf of its own."""
    return parameter.detach().requires_grad_()
