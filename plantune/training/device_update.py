"""On a GPU: unscale, clip and the optimizer's step as kernels that can be captured."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plantune.devices.cuda.build import Binary, compile_cuda
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.launcher import Launcher
from plantune.runtime.program.flat import FlatLayout, is_dense
from plantune.runtime.program.program import current_stream
from plantune.runtime.watched.live_state import Watched
from plantune.space.arch import Arch
from plantune.training.rules import GROUP_NUMBERS, Rule, on_gpu, row_of, rule_of
from plantune.training.update import FlatGradients, Rules, Update

THREADS, CHUNK = 256, 2048
PARTIALS_MAX = 1024
STATE_MAX = 3
SHARED_BYTES = 48  # of plantune::Shared
# By torch's dtypes.
ELEMENTS = {getattr(torch, name): cxx for name, cxx in vector_kernel.ELEMENTS.items()}
SOURCE = """#include "cuda/optimizer.h"
using Measure = plantune::Measure<{element}>;
using Advance = plantune::Advance<plantune::Rule::{rule}>;
using Update = plantune::Update<{element}, plantune::Rule::{rule}>;
using Trust = plantune::Trust<{element}>;
static_assert(sizeof(plantune::Chunk) == {chunk_bytes}, "as device_update.Chunk");
static_assert(sizeof(plantune::Shared) == {shared_bytes}, "as device_update.SHARED_BYTES");
#define STEP_KERNEL extern "C" __global__ void __launch_bounds__(plantune::kStepThreads)
STEP_KERNEL measure(Measure::Arguments arguments) {{ Measure::run(arguments); }}
STEP_KERNEL advance(Advance::Arguments arguments) {{ Advance::run(arguments); }}
STEP_KERNEL run(Update::Arguments arguments) {{ Update::run(arguments); }}
"""
TRUST = "STEP_KERNEL trust(Trust::Arguments arguments) { Trust::run(arguments); }\n"


class Chunk(ctypes.Structure):
    """plantune::Chunk."""

    _fields_ = (
        ("parameter", ctypes.c_void_p),
        ("start", ctypes.c_ulonglong),
        *((name, ctypes.c_uint) for name in ("item", "first", "count", "chunks")),
    )


def source_of(rule: Rule, element: str) -> str:
    sizes = {"chunk_bytes": ctypes.sizeof(Chunk), "shared_bytes": SHARED_BYTES}
    source = SOURCE.format(element=element, rule=rule.name, **sizes)
    return source + TRUST if rule.name == "kLamb" else source


def build_update(rule: Rule, element: str, arch: Arch) -> Binary:
    return compile_cuda(source_of(rule, element), arch)


def can_update(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether a kernel of ours takes the step of this optimizer for these parameters."""
    known = all(
        p.dtype in ELEMENTS and is_dense(p) and p.numel() < 1 << 32 and p.is_cuda
        for p in parameters
    )
    return known and any(p.numel() for p in parameters) and rule_of(optimizer) is not None


