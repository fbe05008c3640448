"""A program runs on its own GPU, whichever is the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from plantune import optimize
from plantune.runtime.captured import current_gpu, program_pool
from plantune.runtime.captured.current_gpu import on_its_gpu
from plantune.runtime.program.program import Program

from .conftest import expected

OWN, OTHER = 1, 0


class Owner:
    """Says which GPU was current in its methods."""

    device = torch.device("cuda", OWN)

    @on_its_gpu
    def call(self, number: int) -> tuple[int, int]:
        if number < 0:
            raise ValueError("negative")
        return current_gpu.current_gpu(), number


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which GPUs became the current one."""
    current, found = [OTHER], []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        found.append(which.index)
        current.append(which.index)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(current_gpu, "current_gpu", lambda: current[-1])
    return found


def test_another_gpu_is_current_only_outside(entered: list[int]) -> None:
    assert Owner().call(7) == (OWN, 7)
    assert current_gpu.current_gpu() == OTHER
    assert entered == [OWN]


def test_its_own_gpu_is_not_set_again(entered: list[int]) -> None:
    with torch.cuda.device(Owner.device):
        assert Owner().call(7) == (OWN, 7)
    assert entered == [OWN]


@pytest.mark.usefixtures("entered")
def test_after_an_error_the_other_gpu_is_current_again() -> None:
    with pytest.raises(ValueError, match="negative"):
        Owner().call(-1)
    assert current_gpu.current_gpu() == OTHER


@pytest.mark.usefixtures("captured_modules")
def test_a_call_and_all_that_it_captures_is_on_the_modules_gpu(module, x, close, monkeypatch):
    """Here that of a CPU, whose index is None, while GPU 0 is the current one."""
    current, seen = [OTHER], []
    model = optimize(module.eval(), x, fallback="error")

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        current.append(which.index)
        yield
        current.pop()

    def asked() -> bool:
        seen.append(current[-1])
        return False

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    for one in (current_gpu, program_pool):
        monkeypatch.setattr(one, "current_gpu", lambda: current[-1])
    given = model.pool()
    given._on_gpu = True
    monkeypatch.setattr(Program, "run_forward", _noting(Program.run_forward, seen, current))
    for _ in range(2):
        close(model(x), expected(model.reference, x))
    for instance in given.instances():
        close(instance.program.forward(x)[0], expected(model.reference, x))
    assert len(seen) > 4
    assert set(seen) == {None}
    assert current == [OTHER]


def _noting(method, seen, current):
    def noted(self):
        seen.append(current[-1])
        method(self)

    return noted
