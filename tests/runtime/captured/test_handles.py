"""Which libraries a thread is prepared for before a capture, and when."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from plantune.devices.cuda import workspaces
from plantune.devices.cuda.workspaces import KeptProducts
from plantune.runtime.captured import handles
from plantune.runtime.captured.handles import make_handles


@pytest.mark.parametrize(
    ("run", "libraries"),
    [
        (lambda x: x @ x, {"cublas"}),
        (lambda x: functional.linear(x, x, x[0]), {"cublas"}),
        (lambda x: functional.conv2d(x[None, None], x[None, None]), {"cudnn"}),
        (lambda x: functional.batch_norm(x, None, None, training=True), {"cudnn"}),
        (lambda x: x.tanh().sum(), set()),
    ],
)
def test_libraries_that_torch_calls_are_seen(
    run, libraries: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "_is_on_gpu", lambda leaf: isinstance(leaf, Tensor))
    monkeypatch.setattr(KeptProducts, "_keep", lambda mode: None)
    x = torch.randn(4, 4)
    with torch.no_grad(), KeptProducts() as seen:
        run(x)
    assert seen.libraries == libraries


def test_torchs_recurrent_layers_call_cudnn() -> None:
    for op in (torch.ops.aten._cudnn_rnn, torch.ops.aten._cudnn_rnn_backward):
        assert "cudnn" in workspaces.libraries_of(op.default)


def test_each_thread_is_prepared_once_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, calls = 0, []
    monkeypatch.setattr(handles, "current_gpu", lambda: gpu)
    monkeypatch.setattr(handles, "this_thread", handles._ThisThread())
    first = {name: lambda name=name: not calls.append(name) for name in ("cublas", "cudnn")}
    monkeypatch.setattr(handles, "_FIRST_CALLS", first)
    make_handles({"cublas"})
    make_handles({"cublas"})
    assert calls == ["cublas"]
    make_handles({"cublas", "cudnn"})
    assert calls == ["cublas", "cudnn"]
    gpu = 1
    make_handles({"cudnn"})
    with ThreadPoolExecutor(1) as thread:
        thread.submit(make_handles, {"cublas"}).result()
    assert calls == ["cublas", "cudnn", "cudnn", "cublas"]


def test_without_a_library_there_is_nothing_to_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without cuDNN; products that torch refuses."""
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not any(first_call() for first_call in handles._FIRST_CALLS.values())


def test_what_was_refused_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once determinism was turned off, for example."""
    allowed: list[bool] = [False, True]
    monkeypatch.setattr(handles, "current_gpu", lambda: 0)
    monkeypatch.setattr(handles, "this_thread", handles._ThisThread())
    monkeypatch.setattr(handles, "_FIRST_CALLS", {"cublas": lambda: allowed.pop(0)})
    for _ in range(3):
        make_handles({"cublas"})
    assert not allowed
