"""Where the GPU has no room for a plan, the framework runs the call, with one warning."""

from __future__ import annotations

import warnings

import pytest
import torch

from plantune import UnplannedCall, optimize
from plantune.errors import CaptureError, InputMismatch
from plantune.runtime.captured.program_pool import Instance

ERRORS = {
    "out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "no capture": CaptureError("small: the forward pass: operation not permitted"),
}


@pytest.fixture(params=ERRORS)
def error(request):
    return ERRORS[request.param]


def failing(monkeypatch, error, where):
    """Lets instances fail: when they are made, or in the middle of a pass."""

    def fails(*_, **__):
        raise error

    for name in ("__init__",) if where == "making" else ("forward", "replay"):
        monkeypatch.setattr(Instance, name, fails)


@pytest.fixture(params=["making", "running"])
def fail(request, monkeypatch, error):
    return lambda: failing(monkeypatch, error, request.param)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_the_framework_runs_it(fail, small, images, results, mode):
    model = optimize(small, images, mode=mode)
    fail()
    with pytest.warns(UnplannedCall, match="the plan cannot run") as caught:
        found = model(images)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(found, model.reference(images))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(images)
        if mode == "train":
            expected = results(model.reference, images, wrt_input=True)
            for name, value in results(model, images, wrt_input=True).items():
                assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_with_room_again_the_plan_runs(monkeypatch, tuned, small, images, close, error, mode):
    model = tuned(small, images, mode)
    planned = model(images)
    with monkeypatch.context() as patch:
        failing(patch, error, "running")
        with pytest.warns(UnplannedCall):
            model(images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(images), planned)


def test_fallback_error_raises_it(monkeypatch, small, images, error):
    model = optimize(small, images, fallback="error")
    failing(monkeypatch, error, "running")
    with pytest.raises(InputMismatch, match="the plan cannot run"):
        model(images)


def test_other_errors_are_raised(monkeypatch, small, images):
    """A sticky error of the GPU among them: the framework could not go on, either."""
    model = optimize(small, images)
    failing(monkeypatch, torch.AcceleratorError("CUDA error: an illegal memory access"), "running")
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        model(images)
