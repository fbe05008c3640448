"""A candidate bound to guarded memory, so that whatever it should not do is seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from plantune.devices.device import Device, Runnable, first_line
from plantune.devices.gpus import device_for
from plantune.errors import CaptureError, CudaError, WrongResult
from plantune.graph.layouts import MEMORY_FORMATS, strictly_in_layout
from plantune.kernels.family import Values
from plantune.kernels.resolved import ResolvedStep
from plantune.measure.scenes import same_numbers
from plantune.measure.step_alone import StepAlone
from plantune.measure.threads import threads
from plantune.space.arch import Arch

# As wide as some rows of a large tile: a kernel that ignores where an image ends writes there.
GUARD_BYTES = 1 << 15
# As a float 0xA5.. is a small number and 0xFF.. is NaN. The first shows most writes beyond a
# buffer, the second most reads.
NUMBERS, NANS = 0xA5, 0xFF
WORD_BYTES = 8


class Buffer:
    """Bytes between two guard bands; `offset` puts them off the alignment."""

    def __init__(self, size_bytes: int, place: torch.device, offset: int = 0) -> None:
        self.start = GUARD_BYTES + offset
        self.end = self.start + size_bytes
        self.memory = torch.empty(self.end + GUARD_BYTES, dtype=torch.uint8, device=place)
        self.content = self.memory[self.start : self.end]
        self._kept = self.content

    def keep(self) -> None:
        """Remembers the content, to see later whether it is still the same."""
        self._kept = self.content.clone()

    @property
    def is_as_kept(self) -> bool:
        return torch.equal(self._in_words(self.content), self._in_words(self._kept))

    def _in_words(self, content: Tensor) -> Tensor:
        """The bytes in the widest integers: they compare eight times as fast."""
        for dtype in (torch.int64, torch.int32, torch.int16):
            if not self.start % dtype.itemsize and not content.numel() % dtype.itemsize:
                return content.view(dtype)
        return content

    @property
    def address(self) -> int:
        return _address(self.memory)

    def surround(self, pattern: int) -> None:
        self.memory[: self.start] = pattern
        self.memory[self.end :] = pattern

    def extremes(self) -> Iterator[Tensor]:
        """The least and the largest value of each part of the guard bands."""
        for band in (self.memory[: self.start], self.memory[self.end :]):
            for part in _words_and_rest(band):
                yield from torch.aminmax(part)


def not_surrounded(buffers: Mapping[str, Buffer], pattern: int) -> str | None:
    """The name of the first buffer that has anything but the pattern around it.

    All are looked at before the device is waited for: processes that share a GPU take turns on it,
    so each wait may cost a turn of every other one.
    """
    found = [(name, value) for name, buffer in buffers.items() for value in buffer.extremes()]
    changed = set()
    for dtype in {value.dtype for _, value in found}:
        names, values = zip(*(each for each in found if each[1].dtype == dtype), strict=True)
        for name, value in zip(names, torch.stack(values).tolist(), strict=True):
            if value != _repeated(pattern, dtype):
                changed.add(name)
    return next((name for name in buffers if name in changed), None)


def _words_and_rest(band: Tensor) -> Iterator[Tensor]:
    """The bytes in integers of eight, and those before and after. Their least and largest value
    take 3 us; each byte compared took 120, a third of all checks (one core of a Zen 3, 2026-11-22).
    """
    first = -band.storage_offset() % WORD_BYTES
    last = first + (band.numel() - first) // WORD_BYTES * WORD_BYTES
    yield band[first:last].view(torch.int64)
    yield from (rest for rest in (band[:first], band[last:]) if rest.numel())


def _repeated(pattern: int, dtype: torch.dtype) -> int:
    """The value of an element all of whose bytes are the pattern."""
    return int.from_bytes(bytes([pattern]) * dtype.itemsize, "little", signed=dtype.is_signed)


class Trial(StepAlone):
    """Runs a candidate as a program would: bound before any input is there, inputs that may be
    other tensors in each run. Outputs and workspace are aligned, as a program's are.

    The kernel runs by as many threads as there are when it is bound. After `capture`, what was
    captured is replayed instead, on the same tensors. With a `device` of a later arch the kernel is
    built such that this one runs it.
    """

    def __init__(self, chosen: ResolvedStep, arch: Arch, device: Device | None = None) -> None:
        self._threads = torch.get_num_threads()
        self._inputs: dict[str, Buffer] = {}
        self._written: dict[str, Buffer] = {}  # outputs and workspace
        self._kept: list[Tensor] = []
        self._replays = False
        self._doing = "binding"
        place, portable = device or device_for(arch), device is not None
        super().__init__(chosen, arch, place, portable=portable)
        self._refresh: Runnable | None = self._binding.refresh
        self._launch: Runnable = self._run

    def _take(self, name: str, size_bytes: int) -> tuple[Tensor, int]:
        buffer = self._written[name] = Buffer(size_bytes, self.device.place)
        return buffer.memory, buffer.start

    def put_constants(self, data: Values, *, awkward: bool = False) -> None:
        """Places the constant inputs, and refreshes what the kernel made of them.

        On a GPU a filter may have any strides: it is in channels_last unless it is `awkward`.
        """
        for name in self.step.constants:
            free = "nhwc" if self.device.captures != awkward else "nchw"
            self._put_guarded(name, data[name], awkward, free)
        if not self._replays:
            self._preparation.place()
        if self._refresh is not None:
            with threads(self._threads):
                self._refresh()

    def put_data(self, data: Values, *, awkward: bool = False) -> None:
        """Places all other inputs.

        If it is `awkward`, they are not aligned, as a user's may, and images channels-last
        unless the family demands a layout.
        """
        for name, _ in self.step.inputs:
            if name not in self.step.constants:
                self._put_guarded(name, data[name], awkward, "nhwc" if awkward else "nchw")

    def _put_guarded(self, name: str, data: Tensor, awkward: bool, free: str) -> None:
        if self._replays:
            self.values[name].copy_(data)
        else:
            offset = data.dtype.itemsize if awkward else 0
            buffer = Buffer(self.step.types[name].size_bytes, self.device.place, offset)
            self._put(name, data, free, buffer.memory, buffer.start)
            self._inputs[name] = buffer
        self._inputs[name].keep()

    def capture(self) -> None:
        """Captures refresh and launch, as they are deployed where the device has graphs.

        A kernel that does not go to the stream that it is given is in no graph.
        """
        self._doing = "capture"
        self._prepare(NUMBERS, fresh_workspace=True)
        try:
            if self._refresh is not None:
                self._refresh = self.device.captured(self._refresh)
            self._launch = self.device.captured(self._launch)
        except CaptureError as error:
            raise self.wrong(str(error)) from error
        self._replays = True
        # A graph lives long: what it uses must not be memory that a kernel let go.
        self.device.give_back_memory()

    def run(self, what: str, pattern: int, *, fresh_workspace: bool = True) -> Values:
        """The outputs of one launch; `pattern` surrounds all buffers. Outputs hold NaN before, or
        zeros where NaN surrounds them: a kernel that takes the larger of the two shows with these.

        Raises WrongResult if the kernel touched what is not its own, CudaError where the GPU
        refused to go on.
        """
        self._doing = what
        self._prepare(pattern, fresh_workspace)
        try:
            with threads(self._threads), same_numbers(self.step, self.device.place):
                self._launch()
                self.device.synchronize()
        except torch.AcceleratorError as error:
            raise CudaError(f"{what}: {first_line(error)}") from error
        outside = not_surrounded(self._buffers(), pattern)
        if outside is not None:
            raise self.wrong(f"it wrote outside of {outside!r}")
        for name, buffer in self._inputs.items():
            if not buffer.is_as_kept:
                raise self.wrong(f"it wrote to its input {name!r}")
        if not self._replays:
            self._check_outputs()
            self._kept += [self.values[name] for name in self._adopts]
        return {name: self.values[name].clone() for name, _ in self.step.outputs}

    def theirs(self) -> Iterator[Values]:
        """What PyTorch's kernels make of the inputs as they lie in memory, with what they make in
        either layout.
        """
        for layout in MEMORY_FORMATS:
            known = {name: self.values[name] for name, _ in self.step.inputs}
            with same_numbers(self.step, self.device.place):
                for node in self.step.nodes:
                    made = node.evaluate([known[name] for name in node.inputs])
                    laid_out = (
                        strictly_in_layout(value, layout) if value.dim() == 4 else value
                        for value in made
                    )
                    known.update(zip(node.outputs, laid_out, strict=True))
            yield known

    def _prepare(self, pattern: int, fresh_workspace: bool) -> None:
        for buffer in self._buffers().values():
            buffer.surround(pattern)
        for name, buffer in self._written.items():
            if name != self._workspace:
                buffer.content.fill_(NANS if pattern == NUMBERS else 0)
            elif fresh_workspace:
                buffer.content.fill_(NANS)
        for name in (*self._adopts, *self._aliases):
            if not self._replays:
                self.values.pop(name, None)
            elif name in self._adopts:
                value = self.values[name]
                value.fill_(torch.nan if value.is_floating_point() else NANS)

    def _buffers(self) -> dict[str, Buffer]:
        return self._inputs | self._written

    def _check_outputs(self) -> None:
        """What the kernel made itself is where it said: views in their source, the rest in new
        memory, all in the layout that other steps rely on.
        """
        taken = {_address(tensor) for tensor in self._kept}
        taken.update(buffer.address for buffer in self._buffers().values())
        for name, type_ in self.step.outputs:
            if name not in self.values:
                raise self.wrong(f"output {name!r} was not made")
            value, layout = self.values[name], self._layouts.get(name, "nchw")
            if tuple(value.shape) != type_.shape or value.dtype != type_.torch_dtype:
                raise self.wrong(f"output {name!r} has {value.shape}, {value.dtype}, not {type_}")
            if not value.is_contiguous(memory_format=MEMORY_FORMATS[layout]):
                raise self.wrong(f"output {name!r} is not {layout}: strides {value.stride()}")
            if name in self._aliases:
                if _address(value) != _address(self.values[self._aliases[name]]):
                    raise self.wrong(f"output {name!r} is not a view of {self._aliases[name]!r}")
            elif name in self._adopts:
                if value.numel() and _address(value) in taken:
                    raise self.wrong(f"output {name!r} is not in new memory of its own")
                taken.add(_address(value))
            elif _address(value) != self._written[name].address:
                raise self.wrong(f"output {name!r} was replaced instead of written")

    def wrong(self, what: str, error: float = float("inf"), bound: float = 0.0) -> WrongResult:
        """The error to raise: which kernel, for which step, in which run, what."""
        kernel = f"{self.chosen.candidate.family} {dict(self.chosen.config)}"
        place = f"step {self.step.name!r} ({', '.join(self.step.ops)})"
        return WrongResult(f"{kernel} at {place}, {self._doing}: {what}", error, bound)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
