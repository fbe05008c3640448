"""What a pass computes from weights before its first kernel: one launch for all tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_int, c_ubyte, c_uint, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.cuda import driver
from plantune.cuda.build import compile_cuda
from plantune.cuda.kernel import Kernel
from plantune.kernels.constants import Constant
from plantune.kernels.patterns.derived import Derived
from plantune.space.arch import Arch

INPUTS, AXES, THREADS, CHUNK = 4, 4, 128, 1024
PACK, TURN, TURNED = 255, 254, 2304
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
WORD_BYTES = 16
# The size of an axis, and the strides of the memory and of all inputs along it.
Axis = tuple[int, list[int]]
# Jobs of a launch: what 4 KiB of arguments hold, and what 32 KiB do where the driver takes so much.
FEW_JOBS, SOME_JOBS, MANY_JOBS = 24, 64, 200
MANY_FROM_DRIVER, MANY_FROM_CHIP = (12, 1), (7, 0)
SOURCE = """#include "cuda/prepare.h"
struct Expressions {{
  static __device__ __forceinline__ float evaluate(int which, const float (&in)[4]) {{
    switch (which) {{{cases}
      default: return in[0];
    }}
  }}
}};
using Kernel = plantune::Preparation<Expressions, {jobs}>;
extern "C" __global__ void __launch_bounds__(plantune::kPrepareThreads)
    run(const __grid_constant__ Kernel::Table table) {{
  Kernel::run(table);
}}
"""
CASE = """
      case {which}: {{
        {lines}
        return {result};
      }}"""


class Job(ctypes.Structure):
    """plantune::Job."""

    _fields_ = (
        ("out", c_void_p),
        ("inputs_at", c_void_p * INPUTS),
        ("sizes", c_uint * AXES),
        ("out_strides", c_uint * AXES),
        ("in_strides", (c_uint * AXES) * INPUTS),
        ("count", c_uint),
        ("out_type", c_ubyte),
        ("in_types", c_ubyte * INPUTS),
        ("inputs", c_ubyte),
        ("expression", c_ubyte),
        ("width", c_ubyte),
    )


@dataclass(frozen=True)
class Launch:
    """One table of jobs by value, and the blocks that they take together."""

    table: ctypes.Structure
    blocks: int


class Preparation:
    """Fills constants from where the weights lie now, in stream order.

    `place` comes before the first launch, and whenever a tensor lies elsewhere; it may not be
    captured. Constants that are read in place cost nothing. What the kernel cannot do, torch does.
    """

    def __init__(
        self,
        constants: Iterable[Constant],
        sources: Mapping[str, Tensor],
        derived: Mapping[str, Derived],
        arch: Arch,
        device: torch.device,
    ) -> None:
        self._constants = tuple(constants)
        self._sources, self._derived = sources, derived
        self._arch, self._device = arch, device
        self._kernels: dict[int, Kernel] = {}
        self._expressions = tuple(dict.fromkeys(each.expression for each in derived.values()))
        self._launches: list[Launch] = []
        self._others: list[Callable[[], None]] = []
        self._kept: list[Tensor] = []
        self._moved_bytes = 0

    def place(self) -> None:
        """Looks where all tensors lie."""
        jobs: list[Job] = []
        self._others, self._kept, self._launches, self._moved_bytes = [], [], [], 0
        for constant in self._constants:
            if constant.is_in_place():
                continue
            self._moved_bytes += constant.memory.nbytes
            job = self._job(constant) if self._device.type == "cuda" else None
            if job is None:
                self._others.append(constant.fill)
            else:
                jobs.append(job)
        if not jobs:
            return
        most = self._most_jobs()
        groups = [jobs[i : i + most] for i in range(0, len(jobs), most)]
        self._launches = [_table(group) for group in groups]

    @property
    def moved_bytes(self) -> int:
        """What a pass writes."""
        return self._moved_bytes

    @property
    def launches(self) -> int:
        """Launches of a pass."""
        return len(self._launches) + len(self._others)

    def launch(self, stream: int, *, orders: bool = False) -> None:
        """Enqueues it. With `orders` there is a launch in any case: kernels behind it may read
        weights before they wait for what is in front of them.
        """
        for call in self._others:
            call()
        launches = self._launches
        if orders and not launches:
            launches = [_table([])]
        for launch in launches:
            kernel = self._kernel(len(launch.table.jobs))
            kernel.launch(stream, (max(launch.blocks, 1), 1, 1), THREADS, (launch.table,))

    def _kernel(self, jobs: int) -> Kernel:
        if jobs not in self._kernels:
            with torch.cuda.device(self._device):
                self._kernels[jobs] = Kernel(
                    compile_cuda(source(self._expressions, jobs), self._arch)
                )
        return self._kernels[jobs]

    def _most_jobs(self) -> int:
        assert self._arch.cuda is not None
        new = driver.driver_version() >= MANY_FROM_DRIVER
        return (
            MANY_JOBS if new and self._arch.cuda.compute_capability >= MANY_FROM_CHIP else FEW_JOBS
        )

    def _job(self, constant: Constant) -> Job | None:
        """The job of a constant, None where the kernel cannot do it."""
        if constant.by_torch or constant.memory.dtype not in TYPES:
            return None
        derived = self._derived.get(constant.name)
        if derived is not None:
            return self._derived_job(constant, derived)
        source = self._sources[constant.name]
        if source.dtype not in TYPES:
            return None
        if constant.packs:
            return self._packing(constant, source)
        return job_of(constant.memory, [constant.order(source)])

    def _derived_job(self, constant: Constant, derived: Derived) -> Job | None:
        inputs = []
        for wide, name in derived.spread(self._sources):
            ordered = constant.order(wide)
            if wide.dtype not in TYPES or _storage(ordered) != _storage(self._sources[name]):
                return None
            inputs.append(ordered)
        job = job_of(constant.memory, inputs)
        if job is not None:
            job.expression = self._expressions.index(derived.expression) + 1
        return job

    def _packing(self, constant: Constant, source: Tensor) -> Job | None:
        """Each element by its number in the source's memory."""
        steps = zip(source.shape, source.stride(), strict=True)
        extent = sum((size - 1) * stride for size, stride in steps) + 1
        if extent >= 1 << 31 or not constant.memory.is_contiguous():
            return None
        numbers = torch.arange(1, extent + 1, dtype=torch.int32, device=self._device)
        index = constant.order(numbers.as_strided(source.shape, source.stride())).contiguous()
        self._kept.append(index)
        job = Job(out=constant.memory.data_ptr(), count=index.numel(), expression=PACK, inputs=2)
        job.inputs_at[0], job.inputs_at[1] = source.data_ptr(), index.data_ptr()
        job.out_type, job.in_types[0] = TYPES[constant.memory.dtype], TYPES[source.dtype]
        return job


