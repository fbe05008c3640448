"""Gradients of a captured pass, side by side: made there by their kernels, or gathered."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plantune.devices.cuda import driver, recording
from plantune.runtime.program.gradients import Gradients
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


def test_a_change_of_one_is_none_of_another() -> None:
    """A loss may hold one parameter's gradient while another's is clipped in place."""
    program = usual()
    found = handed_over(program, made(program))
    clipped, held = found["v"], found["w"]
    weight = torch.ones_like(held, requires_grad=True)
    loss = (weight * held).sum()
    clipped.mul_(0.5)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, held)


@pytest.mark.parametrize("options", [{}, {"by_framework": {"dw"}}], ids=["kernels", "gathered"])
def test_passes_of_one_capture_write_into_memory_of_their_own(options: dict[str, Any]) -> None:
    program = usual(**options)
    gradients = made(program)
    own, found = dict(program.values), []
    for _ in range(2):
        with gradients.in_new_memory() as new:
            program.fill()
            gradients.gather(0, program.values)
        found.append(new)
        for value in new.values():
            assert not is_in(gradients, value)
    for name, again in found[1].items():
        again.fill_(9)
        assert torch.equal(found[0][name], torch.full_like(again, [*STATE].index(name) + 1))
    assert all(program.values[name] is value for name, value in own.items())
    assert_right(program, gradients)


class Exchange:
    """Takes the gradient of the second parameter."""

    def __init__(self) -> None:
        self.place = torch.zeros_like(STATE["w"])
        self.heard: list[tuple[Tensor, Tensor | None]] = []

    def place_for(self, parameter: Tensor) -> Tensor | None:
        return self.place if parameter is STATE["w"] else None

    def arrived(self, found: Any) -> None:
        self.heard += found


@pytest.mark.parametrize("gathered", [False, True])
def test_an_exchange_gets_what_a_pass_makes_as_it_is_made(gathered: bool) -> None:
    program = usual(**({"by_framework": {"dw"}} if gathered else {}))
    gradients, exchange = made(program), Exchange()
    own = program.values["dw"]
    with gradients.in_new_memory(exchange) as new:
        assert new["w"] is exchange.place
        program.fill()
        assert gradients.report is not None
        gradients.report(["dv", "dw"])
        gradients.gather(0, program.values)
    ((place, source),) = exchange.heard
    assert place is exchange.place
    if gathered:
        assert source is own  # and whoever takes it copies it
        assert not place.any()
    else:
        assert source is None
        assert torch.equal(place, torch.full_like(place, 2))
    assert torch.equal(new["v"], torch.full_like(new["v"], 1))
    assert gradients.report is None
    assert_right(program, gradients)
