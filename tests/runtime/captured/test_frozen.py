"""With `frozen` what follows from weights is computed in `refresh` alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.runtime.program.program import Program

from .conftest import expected, program_of, state_of


@pytest.fixture
def prepared(monkeypatch):
    """Each time that a program computes what follows from weights."""
    found = []
    run_refresh = Program.run_refresh

    def noted(self, **options):
        found.append(1)
        run_refresh(self, **options)

    monkeypatch.setattr(Program, "run_refresh", noted)
    return found


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("train", [False, True])
def test_a_pass_computes_nothing_of_weights_alone(module, x, prepared, train):
    program = program_of(module, train, frozen=True)
    assert len(prepared) == 1
    for _ in range(3):
        program.forward(x)
    assert len(prepared) == 1


@pytest.mark.usefixtures("captures")
def test_refresh_leaves_nothing_to_wait_for_but_its_stream(module, monkeypatch):
    program, asked = program_of(module, frozen=True), []
    monkeypatch.setattr(Program, "run_refresh", lambda self, **options: asked.append(options))
    program.refresh(state_of(module))
    assert asked == [{"orders": True}]


@pytest.mark.usefixtures("captures")
def test_otherwise_each_pass_does(module, x, prepared):
    program = program_of(module)
    assert prepared == []
    program.forward(x)
    captured = len(prepared)
    program.forward(x)
    assert len(prepared) == captured + 1


def test_refresh_computes_it_once_for_the_same_graph(module, x, captures, prepared, close):
    program = program_of(module, frozen=True)
    program.forward(x)
    with torch.no_grad():
        module[0].weight.mul_(2)
        module[1].running_var.add_(0.5)
    program.refresh(state_of(module))
    assert len(prepared) == 2
    for _ in range(2):
        (y,) = program.forward(x)
        close(y, expected(module, x))
    assert (len(prepared), len(captures)) == (2, 1)


def test_weights_elsewhere_take_another_graph(module, x, captures, prepared, close):
    program = program_of(module, frozen=True)
    program.forward(x)
    module[0].weight = nn.Parameter(torch.randn(8, 3, 3, 3))
    program.refresh(state_of(module))
    (y,) = program.forward(x)
    close(y, expected(module, x))
    assert (len(prepared), len(captures)) == (2, 2)


@pytest.mark.usefixtures("captured_modules")
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_tuned_module_computes_it_when_it_is_told(module, x, prepared, close, weights_only):
    model = optimize(module.eval(), x, frozen=True, fallback="error")
    model(x)
    first = len(prepared)
    with torch.no_grad():
        model.reference[0].weight.mul_(2)
    model(x)
    assert len(prepared) == first
    model.refresh(weights_only=weights_only)
    for _ in range(2):
        close(model(x), expected(model.reference, x))
    assert len(prepared) == first + 1
