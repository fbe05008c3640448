"""A module without a plan on a CPU: eager, or the route of the framework's that its calls show."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.devices.machine import cpu_environment
from plantune.errors import InputMismatch
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import EAGER, PROGRAM
from plantune.runtime.calls import calls, choose, plain_calls, route_race
from plantune.runtime.calls.framework import MOST_WARNINGS, Framework, Options
from plantune.runtime.calls.route_race import LONG, SHORT, RouteRace
from plantune.runtime.watched.live_state import OwnedTensors

ENOUGH = LONG.eager + 4 * (LONG.untimed + LONG.timed) + 8
SHORT_S = 20e-6
ENOUGH_SHORT = 4 * int(SHORT.eager_s / SHORT_S)


@pytest.fixture(autouse=True)
def eager_without_a_plan(monkeypatch):
    monkeypatch.setitem(choose.UNPLANNED, "cpu", EAGER)


@pytest.fixture
def layer():
    return nn.Linear(16, 4).eval()


@pytest.fixture
def x():
    return torch.randn(2, 16)


class Clock:
    """Says how long each route takes, by its name."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.now = 0.0

    def run(self, route, x):
        self.now += self.seconds[route.name]
        return route.name

    def __call__(self):
        return self.now


@pytest.fixture
def race(monkeypatch):
    """The names of the routes that ran, where each takes so long."""

    def calls_of(module, seconds, calls=ENOUGH, **options):
        clock = Clock(seconds)

        def run(route, x):  # a function of the class, unlike the bound one
            return clock.run(route, x)

        monkeypatch.setattr(route_race.FrameworkRoute, "__call__", run)
        monkeypatch.setattr(route_race.time, "perf_counter", clock)
        found = RouteRace(OwnedTensors(module), **options)
        return [found.run(clock.now, None) for _ in range(calls)]

    return calls_of


ALL = {
    "eager": 1.0,
    "eager-channels-last": 1.0,
    "torchscript-traced": 1.0,
    "torchscript-traced-channels-last": 1.0,
}
CONV = nn.Conv2d(3, 8, 3)


class TestRouteRace:
    def test_the_first_calls_are_eagers(self, race):
        assert race(CONV, ALL, LONG.eager) == ["eager"] * LONG.eager

    @pytest.mark.parametrize("best", ALL)
    def test_the_fastest_runs_in_the_end(self, race, best):
        assert race(CONV, {**ALL, best: 0.8})[-4:] == [best] * 4

    def test_a_tie_is_eagers(self, race):
        assert race(CONV, {**ALL, "torchscript-traced": 0.97})[-1] == "eager"

    def test_what_is_hopeless_runs_no_more_often_than_needed(self, race):
        ran = race(CONV, {**ALL, "torchscript-traced-channels-last": 4.0})
        assert ran.count("torchscript-traced-channels-last") == LONG.untimed + 1

    @pytest.mark.parametrize(
        ("seconds", "winner"),
        [(0.5 * SHORT_S, "torchscript-traced"), (0.97 * SHORT_S, "eager"), (SHORT_S, "eager")],
    )
    def test_what_is_short_takes_part(self, race, seconds, winner):
        short = {**dict.fromkeys(ALL, SHORT_S), "torchscript-traced": seconds}
        assert race(CONV, short, ENOUGH_SHORT)[-1] == winner

    def test_it_takes_turns_of_several_calls(self, race):
        """What comes right after another route finds nothing of its own in a cache."""
        short = {"eager": SHORT_S, "torchscript-traced": 0.8 * SHORT_S}
        ran = race(nn.Linear(4, 4), short, ENOUGH_SHORT)
        first = ran.index("torchscript-traced")
        assert set(ran[:first]) == {"eager"}
        assert ran[first : first + SHORT.turns] == ["torchscript-traced"] * SHORT.turns
        assert ran[first + SHORT.turns] == "eager"

    def test_what_is_short_and_rare_stays_with_eager(self, race):
        """To make another route takes as long as a thousand of its calls."""
        few = int(0.9 * SHORT.eager_s / SHORT_S)
        short = {**dict.fromkeys(ALL, SHORT_S), "torchscript-traced": 0.1 * SHORT_S}
        assert set(race(CONV, short, few)) == {"eager"}

    def test_without_filters_there_is_no_other_layout(self, race, layer):
        assert set(race(layer, ALL)) == {"eager", "torchscript-traced"}

    def test_with_deterministic_algorithms_eager_alone(self, race):
        torch.use_deterministic_algorithms(True)
        try:
            assert set(race(CONV, {**ALL, "torchscript-traced": 0.5})) == {"eager"}
        finally:
            torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("frozen", [False, True])
    def test_routes_that_freeze_weights_take_part_where_these_are_frozen(self, race, frozen):
        seconds = {**ALL, "torchscript": 0.5, "torchscript-channels-last": 0.9}
        ran = race(CONV, seconds, 2 * ENOUGH, frozen=frozen)
        assert ran[-1] == ("torchscript" if frozen else "eager")

    def test_real_calls_are_right_all_along(self, randomise):
        module = randomise(nn.Sequential(nn.Conv2d(8, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3)))
        x = torch.randn(4, 8, 24, 24)
        model = optimize(module.eval(), x)
        for call in range(ENOUGH):
            if call % 5 == 0:
                with torch.no_grad():
                    model.get_submodule("0").weight.mul_(1.1)
            torch.testing.assert_close(model(x), model.reference(x), rtol=1e-4, atol=1e-5)
        assert model._calls.expected().substitute.is_settled


