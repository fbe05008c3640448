"""Jobs of `csrc/cuda/prepare.h`: which elements a launch reads, and where it writes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_uint
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.devices.cuda.structs import fields

INPUTS, AXES, THREADS, CHUNK = 4, 4, 128, 1024
PACK, TURN, SPLIT, TURNED = 255, 254, 253, 2304
SPLIT_PLANES = 3
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
WORD_BYTES = 16
COUNT_MAX = (1 << 31) - 1  # of a tensor's elements, with those between them


# The size of an axis, and the strides of the memory and of all inputs along it.
Axis = tuple[int, list[int]]


class Job(ctypes.Structure):
    """plantune::Job."""

    _fields_ = fields(
        f"out inputs_at:void_p[{INPUTS}] sizes:uint[{AXES}] out_strides:uint[{AXES}] "
        f"in_strides:strides[{INPUTS}] count:uint first_block:uint out_type:ubyte "
        f"in_types:ubyte[{INPUTS}] inputs:ubyte expression:ubyte width:ubyte axes:ubyte",
        strides=c_uint * AXES,
    )


@dataclass(frozen=True)
class Table:
    """Jobs of one launch, by value, and the blocks that they take together."""

    jobs: ctypes.Structure  # plantune::JobTable
    size: int
    blocks: int


def table_of(jobs: Sequence[Job], size: int) -> Table:
    """A table with room for `size` jobs, which get their blocks one after the other.

    Jobs of one block come first: such a block knows its job by its own number.
    """

    class JobTable(ctypes.Structure):
        _fields_ = fields(
            f"count:int singles:uint first_blocks:uint[{size}] jobs:job[{size}]", job=Job
        )

    singles = [job for job in jobs if _blocks(job) == 1]
    table, blocks = JobTable(count=len(jobs), singles=len(singles)), 0
    for place, job in enumerate((*singles, *(job for job in jobs if _blocks(job) != 1))):
        job.first_block = table.first_blocks[place] = blocks
        table.jobs[place] = job
        blocks += _blocks(job)
    return Table(table, size, blocks)


def job_of(memory: Tensor, inputs: Sequence[Tensor]) -> Job | None:
    """Fills memory from tensors that are broadcast to it; None if the kernel cannot."""
    if len(inputs) > INPUTS:
        return None
    wide = [tensor.expand(memory.shape) for tensor in inputs]
    axes = _merged(memory, wide)
    if len(axes) > AXES or any(extent_of(tensor) > COUNT_MAX for tensor in (memory, *wide)):
        return None
    job = Job(out=memory.data_ptr(), count=memory.numel(), inputs=len(inputs), axes=len(axes))
    job.out_type = TYPES[memory.dtype]
    for axis in range(AXES):
        job.sizes[axis] = 1
    for axis, (size, row) in enumerate(axes, AXES - len(axes)):
        job.sizes[axis], job.out_strides[axis] = size, row[0]
        for k, stride in enumerate(row[1:]):
            job.in_strides[k][axis] = stride
    for k, tensor in enumerate(inputs):
        job.inputs_at[k], job.in_types[k] = tensor.data_ptr(), TYPES[tensor.dtype]
    job.width = _width(job, memory)
    return job


def turning(memory: Tensor, source: Tensor) -> Job | None:
    """Fills memory from dense filters whose taps and channels change places; None for all else."""
    if memory.shape != source.shape or memory.dtype != source.dtype or memory.element_size() != 2:
        return None
    axes = _merged(memory, [source])
    if len(axes) != 3 or memory.numel() > COUNT_MAX:
        return None
    (filters, _), (taps, _), (channels, _) = axes
    most = TURNED // taps // 8 * 8
    wanted = [[taps * channels] * 2, [channels, 1], [1, taps]]
    aligned = not (memory.data_ptr() | source.data_ptr()) % WORD_BYTES
    if [row for _, row in axes] != wanted or channels % 8 or not most or not aligned:
        return None
    job = Job(out=memory.data_ptr(), count=memory.numel(), inputs=1, expression=TURN)
    job.inputs_at[0], job.sizes[:] = source.data_ptr(), (filters, most, channels, taps)
    return job


def splitting(planes: Tensor, source: Tensor) -> Job | None:
    """Fills planes of bfloat16, one after the other; None if the kernel cannot."""
    can = planes.dtype == torch.bfloat16 and len(planes) == SPLIT_PLANES
    job = job_of(planes[0], [source]) if can else None
    if job is not None:
        job.expression, job.width = SPLIT, 1
    return job


def packing(memory: Tensor, source: Tensor, index: Tensor) -> Job:
    """Fills memory with those elements of a source that `index` counts from 1; 0 stands for 0."""
    job = Job(out=memory.data_ptr(), count=index.numel(), expression=PACK, inputs=2)
    job.inputs_at[0], job.inputs_at[1] = source.data_ptr(), index.data_ptr()
    job.out_type, job.in_types[0] = TYPES[memory.dtype], TYPES[source.dtype]
    return job


def extent_of(tensor: Tensor) -> int:
    """The elements from its first to its last one in memory."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in steps) + 1


def _width(job: Job, memory: Tensor) -> int:
    """How many neighbours leave as one word."""
    width = WORD_BYTES // memory.element_size()
    begins = all(not job.out_strides[axis] % width for axis in range(AXES - 1))
    whole = not memory.data_ptr() % WORD_BYTES and not job.sizes[AXES - 1] % width
    return width if begins and whole and job.out_strides[AXES - 1] == 1 else 1


def _blocks(job: Job) -> int:
    filters, most, channels, _ = map(int, job.sizes)
    if job.expression == TURN:
        return filters * -(-channels // most)
    return -(-int(job.count) // CHUNK)


def _merged(memory: Tensor, inputs: Sequence[Tensor]) -> list[Axis]:
    """The axes from the outermost in, in the order of memory: size, and the strides of all tensors.

    Neighbours are one axis where all tensors allow it.
    """
    rows = [
        (size, [tensor.stride(axis) for tensor in (memory, *inputs)])
        for axis, size in enumerate(memory.shape)
        if size > 1
    ]
    merged: list[Axis] = []
    for size, row in sorted(rows, key=lambda each: -each[1][0]):
        joins = bool(merged) and merged[-1][1] == [stride * size for stride in row]
        merged.append((merged.pop()[0] * size if joins else size, row))
    return merged or [(1, [1] * (1 + len(inputs)))]
