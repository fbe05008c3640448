"""Where cuBLAS's workspaces go, with an allocator that only writes down; tests/runtime/gpu has what
is at stake.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from plantune.base.canonical import Attrs
from plantune.devices.cuda import workspaces
from plantune.devices.cuda.workspaces import KeptProducts, kept_workspaces
from plantune.graph.graph import Node
from plantune.graph.types import TensorType
from plantune.kernels.torch_ops import call_of
from plantune.runtime.calls.framework import transform_of


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


def test_threads_that_come_first_make_one_memory(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one would be dropped, with the workspaces in it."""

    def slow() -> object:
        time.sleep(0.02)
        return object()

    monkeypatch.setattr(torch.cuda, "MemPool", slow)
    begin = threading.Barrier(4)

    def product() -> None:
        begin.wait()
        with kept_workspaces():
            pass

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(product) for _ in range(4)]:
            done.result()
    assert len({*map(id, allocator.used)}) == 1


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


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, allocator: Allocator) -> list[tuple[int, int]]:
    """The thread and stream of each workspace that was taken before a product, on fake GPUs."""
    made: list[tuple[int, int]] = []

    def take() -> None:
        made.append((threading.get_ident(), allocator.stream.cuda_stream))

    monkeypatch.setattr(workspaces, "take_workspace", take)
    monkeypatch.setattr(workspaces, "_is_on_gpu", lambda leaf: isinstance(leaf, Tensor))
    return made


@pytest.mark.parametrize(
    "product",
    [
        lambda x: x @ x,
        lambda x: nn.functional.linear(x, x, x[0]),
        lambda x: torch.bmm(x[None], x[None]),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: x[0] @ x[1],
        lambda x: x @ x[0],
        lambda x: torch.linalg.inv(x @ x.T + torch.eye(len(x))),
        lambda x: nn.functional.bilinear(x, x, x.expand(3, 4, 4)),
        lambda x: nn.GRU(4, 4)(x[None])[0],
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_product_of_the_framework_takes_its_workspace_first(
    taken: list[object], product: Callable[[Tensor], Tensor], mode: Callable[[], Any]
) -> None:
    with mode(), KeptProducts():
        x = torch.randn(4, 4)
        product(x)
        assert len(taken) == 1
        product(x)
    assert len(taken) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_multiplies_nothing_takes_none(taken: list[object], mode: Callable[[], Any]) -> None:
    with mode(), KeptProducts():
        x = torch.randn(1, 4, 6, 6)
        y = nn.functional.conv2d(x, torch.randn(4, 4, 3, 3))
        y = nn.functional.batch_norm(y, y.new_zeros(4), y.new_ones(4), training=True)
        y = torch.lgamma(nn.functional.gelu(y)).softmax(1) * torch.linalg.vector_norm(y)
        nn.functional.layer_norm(y, y.shape[2:]).sum().sqrt()
    assert not taken


def test_each_stream_and_thread_takes_its_own(
    taken: list[tuple[int, int]], allocator: Allocator
) -> None:
    x = torch.randn(4, 4)
    mode = KeptProducts()

    def products() -> None:
        with mode:
            x @ x

    with mode:
        x @ x
        allocator.stream = SimpleNamespace(device_index=0, cuda_stream=8)
        x @ x
    with ThreadPoolExecutor(1) as threads:
        threads.submit(products).result()
    assert [stream for _, stream in taken] == [7, 8, 8]
    assert len({thread for thread, _ in taken}) == 2


def test_a_backward_pass_takes_it_too(taken: list[object]) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    loss = (x @ x).sum()
    assert not taken
    with KeptProducts():
        loss.backward()
    assert len(taken) == 1


def test_what_nobody_knows_may_multiply() -> None:
    other = SimpleNamespace(namespace="fbgemm", overloadpacket=SimpleNamespace(__name__="f"))
    reduced = SimpleNamespace(namespace="c10d", overloadpacket=SimpleNamespace(__name__="f"))
    assert workspaces.may_multiply(other)
    assert workspaces.may_multiply(SimpleNamespace())  # a higher-order op
    assert not workspaces.may_multiply(reduced)


def test_convolutions_without_cudnn_multiply() -> None:
    convolution = torch.ops.aten.convolution_backward.default
    assert not workspaces.may_multiply(convolution)
    with torch.backends.cudnn.flags(enabled=False):
        assert workspaces.may_multiply(convolution)


def test_a_workspace_that_was_given_back_is_taken_again(
    taken: list[object], allocator: Allocator
) -> None:
    workspaces.renew_workspace()
    assert not taken  # nothing multiplied on this stream
    with kept_workspaces():
        pass
    workspaces.renew_workspace()
    assert len(taken) == 1
    allocator.stream = SimpleNamespace(device_index=0, cuda_stream=8)
    workspaces.renew_workspace()
    assert len(taken) == 1


def test_both_libraries_take_theirs_in_kept_memory(
    monkeypatch: pytest.MonkeyPatch, allocator: Allocator
) -> None:
    seen: list[tuple[str, bool]] = []
    for name in ("mm", "addmm"):
        note = partial(lambda name, *args, out: seen.append((name, bool(allocator.live))), name)
        monkeypatch.setattr(torch, name, note)
    monkeypatch.setattr(torch, "zeros", partial(_on_the_cpu, torch.zeros))
    workspaces.take_workspace()
    assert seen == [("mm", True), ("addmm", True)]


def _on_the_cpu(make: Callable[..., Tensor], *size: int, dtype: torch.dtype, device: str) -> Tensor:
    return make(*size, dtype=dtype)


def test_a_product_that_keeps_its_own_is_seen_too(
    monkeypatch: pytest.MonkeyPatch, allocator: Allocator
) -> None:
    """As a plan's, in the runs before a capture: nobody waits for itself."""
    monkeypatch.setattr(workspaces, "_is_on_gpu", lambda leaf: isinstance(leaf, Tensor))
    monkeypatch.setattr(torch, "zeros", partial(_on_the_cpu, torch.zeros))
    a, b, y = torch.randn(3, 4), torch.randn(4, 5), torch.empty(3, 5)
    with KeptProducts():
        kept_workspaces()(lambda: torch.mm(a, b, out=y))()
    assert torch.equal(y, a @ b)
    assert len(allocator.used) == 1


def test_torchs_own_refusal_of_products_is_left_to_the_caller(
    monkeypatch: pytest.MonkeyPatch, allocator: Allocator
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(True)
    try:
        workspaces.take_workspace()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not allocator.used


def test_the_own_mode_leaves_a_module_its_plan() -> None:
    x = torch.randn(2)
    with KeptProducts():
        assert transform_of([x]) is None
        with FlopCounterMode(display=False):
            assert transform_of([x])
