"""The mean of gradients over the processes of a group, in buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from plantune.errors import CaptureError, RanksDiffer
from plantune.runtime.captured.rehearsal import is_rehearsing
from plantune.runtime.program.exchange import exchanging
from plantune.runtime.program.flat import FlatLayout
from plantune.runtime.program.streams import Side
from plantune.runtime.watched.torch_internals import is_capturing
from plantune.training.groups import mean
from plantune.training.ranks import Ranks
from plantune.training.update import FlatGradients

# A step of 2.0 ms on two H200s with gradients of 20 MB takes 1.041 of one GPU's with such buckets,
# 1.055 with those of 4 MB and 1.066 with one at its end (2026-11-23): kernels that fill a GPU wait
# for a collective beside them nearly as long as it takes.
BUCKET_BYTES = 18 << 20


@dataclass(frozen=True)
class Bucket:
    """Gradients side by side: elements of the buffer of a dtype, and the numbers of parameters."""

    dtype: torch.dtype
    start: int
    stop: int
    members: frozenset[int]


def buckets_of(layout: FlatLayout, least_bytes: int | None = None) -> tuple[Bucket, ...]:
    """Buckets of at least so many bytes, but for the last of each dtype. The last parameters come
    first, as a backward pass begins with them.
    """
    least_bytes = BUCKET_BYTES if least_bytes is None else least_bytes
    found: list[Bucket] = []
    open_: dict[torch.dtype, list[int]] = {}
    ends = dict(layout.sizes)
    slots = [*layout.slots.values()]
    for at in reversed(range(len(slots))):
        dtype, start = slots[at].dtype, slots[at].start
        members = open_.setdefault(dtype, [])
        members.append(at)
        if (ends[dtype] - start) * dtype.itemsize >= least_bytes:
            found.append(Bucket(dtype, start, ends[dtype], frozenset(members)))
            ends[dtype], open_[dtype] = start, []
    rests = ((dtype, members) for dtype, members in open_.items() if members)
    return (*found, *(Bucket(dtype, 0, ends[dtype], frozenset(m)) for dtype, m in rests))


class Reducer:
    """Replaces the gradients of one training step by their mean over all ranks.

    Every rank reduces the same buckets in the same order, whether it captures, replays or runs op
    by op. `wire` is a narrower dtype for the way between the ranks. On a GPU buckets are reduced on
    a stream of their own; in a captured pass each as soon as its gradients are there (Exchange).
    """

    def __init__(
        self,
        ranks: Ranks,
        gradients: FlatGradients,
        device: torch.device,
        wire: torch.dtype | None = None,
        *,
        overlaps: bool = True,
    ) -> None:
        self._ranks, self._gradients, self._device = ranks, gradients, device
        self.buckets = buckets_of(gradients.layout)
        self._wires = {b: _wire_of(b, wire, device) for b in self.buckets}
        self._side = Side(device, "collectives") if device.type == "cuda" else None
        self._patterns: dict[tuple[bool, ...], list[bool]] = {}
        # A gradient that autograd adds to another one must not be reduced before.
        self.overlaps = overlaps
        self._numbers = {p.data_ptr(): at for at, p in enumerate(gradients.parameters)}
        self._begin()

    def _begin(self) -> None:
        self._next = 0  # of the buckets
        self._claimed: dict[int, int] = {}
        self._here: dict[int, Tensor | None] = {}

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside is a step's forward and backward pass, of whole batches."""
        self._begin()
        with exchanging(self if self.overlaps and self._side is not None else None):
            yield

    def place_for(self, parameter: Tensor) -> Tensor | None:
        at = self._numbers.get(parameter.data_ptr())
        if at is None or not parameter.numel() or self._gradients.parameters[at]._backward_hooks:
            return None
        if at in self._claimed.values():
            self.overlaps = False  # of two passes autograd takes the sum
            return None
        place = self._gradients.views[at]
        self._claimed[place.data_ptr()] = at
        return place

    def arrived(self, found: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        for place, source in found:
            self._here[self._claimed[place.data_ptr()]] = source
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if not bucket.members <= self._here.keys():
                return
            self._enqueue(bucket)

    def take(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Those of a micro-batch, as autograd has them."""
        for place, at in self._claimed.items():
            gradient = gradients[at]
            if gradient is None or gradient.data_ptr() != place:
                self.overlaps = False
        if self._claimed and not self.overlaps and not is_rehearsing():
            raise CaptureError("a gradient that was reduced is a part of another one")
        self._gradients.take(number, gradients)

    def reduce(self) -> None:
        """Enqueues what is not reduced by now: all gradients are there."""
        self._gradients.present = self._agreed()
        if not self._only_prepares():
            self._ranks.past()
        while self._next < len(self.buckets):
            self._enqueue(self.buckets[self._next])
        if self._side is not None:
            self._side.join()

    def _only_prepares(self) -> bool:
        """Whether nothing is sent now: ranks meet once more after a capture."""
        return is_rehearsing() or (self._side is not None and is_capturing())

    def _enqueue(self, bucket: Bucket) -> None:
        """After what is on the current stream by now."""
        self._next += 1
        if self._side is None:
            self._mean_of(bucket)
            return
        self._side.fork()
        with self._side.inside():
            views, here = self._gradients.views, self._here
            sources = [(views[at], here.pop(at, None)) for at in sorted(bucket.members)]
            self._gradients.write(
                [(view, source) for view, source in sources if source is not None]
            )
            self._mean_of(bucket)

    def _mean_of(self, bucket: Bucket) -> None:
        if is_rehearsing():
            return
        flat = self._gradients.buffers[bucket.dtype][bucket.start : bucket.stop]
        wire = self._wires[bucket]
        if wire is None:
            mean(flat, self._ranks.group)
            return
        torch.mul(flat, 1 / self._ranks.size, out=wire)
        dist.all_reduce(wire, group=self._ranks.group)
        flat.copy_(wire)

    def _agreed(self) -> list[bool]:
        """Which parameters have a gradient on any rank: of these the optimizer takes a step."""
        present = self._gradients.present
        if self._device.type != "cuda":
            flags = torch.tensor(present, dtype=torch.uint8)
            self._ranks.past()
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._ranks.group)
            return [*map(bool, flags.tolist())]
        key = tuple(present)
        if key not in self._patterns:
            self._patterns[key] = self._present_anywhere(present)
        return self._patterns[key]

    def _present_anywhere(self, present: Sequence[bool]) -> list[bool]:
        said = self._ranks.gather("".join("01"[there] for there in present))
        if None in said:
            raise RanksDiffer(
                "a loss depends on other parameters than in calls before, on this rank alone: on a "
                "GPU that must change on all ranks in the same call"
            )
        return [any(text[at] == "1" for text in said if text) for at in range(len(present))]


def _wire_of(bucket: Bucket, wire: torch.dtype | None, device: torch.device) -> Tensor | None:
    if wire is None or wire.itemsize >= bucket.dtype.itemsize:
        return None
    return torch.empty(bucket.stop - bucket.start, dtype=wire, device=device)


def described(gradients: FlatGradients) -> Iterator[str]:
    """Where each gradient is in its buffer, which must be the same on all ranks."""
    for at, slot in enumerate(gradients.layout.slots.values()):
        yield f"parameter {at}: {slot.dtype}, shape {tuple(slot.shape)}, strides {slot.stride}"
