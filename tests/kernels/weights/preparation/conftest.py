"""The kernel of `csrc/cuda/prepare.h` in Python: it walks the same structs over the CPU's memory.

A read or a write outside of the tensors that it was told of is an error.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from plantune.kernels.weights.constants import Constant
from plantune.kernels.weights.jobs import (
    AXES,
    CHUNK,
    PACK,
    SPLIT,
    SPLIT_PLANES,
    THREADS,
    TURN,
    TURNED,
    WORD_BYTES,
    Job,
)
from plantune.kernels.weights.preparation import MANY_JOBS, JobKernels, Preparation
from plantune.space.arch import load_arch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
UNSIGNED = 1 << 32
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "relu_grad": lambda dy, y: torch.where(y <= 0, 0, dy),
    "sigmoid_grad": lambda dy, y: dy * (1 - y) * y,
    "rsqrt": lambda x, eps: torch.rsqrt(x + eps),
}


class Emulated(Preparation):
    """A preparation whose launches run on the CPU; `most` jobs are in one."""

    def __init__(
        self,
        constants: Iterable[Constant],
        sources: dict[str, Tensor],
        derived: dict[str, Any] | None = None,
        most: int = MANY_JOBS,
    ) -> None:
        super().__init__(constants, sources, derived or {}, load_arch("sm90"), torch.device("cpu"))
        self._kernels = EmulatedKernels(self, most)
        self.launched: list[int] = []

    @property
    def jobs(self) -> list[Job]:
        return [job for table in self._tables for job in table.jobs.jobs[: table.jobs.count]]

    @property
    def by_torch(self) -> int:
        """How many constants torch fills."""
        return len(self._others)

    def fill(self) -> None:
        """A pass, whose memory is spoiled before it."""
        self.place()
        for constant in self._constants:
            if constant.name in self._derived or not constant.is_in_place():
                constant.memory.fill_(torch.nan)
        self.launch(0)


class EmulatedKernels(JobKernels):
    has_kernel = True

    def __init__(self, preparation: Emulated, most: int) -> None:
        super().__init__(preparation._expressions, load_arch("sm90"), torch.device("cpu"))
        self.preparation, self.most = preparation, most

    def _most_jobs(self) -> int:
        return self.most

    def _kernel(self, size: int) -> Any:
        return EmulatedKernel(self.preparation, size)


class EmulatedKernel:
    def __init__(self, preparation: Emulated, jobs: int) -> None:
        self.preparation, self.size = preparation, jobs

    def launch(
        self, stream: int, grid: tuple[int, int, int], threads: int, arguments: Sequence[Any]
    ) -> None:
        (table,) = arguments
        made, told = self.preparation, self.preparation._sources.values()
        assert threads == THREADS
        assert grid[1:] == (1, 1)
        assert len(table.jobs) == self.size
        made.launched.append(table.count)
        memory = Memory([*told, *made._kept, *(constant.tensor for constant in made._constants)])
        for block in range(grid[0]):
            Block(table, block, memory, made._expressions).run()


class Memory:
    """Those tensors by their addresses, and nothing else."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.ranges = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]

    def at(self, address: int, count: int, dtype: torch.dtype) -> Tensor:
        """`count` elements from an address on."""
        end = address + count * dtype.itemsize
        assert any(start <= address and end <= stop for start, stop in self.ranges)
        raw = (ctypes.c_char * (end - address)).from_address(address)
        return torch.frombuffer(raw, dtype=dtype)


