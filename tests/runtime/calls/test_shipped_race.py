"""A plan that plantune ships for CPUs is proved and raced in the first calls."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import load_model, optimize
from plantune.devices.machine import cpu_environment
from plantune.errors import CannotJudge, WrongResult
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans.database.exports import export_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.proofs import is_proved
from plantune.plans.database.stored import shipped_contender
from plantune.plans.guess import COMPILED, hand_plan
from plantune.plans.plan import EAGER
from plantune.runtime.calls import choose, route_race, shipped_race
from plantune.runtime.calls.choose import NoStoredPlan
from plantune.space.search_space import load_search_space

SHAPE = (2, 3, 16, 16)
CALLS = 400


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8 * 14 * 14, 4)

    def forward(self, x):
        return self.linear(torch.relu(self.conv(x)).flatten(1))


@pytest.fixture(scope="module")
def net():
    return Net().eval()


@pytest.fixture(scope="module")
def plan(net):
    graph = extract(net, TensorType(SHAPE))
    made = hand_plan(graph, load_search_space("cpu"), network="Net", without=COMPILED)
    return replace(made, origin="measured")


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch):
    """Eager runs what no plan does, and shipped plans are looked for. Calls are never so short that
    more of them are timed: a fast core would leave races open here.
    """
    monkeypatch.setattr(route_race, "SHORTEST_S", 0.0)
    monkeypatch.setitem(choose.UNPLANNED, "cpu", EAGER)
    monkeypatch.setattr(choose, "shipped_contender", shipped_contender)


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """Puts a plan in plantune's own file for CPUs, as made on another one."""
    monkeypatch.setenv("PLANTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("plantune.plans.database.stored.data_folder", lambda name: tmp_path)

    def put(plan, **changed):
        here = replace(cpu_environment(), **({"device": "another CPU"} | changed))
        with PlanDatabase.in_memory() as database:
            database.put_plan(plan, here)
            export_plans(database, tmp_path / "cpu.db", "cpu")
        return tmp_path / "cpu.db"

    return put


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on by what the route of a call takes."""

    class Clock:
        now, ours, theirs = 0.0, 0.5, 1.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(route_race.time, "perf_counter", clock.perf_counter)
    run, eager = shipped_race.ProgramPool.run, route_race.FrameworkRoute.__call__

    def of_plan(pool, *inputs):
        clock.now += clock.ours
        return run(pool, *inputs)

    def of_eager(route, *args, **kwargs):
        clock.now += clock.theirs
        return eager(route, *args, **kwargs)

    monkeypatch.setattr(shipped_race.ProgramPool, "run", of_plan)
    monkeypatch.setattr(route_race.FrameworkRoute, "__call__", of_eager)
    return clock


def settled(tuned, net, x, calls=CALLS):
    """Calls it until nothing is open; each call is right, whatever runs it."""
    routes = []
    for _ in range(calls):
        torch.testing.assert_close(tuned(x), net(x), rtol=1e-4, atol=1e-5)
        routes.append(tuned.last_call().how)
        kept = tuned._calls.expected()
        if kept.substitute is None or (
            kept.substitute.is_settled and not isinstance(kept.substitute, shipped_race.ShippedRace)
        ):
            return routes
        if (
            isinstance(kept.substitute, shipped_race.ShippedRace)
            and (builder := kept.substitute._builder) is not None
        ):
            builder.join()
    raise AssertionError(f"still open after {calls} calls")


def test_one_that_wins_runs(ship, plan, net, clock):
    ship(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned = optimize(net, torch.zeros(SHAPE), fallback="error")
        routes = settled(tuned, net, torch.randn(SHAPE))
    assert routes[0] == EAGER
    assert tuned.plan.choices == plan.choices
    assert tuned(torch.zeros(SHAPE)).shape == (2, 4)
    assert tuned.last_call().how == "planned"
    assert is_proved(plan, cpu_environment())


def test_one_that_loses_does_not(ship, plan, net, clock):
    ship(plan)
    clock.ours = 2.0
    tuned = optimize(net, torch.zeros(SHAPE))
    settled(tuned, net, torch.randn(SHAPE))
    assert tuned.plan.origin == "framework"
    tuned(torch.zeros(SHAPE))
    assert tuned.last_call().how != "planned"


def test_the_race_takes_two_seconds_and_a_few_calls_at_least(ship, plan, net, clock):
    ship(plan)
    clock.ours, clock.theirs = 0.01, 0.02
    tuned = optimize(net, torch.zeros(SHAPE))
    began = []
    note = shipped_race.ShippedRace._note

    def noted(self, ours, seconds):
        began.append(clock.now)
        note(self, ours, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped_race.ShippedRace, "_note", noted)
        settled(tuned, net, torch.randn(SHAPE), 2000)
    assert began[-1] - began[0] <= shipped_race.RACE_S
    assert len(began) > 2 * shipped_race.LEAST_TIMED


def test_while_its_kernels_are_compiled_the_framework_answers(ship, plan, net, monkeypatch):
    """A build takes many seconds, and no call waits for it."""
    ship(plan)
    goes_on, began = threading.Event(), threading.Event()

    def build(shipped):
        began.set()
        goes_on.wait(60)

    monkeypatch.setattr(shipped_race.Shipped, "build", build)
    proved = []
    monkeypatch.setattr(choose, "recheck", lambda *given: proved.append(given))
    tuned, x = optimize(net, torch.zeros(SHAPE)), torch.randn(SHAPE)
    for _ in range(200):
        torch.testing.assert_close(tuned(x), net(x))
    assert began.is_set()
    assert proved == []
    route = tuned._calls.expected().substitute
    goes_on.set()
    route._builder.join()
    tuned(x)
    assert len(proved) == 1


def test_a_module_that_is_called_rarely_starts_no_build(ship, plan, net, monkeypatch):
    ship(plan)
    monkeypatch.setattr(shipped_race.Shipped, "build", lambda shipped: pytest.fail("it was built"))
    tuned = optimize(net, torch.zeros(SHAPE))
    for _ in range(route_race.LONG.eager):
        tuned(torch.zeros(SHAPE))
    assert tuned._calls.expected().substitute._builder is None


@pytest.mark.parametrize("error", [WrongResult("it is off", 1.0, 0.1), CannotJudge("it overflows")])
def test_one_that_is_not_proved_never_runs(ship, plan, net, monkeypatch, error):
    ship(plan)
    ran = []
    monkeypatch.setattr(shipped_race.ProgramPool, "run", lambda *given: ran.append(given))

    def fails(*given):
        raise error

    monkeypatch.setattr(choose, "recheck", fails)
    tuned = optimize(net, torch.zeros(SHAPE))
    settled(tuned, net, torch.randn(SHAPE))
    assert ran == []
    assert tuned.plan.origin == "framework"
    assert not is_proved(plan, cpu_environment())


def test_one_that_breaks_in_the_race_is_dropped(ship, plan, net, monkeypatch):
    ship(plan)

    def breaks(pool, *inputs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(shipped_race.ProgramPool, "run", breaks)
    tuned = optimize(net, torch.zeros(SHAPE))
    settled(tuned, net, torch.randn(SHAPE))
    assert tuned.plan.origin == "framework"


def test_the_numbers_that_a_user_draws_stay_the_same(ship, plan, net):
    """A proof draws some, too."""

    def drawn():
        tuned, x = optimize(net, torch.zeros(SHAPE)), torch.zeros(SHAPE)
        torch.manual_seed(3)
        settled(tuned, net, x)
        return torch.rand(4)

    alone = drawn()
    ship(plan)
    assert torch.equal(drawn(), alone)


def test_where_determinism_is_asked_for_nothing_is_tried(ship, plan, net, monkeypatch):
    ship(plan)
    monkeypatch.setattr(shipped_race.Shipped, "build", lambda shipped: pytest.fail("it was built"))
    tuned, x = optimize(net, torch.zeros(SHAPE)), torch.randn(SHAPE)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(100):
            assert torch.equal(tuned(x), net(x))
            assert tuned.last_call().how == EAGER
    finally:
        torch.use_deterministic_algorithms(before)


def test_ones_own_plan_comes_first(ship, plan, net):
    ship(replace(plan, choices=plan.choices, branches=False))
    with PlanDatabase.open() as database:
        database.put_plan(plan, cpu_environment())
    tuned = optimize(net, torch.zeros(SHAPE))
    tuned(torch.zeros(SHAPE))
    assert tuned.last_call().how == "planned"


class TestWhatIsSaid:
    NAME = "se_resnet9_fixup"

    @pytest.fixture
    def shipped(self, ship):
        def put(mode="infer"):
            graph = load_model(self.NAME, batch=1, mode=mode, fallback="silent", device="cpu")
            graph = graph.pool().graph
            made = hand_plan(graph, load_search_space("cpu"), network=self.NAME, without=COMPILED)
            return ship(replace(made, origin="measured"))

        return put

    def test_nothing_of_one_that_is_tried(self, shipped):
        shipped()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_model(self.NAME, batch=1, device="cpu")(torch.zeros(1, 3, 64, 64))

    def test_the_command_that_enables_one_that_is_not(self, shipped):
        """Calls that leave gradients behind are not run twice."""
        path = shipped("train")
        model = load_model(self.NAME, batch=1, mode="train", device="cpu")
        with pytest.warns(NoStoredPlan) as caught:
            model(torch.zeros(1, 3, 64, 64))
        text = str(caught[0].message)
        assert f"`plantune verify --batch 1 --mode train --from {path}`" in text
        assert "`plantune search --batch 1 --mode train` finds one" in text

    def test_why_one_cannot_run_and_the_command_that_finds_another(self, shipped, monkeypatch):
        """Once, at the line of the call."""

        def fails(*given):
            raise WrongResult("the output is off by 1", 1.0, 0.1)

        shipped()
        monkeypatch.setattr(choose, "recheck", fails)
        monkeypatch.setattr(route_race, "LONG", replace(route_race.LONG, timed=1))
        model = load_model(self.NAME, batch=1, device="cpu")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            settled(model, model.reference, torch.zeros(1, 3, 64, 64))
        (warning,) = caught
        assert (warning.category, warning.filename) == (NoStoredPlan, __file__)
        text = str(warning.message)
        assert "cannot run here: the output is off by 1; `plantune search --batch 1` finds" in text
