"""Plain calls go a short way, on which every change is seen as on the long one."""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.plans.plan import EAGER
from plantune.runtime.calls import choose, route_race

from .plain import ROUTES, Net, plain, tuned

# That a plain call enters of plantune's, beside what runs it.
MOST_FUNCTIONS = {"planned": 11, "torchscript-traced": 11, "eager": 2}
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


def replaced(model):
    model.first.weight = nn.Parameter(torch.randn(8, 6))


def written(model):
    with torch.no_grad():
        model.first.weight.mul_(3)


def moved(model):
    model.first.weight.data = torch.randn(8, 6)


def set_(model):
    with torch.no_grad():
        model.first.weight.set_(torch.randn(8, 6))


def swapped(model):
    torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.randn(8, 6)))


def stepped(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


CHANGES = {
    "written": written,
    "replaced": replaced,
    "moved": moved,
    "set": set_,
    "stepped": stepped,
    "loaded": lambda model: model.load_state_dict(Net().state_dict()),
    "a buffer": lambda model: model.shift.add_(1),
    "a new buffer": lambda model: setattr(model, "shift", torch.randn(4)),
    "a number": lambda model: setattr(model, "gain", 5.0),
    "in a list": lambda model: model.terms.append(3.0),
    "a mode": lambda model: model.train(),
    "a submodule": lambda model: setattr(model.reference, "second", nn.Linear(8, 4)),
    "a forward": lambda model: setattr(model.reference, "forward", lambda x: x + 1),
    "a hook": lambda model: model.first.register_forward_hook(lambda m, i, y: y * 2),
    "a hook of the reference": lambda model: model.reference.register_forward_pre_hook(
        lambda m, i: (i[0] * 2,)
    ),
    "refreshed": lambda model: model.refresh(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_counts_in_the_next_call(model, x, change):
    before = model(x)
    for _ in range(2):  # to what it is now, and from there
        change(model)
        torch.testing.assert_close(model(x), model.reference(x), rtol=1e-5, atol=1e-5)
    assert change is CHANGES["refreshed"] or not torch.equal(model(x), before)


@pytest.mark.parametrize("route", ["planned", "eager"])
def test_a_swapped_tensor_counts(route, x):
    """Torch swaps none that a trace holds."""
    model = tuned(route, x)
    swapped(model)
    torch.testing.assert_close(model(x), model.reference(x), rtol=1e-5, atol=1e-5)


def test_a_hook_of_its_own_is_called(model, x):
    seen = []
    handle = model.register_forward_hook(lambda *_: seen.append(1))
    model(x)
    handle.remove()
    model(x)
    assert seen == [1]


def test_a_hook_for_all_modules_is_called(model, x):
    seen = []
    every = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m)))
    with every:
        model(x)
    model(x)
    assert seen.count(nn.Linear) == 2


def test_another_class_of_call_is_called(x):
    """Somebody's tracer replaces what torch calls."""
    model, seen, call = tuned("eager", x), [], nn.Module.__call__

    def traced(self, *args):
        seen.append(type(self))
        return call(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "__call__", traced)
        model(x)
    assert seen == [Net, nn.Linear, nn.Linear]


OTHERS = {
    "another shape": lambda x: torch.randn(2, 6),
    "other strides": lambda x: torch.randn(6, 3).t(),
    "a part": lambda x: torch.randn(3, 12)[:, ::2],
    "a leaf": lambda x: torch.randn(3, 6, requires_grad=True),
    "a parameter": nn.Parameter,
    "a view": lambda x: x[:],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_input_is_right(model, x, other):
    y = other(x)
    for _ in range(3):
        torch.testing.assert_close(model(y), model.reference(y), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(x), model.reference(x), rtol=1e-5, atol=1e-5)
    assert not model(y).requires_grad


def test_an_input_of_another_dtype_is_refused_as_by_eager(model, x):
    for call in (model, model.reference):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            call(x.double())


@pytest.mark.parametrize("route", ROUTES)
def test_calls_that_record_gradients_are_not_plain(x, route):
    module = Net().train()
    plan = replace(optimize(module, x, mode="train").plan, origin="measured", route=ROUTES[route])
    model = optimize(module, x, mode="train", plan=plan, share=True)
    plain(model, x)
    for _ in range(3):
        module.zero_grad()
        model(x).sum().backward()
        ours = [parameter.grad.clone() for parameter in module.parameters()]
        module.zero_grad()
        module(x).sum().backward()
        for mine, its in zip(ours, module.parameters(), strict=True):
            torch.testing.assert_close(mine, its.grad)
        with torch.no_grad():
            assert not model(x).requires_grad


def test_kinds_that_take_turns_are_both_plain(x):
    model, other = tuned("planned", x), torch.randn(5, 6)
    for _ in range(100):
        model(other)
        model(x)
    answers = {model._calls.plain.answer}
    for _ in range(3):
        for each in (x, other):
            torch.testing.assert_close(model(each), model.reference(each), rtol=1e-5, atol=1e-5)
            answers.add(model._calls.plain.answer)
    assert len(answers) == 2


def test_every_call_is_counted(model, x):
    before = model.stats()
    for _ in range(100):
        model(x)
    after = model.stats()
    assert after.planned + after.eager == before.planned + before.eager + 100


@pytest.mark.parametrize("route", [*ROUTES, "a race"])
def test_what_is_kept_of_a_call_is_not_its_input(route):
    x = torch.randn(3, 6)
    model = plain(optimize(Net().eval(), x), x) if route == "a race" else tuned(route, x)
    seen = weakref.ref(x)
    del x
    gc.collect()
    assert seen() is None, model.last_call()


def test_a_race_times_what_a_call_costs_then(x, monkeypatch):
    """All routes through the functions that answer calls later; eager as the module itself."""
    monkeypatch.setattr(route_race, "SHORT", replace(route_race.SHORT, eager_s=0.0))
    noted, note = [], route_race.RouteRace.note

    def noting(self, route, seconds):
        noted.append(route.name)
        note(self, route, seconds if route.name == "eager" else 0.5 * seconds)

    monkeypatch.setattr(route_race.RouteRace, "note", noting)
    model = optimize(Net().eval(), x)
    entered = []
    for _ in range(20 * route_race.SHORT.timed):
        if model._calls.expected().substitute.is_settled:
            break
        before = len(noted)
        functions = functions_of(lambda: model(x))
        entered.append((noted[before], "Calls.run" in functions))
    long_way = [name for name, is_long in entered if is_long]
    assert long_way.count("eager") == 1  # the first call
    assert long_way.count("torchscript-traced") == 1  # makes it
    assert {name for name, _ in entered} == {"eager", "torchscript-traced"}


def test_the_module_is_gone_without_a_collection(x):
    for route in ROUTES:
        model = tuned(route, x)
        gc.collect()
        gc.disable()
        try:
            seen = weakref.ref(model._calls.expected().pool)
            del model
            assert seen() is None, route
        finally:
            gc.enable()


def functions_of(call):
    """Those of plantune's that a call enters."""
    found = []

    def note(frame, event, argument):
        if event == "call" and frame.f_globals["__name__"].startswith("plantune."):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("route", ROUTES)
def test_few_functions_are_entered(x, route, monkeypatch):
    model = tuned(route, x)
    pool = model._calls.expected().pool
    monkeypatch.setattr(pool, "run", lambda *inputs: (torch.zeros(3, 4),))
    model.refresh(weights_only=True)
    plain(model, x)
    entered = functions_of(lambda: model(x))
    assert len(entered) <= MOST_FUNCTIONS[route], entered
