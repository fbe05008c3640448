"""Copies many tensors at once: on a GPU by one launch, whatever their strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plantune.kernels.weights import jobs
from plantune.kernels.weights.preparation import JobKernels
from plantune.space.arch import Arch

# The target, and what is written there: a tensor, or the sum of two.
Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
SUM = ((), "in[0] + in[1]")
# The kept value where the flag is not 0.
CHOICE = ((), "in[2] != 0.f ? in[0] : in[1]")


class Copies:
    """Writes tensors into others of the same shapes, converted to their dtypes."""

    def __init__(self, arch: Arch, device: torch.device) -> None:
        self._kernels = JobKernels((SUM,), arch, device)

    def launch(self, stream: int, pairs: Sequence[Pair], sums: Sequence[Triple] = ()) -> None:
        """Enqueues it; a target may be one of the two that it is the sum of. Before a capture it
        must have run once.
        """
        found: list[jobs.Job] = []
        for target, *sources in (*pairs, *sums):
            job = _job(target, *sources) if self._kernels.has_kernel else None
            if job is not None:
                found.append(job)
            else:
                target.copy_(sources[0] if len(sources) == 1 else sources[0] + sources[1])
        self._kernels.launch(stream, self._kernels.tables(found))


def _job(target: Tensor, *sources: Tensor) -> jobs.Job | None:
    dtypes = {target.dtype, *(source.dtype for source in sources)}
    if not target.numel() or dtypes - jobs.TYPES.keys():
        return None
    job = jobs.job_of(target, sources)
    if job is not None and len(sources) > 1:
        job.expression = 1
    return job


class Snapshots:
    """Keeps what tensors hold, and puts it back where a flag on the device says so."""

    def __init__(self, arch: Arch, device: torch.device) -> None:
        self._kernels = JobKernels((CHOICE,), arch, device)

    def load(self, tensors: Sequence[Tensor], flag: Tensor) -> None:
        """Before a capture: what is loaded in its middle would break it."""
        for found, _ in (self._copies(tensors, tensors), self._choices(tensors, tensors, flag)):
            self._kernels.tables(found)

    def take(self, stream: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        kept = [torch.empty_like(tensor) for tensor in tensors]
        found, others = self._copies(kept, tensors)
        self._kernels.launch(stream, self._kernels.tables(found))
        for own, tensor in others:
            own.copy_(tensor)
        return kept

    def put_back(
        self, stream: int, tensors: Sequence[Tensor], kept: Sequence[Tensor], flag: Tensor
    ) -> None:
        """Nothing changes where the flag, of one element, is 0."""
        found, others = self._choices(tensors, kept, flag)
        self._kernels.launch(stream, self._kernels.tables(found))
        for tensor, own in others:
            tensor.copy_(torch.where(flag.view(()) != 0, own, tensor))

    def _copies(
        self, kept: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> tuple[list[jobs.Job], list[Pair]]:
        """Jobs of the kernel, and what torch must copy."""
        pairs = [*zip(kept, tensors, strict=True)]
        made = [_job(*pair) if self._kernels.has_kernel else None for pair in pairs]
        return _parted(pairs, made)

    def _choices(
        self, tensors: Sequence[Tensor], kept: Sequence[Tensor], flag: Tensor
    ) -> tuple[list[jobs.Job], list[Pair]]:
        pairs = [*zip(tensors, kept, strict=True)]
        made: list[jobs.Job | None] = []
        for tensor, own in pairs:
            can = self._kernels.has_kernel and tensor.numel() and tensor.dtype in jobs.TYPES
            job = jobs.job_of(tensor, [own, tensor, flag.view(())]) if can else None
            if job is not None:
                job.expression = 1
            made.append(job)
        return _parted(pairs, made)


def _parted(
    pairs: Sequence[Pair], made: Sequence[jobs.Job | None]
) -> tuple[list[jobs.Job], list[Pair]]:
    """The jobs that there are, and the pairs without one."""
    others = [pair for pair, job in zip(pairs, made, strict=True) if job is None]
    return [job for job in made if job is not None], others
