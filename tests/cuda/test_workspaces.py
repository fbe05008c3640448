"""Where cuBLAS's workspaces go, with an allocator that only writes down; tests/runtime/gpu has what
is at stake.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from plantune.cuda import workspaces
from plantune.cuda.workspaces import kept_workspaces


class Allocator:
    """The pools inside of which something ran, on whichever stream is current."""

    def __init__(self) -> None:
        self.used: list[object] = []
        self.stream = SimpleNamespace(device_index=0, cuda_stream=7)
        self.capturing = False

    @contextmanager
    def use_mem_pool(self, pool: object) -> Iterator[None]:
        self.used.append(pool)
        yield


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(workspaces, "_pools", {})
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", made.use_mem_pool)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


def test_a_stream_has_one_pool_for_good(allocator: Allocator) -> None:
    for _ in range(2):
        with kept_workspaces():
            pass
    assert len(allocator.used) == 2
    assert allocator.used[0] is allocator.used[1]


@pytest.mark.parametrize("other", [(0, 8), (1, 7)])
def test_every_stream_of_every_gpu_has_its_own(
    allocator: Allocator, other: tuple[int, int]
) -> None:
    with kept_workspaces():
        pass
    allocator.stream = SimpleNamespace(device_index=other[0], cuda_stream=other[1])
    with kept_workspaces():
        pass
    assert len({*map(id, allocator.used)}) == 2


def test_a_capture_takes_what_warm_runs_took(allocator: Allocator) -> None:
    """Memory of a capture is the graph's."""
    allocator.capturing = True
    with kept_workspaces():
        pass
    assert not allocator.used


def test_a_call_may_be_wrapped_once_and_made_often(allocator: Allocator) -> None:
    called: list[int] = []
    call = kept_workspaces()(lambda: called.append(len(allocator.used)))
    call()
    call()
    assert called == [1, 2]
