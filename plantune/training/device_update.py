"""On a GPU: unscale, clip and the optimizer's step as kernels that can be captured."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plantune.cuda.build import Binary, compile_cuda
from plantune.kernels import vector_kernel
from plantune.kernels.launcher import Launcher
from plantune.runtime.flat import is_dense
from plantune.runtime.program import current_stream
from plantune.space.arch import Arch
from plantune.training.rules import GROUP_NUMBERS, Rule, on_gpu, row_of, rule_of
from plantune.training.update import FlatGradients, Rules, Update

THREADS, CHUNK = 256, 2048
PARTIALS_MAX = 512
STATE_MAX = 3
# By torch's dtypes.
ELEMENTS = {getattr(torch, name): cxx for name, cxx in vector_kernel.ELEMENTS.items()}
SOURCE = """#include "cuda/optimizer.h"
using Measure = plantune::Measure<{element}>;
using Update = plantune::Update<{element}, plantune::Rule::{rule}>;
using Trust = plantune::Trust<{element}>;
#define STEP_KERNEL extern "C" __global__ void __launch_bounds__(plantune::kStepThreads)
STEP_KERNEL measure(Measure::Arguments arguments) {{ Measure::run(arguments); }}
STEP_KERNEL advance(plantune::Advance::Arguments arguments) {{ plantune::Advance::run(arguments); }}
STEP_KERNEL run(Update::Arguments arguments) {{ Update::run(arguments); }}
"""
TRUST = "STEP_KERNEL trust(Trust::Arguments arguments) { Trust::run(arguments); }\n"


class Item(ctypes.Structure):
    """plantune::Item."""

    _fields_ = (
        ("parameter", ctypes.c_void_p),
        ("start", ctypes.c_ulonglong),
        ("count", ctypes.c_uint),
        ("group", ctypes.c_uint),
    )


def source_of(rule: Rule, element: str) -> str:
    source = SOURCE.format(element=element, rule=rule.name)
    return source + TRUST if rule.name == "kLamb" else source


def build_update(rule: Rule, element: str, arch: Arch) -> Binary:
    return compile_cuda(source_of(rule, element), arch)


def can_update(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether a kernel of ours takes the step of this optimizer for these parameters."""
    known = all(
        p.dtype in ELEMENTS and is_dense(p) and p.numel() < 1 << 32 and p.is_cuda
        for p in parameters
    )
    return known and rule_of(optimizer) is not None


class DeviceUpdate(Update):
    """`follow` brings the device up to date with what a user may have changed on the host, and
    `run` enqueues the step. The optimizer's state are views of memory that is kept here.
    """

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
        count = len(gradients.parameters)
        self._steps = torch.zeros(count, device=device)
        self._step_views = self._steps.unbind()
        self._present = torch.zeros(count, dtype=torch.uint8, device=device)
        self._is_present: list[bool] = [False] * count
        self._numbers = torch.zeros(
            (len(optimizer.param_groups), GROUP_NUMBERS), dtype=torch.float64, device=device
        )
        self._rows: list[tuple[float, ...]] = []
        self._settings = torch.zeros(4, dtype=torch.float64, device=device)
        self._set: tuple[float, ...] = ()
        self._status = torch.zeros(4, device=device)
        self.norm, self.found_inf = self._status[0], self._status[2:3]
        places = range(rule.places(optimizer.param_groups))
        self._kept = [gradients.layout.buffers(device) for _ in places]
        self._views = [[*gradients.layout.views(kept).values()] for kept in self._kept]
        self._items = self._item_table()
        self._make_launchers(arch)

    def _item_table(self) -> Tensor:
        items = (Item * len(self._groups))()
        slots = self._gradients.layout.slots.values()
        named = zip(items, self._gradients.parameters, slots, self._groups, strict=True)
        for item, parameter, slot, group in named:
            item.parameter, item.start = parameter.data_ptr(), slot.start
            item.count, item.group = slot.numel, group
        return torch.frombuffer(bytearray(items), dtype=torch.uint8).to(self._device)

    def _chunk_table(self, dtype: torch.dtype) -> Tensor:
        """Of all parameters of a dtype: which one, and which part of it."""
        rows = [
            (at, first)
            for at, slot in enumerate(self._gradients.layout.slots.values())
            if slot.dtype == dtype
            for first in range(-(-slot.numel // CHUNK))
        ]
        return torch.tensor(rows, dtype=torch.int32).to(self._device)

    def _make_launchers(self, arch: Arch) -> None:
        self._chunks = {dtype: self._chunk_table(dtype) for dtype in self._gradients.buffers}
        self._launchers: dict[torch.dtype, dict[str, Launcher]] = {}
        blocks = {
            dtype: min(-(-buffer.numel() // CHUNK), PARTIALS_MAX)
            for dtype, buffer in self._gradients.buffers.items()
        }
        self._partials = torch.zeros((sum(blocks.values()), 2), device=self._device)
        self._norms = torch.zeros((max(map(len, self._chunks.values())), 2), device=self._device)
        self._measured = dict(zip(blocks, self._partials.split([*blocks.values()]), strict=True))
        for dtype, chunks in self._chunks.items():
            binary = build_update(self._rule, ELEMENTS[dtype], arch)
            sizes = {"measure": blocks[dtype], "advance": 1, "run": len(chunks)}
            if self._rule.name == "kLamb":
                sizes["trust"] = len(chunks)
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
            present = torch.tensor(self._is_present, dtype=torch.uint8)
            self._present.copy_(present, non_blocking=True)
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
        for at, parameter in enumerate(self._gradients.parameters):
            if not self._is_present[at]:
                continue
            group = self._optimizer.param_groups[self._groups[at]]
            names = self._rule.state(group)
            if not names and not self._rule.keeps_step:
                continue  # torch keeps no state then
            state = self._optimizer.state[parameter]
            for place, name in enumerate(names):
                view = self._views[place][at]
                if state.get(name) is not view:
                    _take_over(state, name, view)
                    if not self._rule.keeps_step:
                        self._steps[at] = float(bool(view.any()))
            if self._rule.keeps_step and state.get("step") is not self._step_views[at]:
                _take_over(state, "step", self._step_views[at])

    def run(self) -> None:
        stream, by = current_stream(self._device), self._rules.scale
        scale = 0 if by is None else by.scale
        for dtype, launchers in self._launchers.items():
            buffer = self._gradients.buffers[dtype]
            arguments = _struct(buffer, self._measured[dtype], buffer.numel(), scale)
            launchers["measure"].launch(stream, arguments)
        self._advance(stream)
        for dtype, launchers in self._launchers.items():
            arguments = self._arguments(dtype)
            launchers["run"].launch(stream, arguments)
            if "trust" in launchers:
                launchers["trust"].launch(stream, arguments)

    def _advance(self, stream: int) -> None:
        scale = self._rules.scale
        of_scale = (0, 0) if scale is None else (scale.scale, scale.growth)
        first = next(iter(self._launchers.values()))
        arguments = _struct(
            *(self._partials, len(self._partials), self._settings),
            *of_scale,
            *(self._steps, self._present, len(self._steps), self._status),
        )
        first["advance"].launch(stream, arguments)

    def _arguments(self, dtype: torch.dtype) -> Any:
        kept: list[Tensor | int] = [buffers[dtype] for buffers in self._kept]
        kept += [0] * (STATE_MAX - len(kept))
        return _struct(
            *(self._items, self._chunks[dtype], self._numbers, self._steps, self._present),
            *(self._status, self._gradients.buffers[dtype], *kept, self._norms),
        )


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
