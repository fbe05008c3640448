"""What each call of a captured module does on the host, and what it leaves behind: counted."""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.devices.cuda.capture import no_collection
from plantune.runtime.calls import choose
from plantune.runtime.captured.captured_program import CapturedProgram
from plantune.runtime.program import program as program_module


@pytest.fixture(autouse=True)
def captured_on_a_cpu(captured_modules, monkeypatch):
    monkeypatch.setitem(choose.UNPLANNED, "cpu", choose.PROGRAM)
    monkeypatch.setattr(choose, "is_proved", lambda *plan: True)


# That a call of one tensor enters, by Python 3.11; 3.12 and later enter fewer.
MOST_FUNCTIONS = 34


def functions_of(call) -> list[str]:
    """The Python functions that a call enters."""
    found: list[str] = []

    def note(frame, event, argument) -> None:
        if event == "call":
            found.append(frame.f_code.co_name)

    with no_collection():
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return found


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))).eval()


def host_work(module, x, change=lambda module: None) -> Counter[str]:
    """Of a call after `change`, beside the replay."""
    tuned = optimize(module, x)
    for _ in range(3):
        tuned(x)
    (program,) = tuned._calls.programs()
    assert type(program) is CapturedProgram
    program._passes["forward"].graph.graph.replay = lambda: None
    tuned(x)
    with torch.no_grad():
        change(tuned)
    return Counter(functions_of(lambda: tuned(x)))


def training_work(module, x) -> Counter[str]:
    """Of both passes, beside the replays."""
    tuned = optimize(module.train(), x, mode="train")
    parameters = [*tuned.parameters()]

    def passes() -> None:
        for parameter in parameters:
            parameter.grad = None
        tuned(x).backward(torch.ones_like(x))

    for _ in range(3):
        passes()
    (program,) = tuned._calls.programs()
    for made in program._passes.values():
        made.graph.graph.replay = lambda: None
    passes()
    assert all(parameter.grad is not None for parameter in parameters)
    return Counter(functions_of(passes))


class TestHost:
    def test_it_does_not_grow_with_the_network(self):
        """Nor by what the layers are: se_resnet9_fixup enters the same ones (2026-11-23)."""
        x = torch.randn(2, 4)
        few, many = host_work(layers(2), x), host_work(layers(30), x)
        assert few == many
        assert few.total() <= MOST_FUNCTIONS, few

    def test_weights_that_were_written_add_nothing(self):
        x = torch.randn(2, 4)
        changed = host_work(layers(2), x, lambda module: module[0].weight.mul_(2))
        assert changed == host_work(layers(2), x)

    def test_nor_in_training(self):
        """Torch's own part of a backward pass grows with the parameters; ours is one buffer."""
        x = torch.randn(2, 4)
        few, many = training_work(layers(2), x), training_work(layers(30), x)
        assert few == many


def test_after_three_calls_nothing_is_captured_built_or_kept(captures, monkeypatch):
    tuned, inputs = optimize(layers(3), torch.randn(2, 4)), torch.randn(7, 2, 4)
    built, draw = list[object](), random.Random(0)

    @torch.no_grad()
    def calls(count: int) -> None:
        for number in range(count):
            x = draw.choice(inputs)
            assert torch.equal(tuned(x.clone() if number % 2 else x), tuned.reference(x))
            draw.choice([*tuned.parameters()]).mul_(draw.choice((0.5, 2)))

    def kept() -> tuple[object, ...]:
        gc.collect()
        stats = tuned.stats()
        held = stats.captures, stats.instances, stats.held_bytes
        return len(captures), held, len(gc.get_objects())

    calls(3)
    monkeypatch.setattr(program_module, "build", lambda *given: built.append(given))
    before = kept()
    calls(200)
    *same, objects = kept()
    assert same == [*before[:-1]]
    assert objects <= before[-1] + 50  # 200 calls would show
    assert tuned.stats().planned == 203
    assert not built
