"""A pass in a capture of the caller's."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from plantune import TunedModule, UnplannedCall, optimize
from plantune.errors import CaptureError
from plantune.runtime.captured import program_pool as pool_module
from plantune.runtime.captured.program_pool import MOST_PASSES, Instance, ProgramPool

from ...fake_gpu import Stream
from .conftest import Normed, expected

pytestmark = pytest.mark.usefixtures("captured_modules")
EAGERLY = "call the module once before each capture; the framework runs it"


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    init = ProgramPool.__init__

    def init_on_gpu(self, *args, **options):
        init(self, *args, **options)
        self._on_gpu = True

    monkeypatch.setattr(ProgramPool, "__init__", init_on_gpu)
    monkeypatch.setattr(pool_module, "_in_captures", [])


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Instance]]:
    """The instance of each pass."""
    found: list[weakref.ref[Instance]] = []

    def noting(run):
        def noted(self, *inputs):
            found.append(weakref.ref(self))
            return run(self, *inputs)

        return noted

    for name in ("forward", "replay"):
        monkeypatch.setattr(Instance, name, noting(getattr(Instance, name)))
    return found


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch):
    """Inside, the caller captures on the current stream, under that number."""

    @contextmanager
    def capturing(number: int) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            patch.setattr(pool_module, "capture_of", lambda stream: (number, None))
            yield

    return capturing


@pytest.fixture
def model(module: nn.Module, x: Tensor) -> TunedModule:
    return optimize(module.eval(), x, fallback="error")


def which(used: list[weakref.ref[Instance]]) -> list[int]:
    """Numbers of instances, in the order of their first use."""
    order = list(dict.fromkeys(id(ref()) for ref in used))
    return [order.index(id(ref())) for ref in used]


def test_the_instance_of_a_capture_is_given_to_no_other_call(model, x, capture, used, close):
    model(x)
    with capture(1):
        close(model(x), expected(model.reference, x))
    for _ in range(2):
        close(model(x + 1), expected(model.reference, x + 1))
    with capture(2):
        model(x)
    model(x)
    assert which(used) == [0, 0, 1, 1, 1, 2]


def test_calls_on_one_stream_of_a_capture_share_an_instance(model, x, capture, used):
    model(x)
    with capture(1):
        first, second = model(x), model(x + 1)
    assert which(used) == [0, 0, 0]
    assert not torch.equal(first, second), "each has an output of its own"


def test_another_stream_of_a_capture_needs_another_instance(model, x, capture, used):
    """Nothing orders the two."""
    loans = [model.pool().lend() for _ in range(2)]
    for loan in loans:
        loan.instance.forward(x)
        loan.release()
    with capture(1):
        model(x)
        first, Stream.current = Stream.current, Stream()
        model(x)
        Stream.current = first
        model(x)
    assert which(used)[2:] in ([0, 1, 0], [1, 0, 1])


@pytest.mark.parametrize("calls", [0, 1])
def test_without_a_program_that_is_ready_the_framework_runs_with_one_warning(
    module, x, capture, calls
):
    """It never ran, or another capture has the only one."""
    model = optimize(module.eval(), x)
    for number in range(calls):
        model(x)
        with capture(number):
            model(x)
    with capture(2):
        with pytest.warns(UnplannedCall, match=EAGERLY) as caught:
            found = model(x)
        assert len(caught) == 1
        assert torch.equal(found, model.reference(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)
    assert model.last_call().how == "eager"


def test_a_program_whose_weights_moved_is_not_ready(module, x, capture):
    """What it must do first cannot be captured."""
    model = optimize(module.eval(), x)
    model(x)
    model.reference[0].weight = nn.Parameter(torch.randn(8, 3, 3, 3))
    with capture(1), pytest.warns(UnplannedCall, match=EAGERLY):
        assert torch.equal(model(x), model.reference(x))
    model(x)
    with capture(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


def test_weights_that_move_between_two_calls_of_a_capture(module, x, capture):
    """The first call goes on with the weights that it has, so the second needs another program."""
    model = optimize(module.eval(), x)
    model(x)
    with capture(1):
        model(x)
        (captured,) = pool_module._in_captures
        before = list(captured.program._state)
        model.reference[0].weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        with pytest.warns(UnplannedCall, match=EAGERLY):
            assert torch.equal(model(x), model.reference(x))
    assert all(now is then for now, then in zip(captured.program._state, before, strict=True))


def test_what_a_capture_uses_outlives_the_module(module, x, capture, used):
    """The graph may be replayed. All else is freed."""
    model = optimize(module.eval(), x)
    model(x)
    with capture(1):
        model(x)
    model(x)
    weight = weakref.ref(model.reference[0].weight)
    (_, captured, ordinary) = used
    del model
    gc.collect()
    assert captured() is not None
    assert weight() is not None
    assert ordinary() is None


def test_weights_of_a_capture_outlive_their_replacement(model, x, capture):
    model(x)
    with capture(1):
        model(x)
    weight = weakref.ref(model.reference[0].weight.untyped_storage())
    with torch.no_grad():
        model.reference[0].weight = nn.Parameter(torch.randn(8, 3, 3, 3))
    model(x)
    gc.collect()
    assert weight() is not None


def test_an_error_in_a_capture_is_the_callers(model, x, capture, monkeypatch):
    """And the next capture works, with another instance."""
    model(x)
    with monkeypatch.context() as patch, capture(1):
        patch.setattr(Instance, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
    model(x)
    with capture(2):
        model(x)


def test_captures_are_not_passes_that_wait_for_their_backward_pass(x, capture):
    model = optimize(Normed().train(), x, mode="train", fallback="error")
    for number in range(MOST_PASSES + 1):
        with torch.enable_grad():
            model(x).sum().backward()
        with capture(number):
            model(x).sum().backward()
    assert model.pool().busy() == 0


@pytest.mark.usefixtures("captures")
def test_a_pool_without_a_ready_instance_says_what_to_do(model):
    with pytest.raises(CaptureError, match="call the module once before each capture"):
        model.pool()._lend_in((1, 2))
