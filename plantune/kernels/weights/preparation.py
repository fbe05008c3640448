"""What a pass computes from weights before its first kernel: one launch for all tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from plantune.devices.cuda import driver
from plantune.devices.cuda.build import compile_cuda
from plantune.devices.cuda.kernel import Kernel
from plantune.kernels.patterns.derived import Derived
from plantune.kernels.weights import jobs
from plantune.kernels.weights.constants import Constant, PlanesConstant, is_view
from plantune.space.arch import Arch

# Jobs of a launch: what 4 KiB of arguments hold, and what 32 KiB do where the driver takes so much.
FEW_JOBS, SOME_JOBS, MANY_JOBS = 24, 64, 192
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


class JobKernels:
    """Launches jobs on one device, with the expressions that they may name by their numbers."""

    def __init__(
        self,
        expressions: Sequence[tuple[tuple[str, ...], str]],
        arch: Arch,
        device: torch.device,
    ) -> None:
        self._expressions, self._arch, self._device = expressions, arch, device
        self._kernels: dict[int, Kernel] = {}

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel does the jobs that it can do."""
        return self._device.type == "cuda"

    def tables(self, found: Sequence[jobs.Job]) -> list[jobs.Table]:
        """The jobs by launch, each with its kernel loaded."""
        most = self._most_jobs() if len(found) > FEW_JOBS else FEW_JOBS
        groups = [found[i : i + most] for i in range(0, len(found), most)]
        tables = [jobs.table_of(group, _room(len(group))) for group in groups]
        for table in tables:
            self._kernel(table.size)  # loaded here: a module that is loaded breaks a capture
        return tables

    def launch(self, stream: int, tables: Iterable[jobs.Table]) -> None:
        for table in tables:
            kernel = self._kernel(table.size)
            kernel.launch(stream, (max(table.blocks, 1), 1, 1), jobs.THREADS, (table.jobs,))

    def _kernel(self, size: int) -> Kernel:
        if size not in self._kernels:
            with torch.cuda.device(self._device):
                binary = compile_cuda(source(self._expressions, size), self._arch)
                self._kernels[size] = Kernel(binary)
        return self._kernels[size]

    def _most_jobs(self) -> int:
        new = driver.driver_version() >= MANY_FROM_DRIVER
        return (
            MANY_JOBS if new and self._arch.gpu.compute_capability >= MANY_FROM_CHIP else FEW_JOBS
        )


class Preparation:
    """Fills constants from where the weights are now, in stream order.

    `place` comes before the first launch, and whenever a tensor was moved; it may not be
    captured. Constants that are read in place cost nothing. What the kernel cannot do, torch does
    after it.
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
        self._device = device
        self._expressions = tuple(dict.fromkeys(each.expression for each in derived.values()))
        self._kernels = JobKernels(self._expressions, arch, device)
        self._tables: list[jobs.Table] = []
        self._others: list[Callable[[], None]] = []
        self._kept: list[Tensor] = []
        self._moved_bytes = 0
        self._fence = torch.empty(1, device=device)

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel does the jobs that it can do."""
        return self._kernels.has_kernel

    def place(self) -> None:
        """Reads the addresses of all tensors."""
        found: list[jobs.Job] = []
        self._others, self._kept, self._moved_bytes = [], [], 0
        for constant in self._constants:
            if constant.is_in_place():
                continue
            if not constant.memory.numel():
                continue
            self._moved_bytes += constant.memory.nbytes
            job = self._job(constant) if self.has_kernel else None
            if job is None:
                self._others.append(self._by_torch(constant))
            else:
                found.append(job)
        self._tables = self._kernels.tables(found)

    @property
    def moved_bytes(self) -> int:
        """What a pass writes."""
        return self._moved_bytes

    @property
    def launches(self) -> int:
        """Launches of a pass."""
        return len(self._tables) + len(self._others)

    def launch(self, stream: int, *, orders: bool = False) -> None:
        """Enqueues it. With `orders` there is work in any case: kernels after it may read weights
        before they wait for what is in front of them.
        """
        if orders and not self.launches:
            # Not by a kernel of ours: one that is not loaded yet would break a capture.
            self._fence.zero_()
        self._kernels.launch(stream, self._tables)
        for call in self._others:
            call()

    def _by_torch(self, constant: Constant) -> Callable[[], None]:
        derived = self._derived.get(constant.name)
        if derived is None or constant.by_torch:
            return constant.fill
        return partial(_fill_derived, constant, derived, self._sources)

    def _job(self, constant: Constant) -> jobs.Job | None:
        """The job of a constant, None if the kernel cannot do it."""
        if constant.by_torch or constant.memory.dtype not in jobs.TYPES:
            return None
        derived = self._derived.get(constant.name)
        if isinstance(constant, PlanesConstant):
            return self._splitting(constant) if derived is None else None
        if derived is not None:
            return self._derived_job(constant, derived)
        source = self._sources[constant.name]
        if source.dtype not in jobs.TYPES:
            return None
        if constant.packs:
            return self._packing(constant, source)
        return self._ordering(constant, source)

    def _ordering(self, constant: Constant, source: Tensor) -> jobs.Job | None:
        ordered = constant.order(source)
        if not is_view(ordered, source):
            return None
        return jobs.turning(constant.memory, ordered) or jobs.job_of(constant.memory, [ordered])

    def _splitting(self, constant: PlanesConstant) -> jobs.Job | None:
        source = self._sources[constant.name]
        ordered = constant.order(source)
        known = source.dtype in jobs.TYPES and is_view(ordered, source)
        return jobs.splitting(constant.memory, ordered) if known else None

    def _derived_job(self, constant: Constant, derived: Derived) -> jobs.Job | None:
        expression = self._expressions.index(derived.expression) + 1
        inputs = []
        for wide, name in derived.spread(self._sources):
            ordered = constant.order(wide)
            if wide.dtype not in jobs.TYPES or not is_view(ordered, self._sources[name]):
                return None
            inputs.append(ordered)
        job = jobs.job_of(constant.memory, inputs) if expression < jobs.SPLIT else None
        if job is not None:
            job.expression = expression
        return job

    def _packing(self, constant: Constant, source: Tensor) -> jobs.Job | None:
        """Each element by its number in the source's memory."""
        extent = jobs.extent_of(source)
        if not 0 < extent <= jobs.COUNT_MAX or not constant.memory.is_contiguous():
            return None
        numbers = torch.arange(1, extent + 1, dtype=torch.int32, device=self._device)
        numbers = numbers.as_strided(source.shape, source.stride())
        index = constant.order(numbers).expand(constant.memory.shape).contiguous()
        self._kept.append(index)
        return jobs.packing(constant.memory, source, index)


def source(expressions: Sequence[tuple[tuple[str, ...], str]], size: int) -> str:
    """The CUDA source with these expressions: lines, and the name of the result."""
    cases = (
        CASE.format(which=which, lines="\n        ".join(lines), result=result)
        for which, (lines, result) in enumerate(expressions, 1)
    )
    return SOURCE.format(cases="".join(cases), jobs=size)


def _room(count: int) -> int:
    """The size of the table that holds so many."""
    return next(size for size in (FEW_JOBS, SOME_JOBS, MANY_JOBS) if count <= size)


def _fill_derived(constant: Constant, derived: Derived, sources: Mapping[str, Tensor]) -> None:
    constant.put(constant.order(derived.evaluate(sources)))