class Block:
    """A block of the grid, by the names of the kernel."""

    def __init__(self, table: Any, block: int, memory: Memory, expressions: Sequence[Any]) -> None:
        self.table, self.block = table, block
        self.memory, self.expressions = memory, expressions

    def run(self) -> None:
        jobs = self.table.jobs[: self.table.count]
        assert jobs
        # The last job that begins at this block or before it.
        starts = self.table.first_blocks[: self.table.count]
        number = sum(start <= self.block for start in starts) - 1
        if self.block < self.table.singles:
            assert number == self.block
        job, block = jobs[number], self.block - jobs[number].first_block
        assert job.first_block == starts[number]
        if job.expression == TURN:
            self.turn(job, block)
            return
        begin = block * CHUNK
        end = job.count if job.count - begin < CHUNK else begin + CHUNK
        assert 0 <= begin < end
        other = {PACK: self.pack, SPLIT: self.split}
        other.get(job.expression, self.fill)(job, begin, end)

    def pack(self, job: Job, begin: int, end: int) -> None:
        index = self.memory.at(job.inputs_at[1], end, torch.int32)[begin:end].long()
        assert not index.lt(0).any()
        source = self.memory.at(job.inputs_at[0], max(int(index.max()), 1), dtype_of(job, 0))
        found = torch.where(index > 0, source[(index - 1).clamp(min=0)].float(), 0)
        self.memory.at(job.out, end, DTYPES[job.out_type])[begin:end] = found

    def turn(self, job: Job, block: int) -> None:
        filters, most, channels, taps = job.sizes
        tiles = -(-channels // most)
        first = block % tiles * most
        count = min(channels - first, most)
        assert block // tiles < filters
        assert count % 8 == most % 8 == channels % 8 == 0
        assert count * taps <= TURNED
        filter_ = block // tiles * channels * taps
        for address in (job.inputs_at[0] + 2 * (filter_ + first * taps), job.out + 2 * filter_):
            assert address % WORD_BYTES == 0
        read = self.memory.at(job.inputs_at[0], job.count, torch.int16)[filter_:]
        tile = read[first * taps : (first + count) * taps].view(count, taps)
        made = self.memory.at(job.out, job.count, torch.int16)[filter_:]
        made[: channels * taps].view(taps, channels)[:, first : first + count] = tile.t()

    def elements(self, job: Job, begin: int, end: int) -> tuple[Tensor, list[Tensor]]:
        """Where these go, and the inputs there."""
        at: list[Tensor] = []
        rest = torch.arange(begin, end)
        outermost = AXES - job.axes
        for axis in reversed(range(outermost, AXES)):
            at.insert(0, rest % job.sizes[axis] if axis > outermost else rest)
            rest = rest // job.sizes[axis]

        def places(strides: Sequence[int]) -> Tensor:
            steps = zip(at, strides[outermost:], strict=True)
            found = torch.stack([place * stride for place, stride in steps]).sum(0)
            assert not (found >= UNSIGNED).any()
            return found

        inputs = []
        for k in range(job.inputs):
            read = places(job.in_strides[k])
            whole = self.memory.at(job.inputs_at[k], int(read.max()) + 1, dtype_of(job, k))
            inputs.append(whole[read].float())
        return places(job.out_strides), inputs

    def split(self, job: Job, begin: int, end: int) -> None:
        to, (rest,) = self.elements(job, begin, end)
        planes = self.memory.at(job.out, SPLIT_PLANES * job.count, torch.bfloat16)
        finite = rest.isfinite()
        for number, plane in enumerate(planes.view(SPLIT_PLANES, job.count)):
            cut = (rest.view(torch.int32) & ~0xFFFF).view(torch.float32)
            made = (rest if number else cut).bfloat16()
            is_last = number == SPLIT_PLANES - 1
            plane[to] = made if is_last else made.where(finite, 0.0)
            rest = rest - plane[to].float()

    def fill(self, job: Job, begin: int, end: int) -> None:
        assert job.width in (1, 4, 8)
        assert begin % job.width == end % job.width == 0
        to, inputs = self.elements(job, begin, end)
        dtype = DTYPES[job.out_type]
        if job.width > 1:
            # One word for `width` neighbours, where the first of them goes.
            words = to.view(-1, job.width)
            assert torch.equal(words, words[:, :1] + torch.arange(job.width))
            assert job.width * dtype.itemsize == WORD_BYTES
            assert not ((job.out + words[:, 0] * dtype.itemsize) % WORD_BYTES).any()
        made = evaluate(self.expressions, job.expression, inputs)
        self.memory.at(job.out, int(to.max()) + 1, dtype)[to] = made.to(dtype)


def dtype_of(job: Job, which: int) -> torch.dtype:
    return DTYPES[job.in_types[which]]


def evaluate(expressions: Sequence[Any], which: int, inputs: list[Tensor]) -> Tensor:
    """Runs the C++ of an expression, whose lines are Python but for their types and suffixes."""
    if not 0 < which <= len(expressions):
        return inputs[0]
    lines, result = expressions[which - 1]
    known: dict[str, Any] = {"in_": inputs, **FUNCTIONS}
    for line in lines:
        text = line.removeprefix("const float ").removesuffix(";").replace("plantune::", "")
        text = re.sub(r"\bin\[", "in_[", re.sub(r"(?<=[\d.])f\b", "", text))
        exec(text, known)
    text = re.sub(r"\bin\[", "in_[", result)
    return eval(text, known)


@pytest.fixture
def emulated() -> type[Emulated]:
    return Emulated