def chunks_of(parameters: Sequence[Tensor], layout: FlatLayout, dtype: torch.dtype) -> list[Chunk]:
    """Of all parameters of a dtype, in order."""
    found = []
    for item, (tensor, slot) in enumerate(zip(parameters, layout.slots.values(), strict=True)):
        if slot.dtype != dtype:
            continue
        chunks = -(-slot.numel // CHUNK)
        for first in range(0, slot.numel, CHUNK):
            place = tensor.data_ptr() + first * tensor.element_size()
            count = min(CHUNK, slot.numel - first)
            found.append(Chunk(place, slot.start + first, item, first, count, chunks))
    return found


@dataclass(frozen=True)
class _Handed:
    """The optimizer's state, all of which were views of ours when somebody last looked."""

    state: object
    names: list[tuple[str, ...]]
    present: list[bool]
    watched: Watched

    def is_all(self, state: object, names: list[tuple[str, ...]], present: list[bool]) -> bool:
        """Whether they are now. To ask each parameter took 107 us of 161 (EPYC, 2026-11-23)."""
        same = state is self.state and names == self.names and present == self.present
        return same and not self.watched.changed()


class DeviceUpdate(Update):
    """`follow` brings the device up to date with what a user may have changed on the host, and
    `run` enqueues the step. The optimizer's state are views of memory that is kept here.

    Gradients are read on their own only if something clips or scales; else their norm is what the
    update saw.
    """

    inside = reads_in_place = True

    def __init__(
        self, optimizer: Optimizer, gradients: FlatGradients, rules: Rules, arch: Arch
    ) -> None:
        rule = rule_of(optimizer)
        assert rule is not None
        self._rule = rule
        self._optimizer, self._gradients, self._rules = optimizer, gradients, rules
        self._device = device = gradients.parameters[0].device
        group_of = {id(p): at for at, g in enumerate(optimizer.param_groups) for p in g["params"]}
        self._groups = [group_of[id(parameter)] for parameter in gradients.parameters]
        self._group_table = torch.tensor(self._groups, dtype=torch.int32).to(device)
        count = len(gradients.parameters)
        self._steps = torch.zeros(count, device=device)
        self._step_views = self._steps.unbind()
        self._shared = torch.zeros(count * SHARED_BYTES, dtype=torch.uint8, device=device)
        # Of gradients that are side by side.
        self._places = torch.zeros(count, dtype=torch.int64, device=device)
        self._is_present: list[bool] = [False] * count
        self._numbers = torch.zeros(
            (len(optimizer.param_groups), GROUP_NUMBERS), dtype=torch.float64, device=device
        )
        self._rows: list[tuple[float, ...]] = []
        self._settings = torch.zeros(4, dtype=torch.float64, device=device)
        self._set: tuple[float, ...] = ()
        self._status = torch.tensor([0.0, 1.0, 0.0, 0.0], device=device)
        self.found_inf = self._status[2:3]
        self._kept = [
            gradients.layout.buffers(device) for _ in range(rule.places(optimizer.param_groups))
        ]
        self._views = [[*gradients.layout.views(kept).values()] for kept in self._kept]
        self._handed: _Handed | None = None
        self._measures = rules.scale is not None or rules.max_norm is not None
        self._make_launchers(arch)

    def gradient_norm(self) -> Tensor:
        if self._measures:
            return self._status[0].clone()
        return self._partials[:, 0].double().sum().sqrt().float()

    def _make_launchers(self, arch: Arch) -> None:
        layout, parameters = self._gradients.layout, self._gradients.parameters
        every = {dtype: chunks_of(parameters, layout, dtype) for dtype in layout.sizes}
        lists = {dtype: found for dtype, found in every.items() if found}
        self._chunks = {dtype: _on_device(found, self._device) for dtype, found in lists.items()}
        self._launchers: dict[torch.dtype, dict[str, Launcher]] = {}
        self._counts = {dtype: len(found) for dtype, found in lists.items()}
        blocks = {dtype: min(count, PARTIALS_MAX) for dtype, count in self._counts.items()}
        summed = [*(blocks if self._measures else self._counts).values()]
        # What is summed up: of each block that measures, else of each chunk.
        self._partials = torch.zeros((sum(summed), 2), device=self._device)
        self._parts = dict(zip(lists, self._partials.split(summed), strict=True))
        self._norms = torch.zeros((max(self._counts.values()), 2), device=self._device)
        for dtype, count in self._counts.items():
            binary = build_update(self._rule, ELEMENTS[dtype], arch)
            sizes = {"measure": blocks[dtype], "advance": 1, "run": count}
            if self._rule.name == "kLamb":
                sizes["trust"] = count
            self._launchers[dtype] = {
                name: Launcher(binary, size, THREADS, name=name) for name, size in sizes.items()
            }

    def has_room(self) -> bool:
        return self._rule.places(self._optimizer.param_groups) <= len(self._kept)

    def follow(self) -> None:
        """Numbers of the groups, the optimizer's state, and which gradients there are."""
        groups = self._optimizer.param_groups
        rows = [row_of(self._rule, group) for group in groups]
        if rows != self._rows:
            self._numbers.copy_(torch.tensor(rows, dtype=torch.float64), non_blocking=True)
            self._rows = rows
        for at, group in enumerate(groups):
            for place, number in on_gpu(self._rule, group).items():
                self._numbers[at, place].copy_(number)
        if self._gradients.present != self._is_present:
            self._is_present = [*self._gradients.present]
            _write(self._places, self._gradients.addresses())
        self._follow_settings()
        self._follow_state()
        # What schedulers ask: whether the optimizer was stepped before they are.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _follow_settings(self) -> None:
        scale, most = self._rules.scale, self._rules.max_norm or 0.0
        of_scale = (
            (scale.growth_factor, scale.backoff_factor, float(scale.growth_interval))
            if scale is not None
            else (0.0, 0.0, 0.0)
        )
        if (most, *of_scale) != self._set:
            self._set = (most, *of_scale)
            settings = torch.tensor(self._set, dtype=torch.float64)
            self._settings.copy_(settings, non_blocking=True)

    def _follow_state(self) -> None:
        """Takes over state that was loaded or made elsewhere, and hands out views of ours."""
        kept, rule = self._optimizer.state, self._rule
        names_of = [rule.state(group) for group in self._optimizer.param_groups]
        if self._handed is not None and self._handed.is_all(kept, names_of, self._is_present):
            return
        dicts: list[dict[Any, Any]] = [kept]
        rows = zip(
            *(self._gradients.parameters, self._is_present, self._groups, self._step_views),
            strict=True,
        )
        for at, (parameter, is_present, group, step) in enumerate(rows):
            names = names_of[group]
            if not is_present or not (names or rule.keeps_step):
                continue  # torch keeps no state then
            dicts.append(kept[parameter])
            self._hand_out(kept[parameter], names, at, step)
        self._handed = _Handed(kept, names_of, self._is_present, Watched(dicts, tensors=True))

    def _hand_out(self, state: dict[str, Any], names: Sequence[str], at: int, step: Tensor) -> None:
        keeps_step = self._rule.keeps_step
        for name, views in zip(names, self._views, strict=False):
            if state.get(name) is not views[at]:
                _take_over(state, name, views[at])
                if not keeps_step:
                    self._steps[at] = float(bool(views[at].any()))
        if keeps_step and state.get("step") is not step:
            _take_over(state, "step", step)

    def run(self) -> None:
        self._launch(self._places)

    def for_capture(self) -> Callable[[], Callable[[], None]]:
        """The gradients of a capture have places of their own, which a replay reads in memory of
        this update's: other launches of the capture may have what is allocated in it, too.
        """
        places = torch.zeros_like(self._places)

        def enqueue() -> Callable[[], None]:
            self._launch(places)
            return partial(_write, places, self._gradients.addresses())

        return enqueue

    def _launch(self, places: Tensor) -> None:
        stream = current_stream(self._device)
        for dtype, launchers in self._launchers.items() if self._measures else ():
            arguments = (self._chunks[dtype], self._counts[dtype], places, self._parts[dtype])
            launchers["measure"].launch(stream, _struct(*arguments, self._scale))
        self._advance(stream, places)
        for dtype, launchers in self._launchers.items():
            update = self._arguments(dtype, places)
            launchers["run"].launch(stream, update)
            if "trust" in launchers:
                launchers["trust"].launch(stream, update)

    @property
    def _scale(self) -> Tensor | int:
        return 0 if self._rules.scale is None else self._rules.scale.scale

    def _advance(self, stream: int, places: Tensor) -> None:
        scale, count = self._rules.scale, len(self._steps)
        growth = 0 if scale is None else scale.growth
        partials = (self._partials, len(self._partials)) if self._measures else (0, 0)
        first = next(iter(self._launchers.values()))
        arguments = _struct(
            *(*partials, self._settings, self._scale, growth, places, self._group_table),
            *(self._numbers, self._steps, self._shared, count, self._status),
        )
        first["advance"].launch(stream, arguments)

    def _arguments(self, dtype: torch.dtype, places: Tensor) -> Any:
        kept: list[Tensor | int] = [buffers[dtype] for buffers in self._kept]
        kept += [0] * (STATE_MAX - len(kept))
        parts = 0 if self._measures else self._parts[dtype]
        directions = self._gradients.buffers[dtype]
        return _struct(
            *(self._chunks[dtype], places, self._shared, self._numbers, self._group_table),
            *(self._status, *kept, parts, directions, self._norms),
        )


def _on_device(found: Sequence[Chunk], device: torch.device) -> Tensor:
    table = (Chunk * len(found))(*found)
    return torch.frombuffer(bytearray(table), dtype=torch.uint8).to(device)


def _write(places: Tensor, addresses: Sequence[int]) -> None:
    places.copy_(torch.tensor(addresses, dtype=torch.int64), non_blocking=True)


def _struct(*values: Tensor | int) -> ctypes.Array[ctypes.c_longlong]:
    """Addresses and 64-bit integers as one argument."""
    return vector_kernel.members(
        *(value.data_ptr() if isinstance(value, Tensor) else value for value in values)
    )


def _take_over(state: dict[str, Any], name: str, view: Tensor) -> None:
    """Puts a view of ours in the place of what a state has under a name, with its value."""
    if state.get(name) is None:
        view.zero_()
    else:
        view.copy_(torch.as_tensor(state[name]))
    state[name] = view