class TestEager:
    """Where eager runs, the calls go straight to it; every change counts."""

    @pytest.fixture
    def model(self, layer, x):
        plan = replace(optimize(layer, x).plan, origin="measured", route=EAGER)
        model = optimize(layer, x, fallback="error", plan=plan)
        model(x)
        return model

    def test_it_gives_what_eager_gives_without_gradients(self, model, x):
        assert torch.equal(model(x), model.reference(x))
        assert not model(x).requires_grad
        assert torch.is_grad_enabled()
        assert model.last_call().how == "eager"

    def test_nobody_looks_at_the_module(self, model, x, monkeypatch):
        def never(*_):
            raise AssertionError("a look costs more than a small layer")

        monkeypatch.setattr(calls.ModuleSignature, "changed", never)
        model(x)

    def test_changes_count(self, model, x):
        with torch.no_grad():
            model.weight.mul_(2)
        assert torch.equal(model(x), model.reference(x))
        model.weight = nn.Parameter(torch.randn(4, 16))
        assert torch.equal(model(x), model.reference(x))
        model.reference.forward = lambda x: x
        assert model(x) is x

    def test_another_shape_is_still_an_error_where_that_is_asked_for(self, model):
        with pytest.raises(InputMismatch, match="it was made for input"):
            model(torch.randn(3, 16))

    def test_transforms_see_each_operation(self, model, x):
        jacobian = torch.func.jacrev(model)(x[0:2])
        assert jacobian.any()

    def test_after_some_calls_somebody_looks_again(self, model, x, monkeypatch):
        looks = []
        look = calls.ModuleSignature.changed
        monkeypatch.setattr(
            calls.ModuleSignature, "changed", lambda signature: looks.append(1) or look(signature)
        )
        for _ in range(2 * plain_calls.UNLOOKED_CALLS + 4):
            model(x)
        assert len(looks) == 2

    def test_in_training_gradients_are_eagers(self, layer, x):
        model = optimize(layer.train(), x, mode="train", fallback="silent")
        twin = copy.deepcopy(layer)
        for _ in range(3):
            for each in (model, twin):
                each.zero_grad()
                each(x).square().sum().backward()
        assert torch.equal(model.weight.grad, twin.weight.grad)
        assert model.last_call().how == "eager"


class TestPlanOfAnotherMachine:
    """It is right here, and whether it is faster its calls show."""

    @pytest.fixture
    def model(self):
        module = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval()
        x = torch.randn(2, 4, 16, 16)
        plan = replace(optimize(module, x).plan, origin="measured", route=PROGRAM)
        with PlanDatabase.open() as database:
            database.put_plan(plan, replace(cpu_environment(), device_digest="another"))
        return optimize(module, x), x

    @pytest.mark.parametrize(("us", "how"), [(0.1, "planned"), (0.97, "eager"), (3.0, "eager")])
    def test_it_runs_where_it_is_faster(self, model, monkeypatch, us, how):
        tuned, x = model
        seconds, note = {**ALL, PROGRAM: us}, RouteRace.note
        monkeypatch.setattr(
            RouteRace, "note", lambda self, route, _: note(self, route, seconds[route.name])
        )
        for _ in range(2 * ENOUGH):
            torch.testing.assert_close(tuned(x), tuned.reference(x), rtol=1e-4, atol=1e-5)
        assert tuned.last_call().how == how

    def test_one_of_this_very_machine_runs_at_once(self, model):
        tuned, x = model
        plan = tuned.plan
        with PlanDatabase.open() as database:
            database.put_plan(plan, cpu_environment())
        again = optimize(tuned.reference, x)
        again(x)
        assert again.last_call().how == "planned"


def test_calls_that_all_differ_are_not_warned_of_without_end(layer):
    framework = Framework(layer, Options("layer", "infer", None, False, "warn"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(MOST_WARNINGS + 8):
            framework.eagerly(f"reason {number}", torch.randn(2, 16))
    assert len(said) == MOST_WARNINGS
    assert "further reasons are not said" in str(said[-1].message)
