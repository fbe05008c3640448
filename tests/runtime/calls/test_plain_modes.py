"""Plain calls under torch's modes, transforms and settings."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plantune.plans.plan import EAGER
from plantune.runtime.calls import choose
from plantune.runtime.watched.torch_internals import dispatch_modes, guard_of

from .plain import ROUTES, tuned

pytestmark = pytest.mark.filterwarnings("ignore::plantune.UnplannedCall")


@pytest.fixture(autouse=True)
def eager_without_a_plan(monkeypatch):
    monkeypatch.setitem(choose.UNPLANNED, "cpu", EAGER)
    monkeypatch.setattr(choose, "is_proved", lambda *plan: True)


@pytest.fixture
def x():
    return torch.randn(3, 6)


@pytest.fixture(params=ROUTES)
def model(request, x):
    return tuned(request.param, x)


class Seen(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, Dispatched])
def test_a_mode_sees_each_operation(model, x, mode):
    with mode() as seen:
        seen.names = []
        model(x)
    assert any("linear" in name or "addmm" in name for name in seen.names)


def inside(run):
    """Calls `run` on a tensor inside of torch.jit.trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        torch.jit.trace(run, (torch.zeros(1),), check_trace=False)


INSIDE = {
    "torch.jit.trace": inside,
    "make_fx": lambda run: make_fx(run)(torch.zeros(1)),
    "make_fx before dispatch": lambda run: make_fx(run, pre_dispatch=True)(torch.zeros(1)),
    "vmap": lambda run: torch.func.vmap(run)(torch.zeros(1)),
    "grad": lambda run: torch.func.grad(lambda x: run(x).sum())(torch.zeros(1)),
    "jvp": lambda run: torch.func.jvp(run, (torch.zeros(1),), (torch.zeros(1),)),
    "functionalize": lambda run: torch.func.functionalize(run)(torch.zeros(1)),
    "fake tensors": lambda run: under(FakeTensorMode(), run),
    "a dispatch mode": lambda run: under(LoggingMode(), run),
    "autocast": lambda run: under(torch.autocast("cpu"), run),
}


def under(mode, run):
    with mode:
        run(torch.zeros(1))


class LoggingMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_torchs_glance_knows_where_a_call_is_recorded(x, inside):
    """Also where the tensor comes from outside."""
    guard, found = guard_of([x]), []

    def run(y):
        found.append(not dispatch_modes() and guard(x))
        return y * 2

    inside(run)
    assert guard(x)
    assert set(found) == {False}


def test_transforms_and_traces_see_each_operation(model, x):
    jacobian = torch.func.jacrev(model)(x)
    torch.testing.assert_close(jacobian, torch.func.jacrev(model.reference)(x))
    torch.testing.assert_close(torch.func.vmap(model)(x[None]), model.reference(x)[None])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
    assert tangent is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        traced = torch.jit.trace(model, (torch.zeros(3, 6),))
    torch.testing.assert_close(traced(x), model.reference(x))


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SETTINGS = {
    "grad": torch.enable_grad,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("cpu"),
    "threads": lambda: threads(torch.get_num_threads() + 1),
    "deterministic": deterministic,
    "nothing": nullcontext,
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_under_any_setting_it_gives_what_eager_gives(model, x, setting):
    for _ in range(2):
        with setting(), torch.no_grad():
            wanted = model.reference(x)
        with setting():
            found = model(x)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert not found.requires_grad
        assert torch.is_grad_enabled()
        torch.testing.assert_close(model(x), model.reference(x), rtol=1e-5, atol=1e-5)


def test_a_plan_not_known_to_be_deterministic_is_not_run_where_that_is_asked(x):
    model = tuned("planned", x)
    with deterministic():
        model(x)
        assert "deterministic" in model.last_call().reason
    model(x)
    assert model.last_call().how == "planned"
