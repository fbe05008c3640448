"""Where cuBLAS's workspaces go, with an allocator that only writes down; tests/runtime/gpu has what
is at stake.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from plantune.canonical import Attrs
from plantune.cuda import workspaces
from plantune.cuda.workspaces import kept_workspaces
from plantune.graph.graph import Node
from plantune.graph.types import TensorType
from plantune.kernels.torch_ops import call_of


class Allocator:
    """The memory inside of which something ran, on whichever stream is current."""

    def __init__(self) -> None:
        self.used: list[object] = []
        self.live: set[object] = set()
        self.stream = SimpleNamespace(device_index=0, cuda_stream=7)
        self.capturing = False
        self.backend = "native"

    @contextmanager
    def use_mem_pool(self, pool: object) -> Iterator[None]:
        """Refuses what torch refuses."""
        assert pool not in self.live, "already recording to this memory"
        self.live.add(pool)
        self.used.append(pool)
        yield
        self.live.remove(pool)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(workspaces, "_kept", {})
    monkeypatch.setattr(torch.cuda, "MemPool", object)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", made.use_mem_pool)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: made.backend)
    return made


def test_a_stream_has_its_memory_for_good(allocator: Allocator) -> None:
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


def test_another_allocator_keeps_nothing(allocator: Allocator) -> None:
    allocator.backend = "cudaMallocAsync"
    with kept_workspaces():
        pass
    assert not allocator.used


def test_threads_on_one_stream_wait_for_each_other(allocator: Allocator) -> None:
    def products() -> None:
        for _ in range(50):
            with kept_workspaces():
                time.sleep(0)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(products) for _ in range(4)]:
            done.result()
    assert len(allocator.used) == 200


def test_a_call_may_be_wrapped_once_and_made_often(allocator: Allocator) -> None:
    called: list[int] = []
    call = kept_workspaces()(lambda: called.append(len(allocator.used)))
    call()
    call()
    assert called == [1, 2]


def test_the_frameworks_product_keeps_its_workspace(
    monkeypatch: pytest.MonkeyPatch, allocator: Allocator
) -> None:
    def mm(left: Tensor, right: Tensor, out: SimpleNamespace) -> None:
        out.product = left @ right

    monkeypatch.setattr(torch, "mm", mm)
    a, b, y = torch.randn(3, 4), torch.randn(4, 5), SimpleNamespace(is_cuda=True)
    plain = Attrs(transpose_a=False, transpose_b=False)
    node = Node("y", "matmul", ("a", "b"), (TensorType((3, 5)),), plain)
    call_of(node, {"a": a, "b": b, "y": cast(Tensor, y)})()
    assert len(allocator.used) == 1
    assert torch.equal(y.product, a @ b)
