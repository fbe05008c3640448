"""Copies many tensors at once: on a GPU by one launch, whatever their strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plantune.kernels import jobs
from plantune.kernels.preparation import JobKernels
from plantune.space.arch import Arch

# The target, and what is written there.
Pair = tuple[Tensor, Tensor]
SUM = ((), "in[0] + in[1]")


class Copies:
    """Writes tensors into others of the same shapes, converted to their dtypes."""

    def __init__(self, arch: Arch, device: torch.device) -> None:
        self._kernels = JobKernels((SUM,), arch, device)

    def launch(self, stream: int, pairs: Sequence[Pair], *, adds: bool = False) -> None:
        """Enqueues it: `=`, or `+=` with `adds`. Before a capture it must have run once."""
        found: list[jobs.Job] = []
        for target, source in pairs:
            job = _job(target, source, adds) if self._kernels.has_kernel else None
            if job is not None:
                found.append(job)
            elif adds:
                target.add_(source)
            else:
                target.copy_(source)
        self._kernels.launch(stream, self._kernels.tables(found))


def _job(target: Tensor, source: Tensor, adds: bool) -> jobs.Job | None:
    if not target.numel() or {target.dtype, source.dtype} - jobs.TYPES.keys():
        return None
    job = jobs.job_of(target, [source, target] if adds else [source])
    if job is not None and adds:
        job.expression = 1
    return job
