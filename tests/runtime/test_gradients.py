"""Gradients of a captured pass, side by side: made there by their kernels, or gathered."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plantune.cuda import driver, recording
from plantune.runtime.gradients import Gradients
from plantune.space.arch import load_arch

CPU = torch.device("cpu")
STATE = {"v": torch.zeros(2, 3), "w": torch.zeros(4, 8, 3, 3)}
EXTENT = driver.Extent((1, 1, 1), 32, 0)


class Program:
    """A backward pass whose steps write one gradient each, of the name that they have."""

    def __init__(self, gradients: dict[str, str], **values: Tensor) -> None:
        self.graph = SimpleNamespace(inputs=(), gradients=tuple(gradients.items()))
        self.values = dict(values)
        self.readers: dict[str, tuple[str, ...]] = {}
        self.by_framework: set[str] = set()
        self.told_before: dict[str, int] = {}

    def touching(self, value: str, phase: str) -> tuple[str, ...]:
        assert phase == "backward"
        return () if value in self.by_framework else (value, *self.readers.get(value, ()))

    def run_step(self, name: str) -> None:
        place = self.told_before.get(name, self.values[name].data_ptr())
        recording.launch(ctypes.c_void_p(1), 0, EXTENT, [ctypes.c_uint64(place)])

    def fill(self) -> None:
        """What the kernels of a pass do."""
        for number, value in enumerate(self.values.values(), 1):
            value.fill_(number)


def made(program: Program, state: dict[str, Tensor] = STATE) -> Gradients:
    gradients = Gradients(program, load_arch("cpu"), CPU)  # type: ignore[arg-type]
    gradients.follow(state)
    return gradients


def handed_over(program: Program, gradients: Gradients) -> dict[str, Tensor]:
    program.fill()
    gradients.gather(0, program.values)
    return gradients.handed_over(program.values)


def usual(**options: Any) -> Program:
    program = Program({"v": "dv", "w": "dw"}, dv=torch.zeros(2, 3), dw=torch.zeros(4, 8, 3, 3))
    for name, value in options.items():
        setattr(program, name, value)
    return program


def is_in(buffers: Gradients, tensor: Tensor) -> bool:
    (buffer,) = buffers._buffers.values()
    return tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def assert_right(program: Program, gradients: Gradients) -> None:
    found = handed_over(program, gradients)
    for number, name in enumerate(STATE, 1):
        assert torch.equal(found[name], torch.full_like(STATE[name], number)), name


def test_kernels_write_where_gradients_are_side_by_side() -> None:
    program = usual()
    gradients = made(program)
    assert all(is_in(gradients, value) for value in program.values.values())
    assert_right(program, gradients)


@pytest.mark.parametrize(
    "options",
    [
        {"by_framework": {"dw"}},
        {"readers": {"dw": ("another step",)}},
        {"told_before": {"dw": 4096}},
    ],
    ids=["the framework", "a step that reads it, too", "a kernel that knew its place before"],
)
def test_what_others_make_is_gathered(options: dict[str, Any]) -> None:
    program = usual(**options)
    gradients = made(program)
    assert is_in(gradients, program.values["dv"])
    assert not is_in(gradients, program.values["dw"])
    assert_right(program, gradients)


def test_another_order_in_memory_is_gathered() -> None:
    program = usual()
    state = STATE | {"w": STATE["w"].to(memory_format=torch.channels_last)}
    gradients = made(program, state)
    assert not is_in(gradients, program.values["dw"])
    assert_right(program, gradients)


def test_one_value_for_two_parameters_reaches_both() -> None:
    program = Program({"v": "d", "w": "d"}, d=torch.zeros(2, 3))
    gradients = made(program, {"v": torch.zeros(2, 3), "w": torch.zeros(2, 3)})
    found = handed_over(program, gradients)
    assert all(torch.equal(tensor, torch.ones(2, 3)) for tensor in found.values())


def test_parameters_that_moved_get_new_room() -> None:
    program = usual()
    gradients = made(program)
    before = program.values["dv"]
    gradients.follow({name: tensor.clone() for name, tensor in STATE.items()})
    assert program.values["dv"].data_ptr() != before.data_ptr()
    assert_right(program, gradients)


def test_no_pass_writes_into_what_was_handed_over() -> None:
    program = usual()
    gradients = made(program)
    found = handed_over(program, gradients)
    for value in program.values.values():
        value.fill_(9)
    assert not any((tensor == 9).any() for tensor in found.values())
