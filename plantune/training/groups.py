"""What torch.distributed says of a process group, and what must happen before one is destroyed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

Group = dist.ProcessGroup
# What is called before a group is shut down, as long as it is there.
_before: weakref.WeakKeyDictionary[Group, list[weakref.WeakMethod[Any]]] = (
    weakref.WeakKeyDictionary()
)


def new_store(group: Group) -> Store:
    """A part of the group's store for another training step.

    The steps of each rank are counted in the store itself, so that their messages are apart: all
    ranks make equal ones, and torchrun's store outlives a group that is destroyed.
    """
    store = _get_process_group_store(group)
    number = store.add(f"plantune/made/{group.rank()}", 1)
    return PrefixStore(f"plantune/{number}", store)


def mean(tensor: Tensor, group: Group) -> None:
    """Enqueues the mean over all ranks, in place. Sums do not overflow where the mean does not."""
    if dist.get_backend(group) == "nccl":
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        return
    tensor.mul_(1 / group.size())
    dist.all_reduce(tensor, group=group)


def from_first(tensors: list[Tensor], group: Group) -> None:
    """Writes what rank 0 has into the tensors of all, whatever their strides."""
    for tensor in tensors:
        flat = tensor.detach().contiguous()
        dist.broadcast(flat, group=group, group_src=0)
        with torch.no_grad():
            tensor.copy_(flat)


def before_shutdown(group: Group, call: Callable[[], None]) -> None:
    """Has a bound method called before torch shuts the group down, if its object is there then.

    A communicator that is destroyed while a graph holds one of its collectives waits for ever
    (NCCL, two H200s, 2026-11-22), and a script that ends with destroy_process_group() knows nothing
    of graphs.
    """
    _watch_shutdowns()
    _before.setdefault(group, []).append(weakref.WeakMethod(call))


def _watch_shutdowns() -> None:
    shutdown = getattr(Group, "shutdown", None)
    if shutdown is None or getattr(shutdown, "is_plantunes", False):
        return

    def shut_down(self: Group) -> None:
        for kept in _before.pop(self, ()):
            call = kept()
            if call is not None:
                call()
        shutdown(self)

    shut_down.is_plantunes = True  # type: ignore[attr-defined]
    Group.shutdown = shut_down  # type: ignore[method-assign]