def source(expressions: Sequence[tuple[tuple[str, ...], str]], jobs: int) -> str:
    """The CUDA source with these expressions: lines, and the name of the result."""
    cases = (
        CASE.format(which=which, lines="\n        ".join(lines), result=result)
        for which, (lines, result) in enumerate(expressions, 1)
    )
    return SOURCE.format(cases="".join(cases), jobs=jobs)


def job_of(memory: Tensor, inputs: Sequence[Tensor]) -> Job | None:
    """Fills memory from tensors that are broadcast to it; None where that takes too many axes."""
    if len(inputs) > INPUTS or memory.numel() >= 1 << 31:
        return None
    wide = [tensor.expand(memory.shape) for tensor in inputs]
    axes = _merged(memory, wide)
    if len(axes) > AXES or any(stride >= 1 << 31 for _, row in axes for stride in row):
        return None
    if len(inputs) == 1 and (turn := _turn(memory, wide[0], axes)) is not None:
        return turn
    job = Job(out=memory.data_ptr(), count=memory.numel(), inputs=len(inputs), width=1)
    job.out_type = TYPES[memory.dtype]
    for place in range(AXES):
        job.sizes[place] = 1
    for place, (size, row) in enumerate(reversed(axes)):
        axis = AXES - 1 - place
        job.sizes[axis], job.out_strides[axis] = size, row[0]
        for k, stride in enumerate(row[1:]):
            job.in_strides[k][axis] = stride
    for k, tensor in enumerate(inputs):
        job.inputs_at[k], job.in_types[k] = tensor.data_ptr(), TYPES[tensor.dtype]
    width = WORD_BYTES // memory.element_size()
    ends = all(not job.out_strides[axis] % width for axis in range(AXES - 1))
    aligned = not memory.data_ptr() % WORD_BYTES and not job.sizes[AXES - 1] % width
    if ends and aligned and job.out_strides[AXES - 1] == 1:
        job.width = width
    return job


def _turn(memory: Tensor, source: Tensor, axes: Sequence[Axis]) -> Job | None:
    """The job of dense filters whose taps and channels change places; None for anything else."""
    if len(axes) != 3 or memory.dtype != source.dtype or memory.element_size() != 2:
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


def _merged(memory: Tensor, inputs: Sequence[Tensor]) -> list[Axis]:
    """The axes from the outermost in as they lie in memory: size, and the strides of all tensors.

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


def _table(jobs: Sequence[Job]) -> Launch:
    most = next(size for size in (FEW_JOBS, SOME_JOBS, MANY_JOBS) if len(jobs) <= size)

    class Table(ctypes.Structure):
        """plantune::JobTable."""

        _fields_ = (("count", c_int), ("first_blocks", c_uint * most), ("jobs", Job * most))

    table, blocks = Table(count=len(jobs)), 0
    for place, job in enumerate(jobs):
        table.jobs[place], table.first_blocks[place] = job, blocks
        blocks += _blocks(job)
    return Launch(table, blocks)


def _blocks(job: Job) -> int:
    filters, most, channels, _ = map(int, job.sizes)
    if job.expression == TURN:
        return filters * -(-channels // most)
    return -(-int(job.count) // CHUNK)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
