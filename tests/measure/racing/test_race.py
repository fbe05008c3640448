"""Who races and what is compared, with routes of the framework's that tests make up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune.devices.device import CPU, Device
from plantune.devices.gpus import best_arch
from plantune.errors import WorkerDied
from plantune.measure.racing import built_routes, race, routes
from plantune.measure.racing.built_routes import RouteBuilder, images_that_fit
from plantune.measure.racing.call_parts import parts_us
from plantune.measure.racing.race import Detail
from plantune.measure.racing.routes import RouteSpec
from plantune.measure.subject import Raced
from plantune.measure.timing import Effort, Timing
from plantune.measure.worker.client import Worker
from plantune.plans.guess import framework_plan
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space

NAME = "se_resnet9_fixup"
WORKLOAD = Workload(NAME, batch=1)
EFFORT = Effort(budget_s=0.05, warm_up_s=0.01, retries=0)


def ready(stage):
    pass


def as_it_is(module, x):
    return module


def fails(module, x):
    raise RuntimeError("it does not compile\n#include <cstdint>\n" + "x" * 5000)


@pytest.fixture
def racing(monkeypatch):
    """A race of these routes alone."""

    def run(made, plan=None, stages=None, effort=EFFORT, **options):
        monkeypatch.setitem(routes.ROUTES, "cpu", made)
        say = ready if stages is None else stages.append
        return race.race(say, Raced(WORKLOAD.problem), plan, tuple(made), effort, 0, **options)

    return run


@pytest.fixture
def plan():
    return framework_plan(WORKLOAD.graph, load_search_space("cpu"), network=NAME)


class Queue(Device):
    """A GPU of which only the graphs are played."""

    captures = True

    def captured(self, call):
        return call


@pytest.fixture
def queue(monkeypatch):
    monkeypatch.setattr(built_routes, "device_for", lambda arch: Queue())


def test_images_are_drawn_where_they_are_used(monkeypatch):
    """A CPU took most of the time of a race of 8,192 images for drawing them."""
    asked = []

    class Drawing(Device):
        def generator(self, seed):
            asked.append(seed)
            return super().generator(seed)

    monkeypatch.setattr(built_routes, "device_for", lambda arch: Drawing())
    one, other = (RouteBuilder(Raced(WORKLOAD.problem), seed) for seed in (3, 4))
    assert asked == [3, 4]
    assert not torch.equal(one._images[0][0], other._images[0][0])


def test_no_convolution_runs_before_cudnn_may_time_its_algorithms(racing, monkeypatch):
    """It remembers the first one of each shape, so another route would have to run by that."""
    tried = []

    def noted(self, run, xs, outputs=RouteBuilder._outputs):
        tried.append((xs[0].dtype, torch.backends.cudnn.benchmark))
        return outputs(self, run, xs)

    monkeypatch.setattr(RouteBuilder, "_outputs", noted)
    racing({"eager": RouteSpec(as_it_is)})
    timed = [benchmark for dtype, benchmark in tried if dtype == torch.float32]
    assert len(timed) > 1
    assert all(timed)


def test_a_route_that_fails_says_why_in_one_line(racing):
    stages = []
    found = racing({"torchscript": RouteSpec(fails), "eager": RouteSpec(as_it_is)}, stages=stages)
    assert tuple(found.timings) == ("eager",)
    assert found.failures == {"torchscript": "RuntimeError: it does not compile"}
    assert found.best_route == "eager"
    assert stages == ["build", "build", "build", "time"]


def test_memory_that_runs_out_is_no_fault_of_plantune(racing, monkeypatch):
    """It ended a search with an error, as what nobody expects does."""

    def full(*arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 GB")

    monkeypatch.setattr(race, "RouteBuilder", full)
    with pytest.raises(WorkerDied, match="the framework: DefaultCPUAllocator"):
        racing({"eager": RouteSpec(as_it_is)})


def test_after_the_time_for_building_no_other_route_is_built(racing):
    over = replace(EFFORT, build_until=0.0)
    routes = {"eager": RouteSpec(as_it_is), "torchscript": RouteSpec(fails)}
    found = racing(routes, effort=over)
    assert tuple(found.timings) == ("eager",)  # without one there would be no ratio
    assert found.failures == {"torchscript": "the time for building was over before its turn"}


def test_what_is_captured_is_made_after_all_others(racing):
    """What the compiler gives back meanwhile would be its."""
    made = []

    def route(name, captured):
        def make(module, x):
            made.append(name)
            return module

        return RouteSpec(make, captured=captured)

    racing({"cuda-graph": route("cuda-graph", True), "compile": route("compile", False)})
    assert made == ["compile", "cuda-graph"]


def test_compiling_without_a_compiler_says_why(copied_processes):
    with Worker(threads=1, environment={"CXX": "/no/such/compiler"}) as worker:
        found = worker.race(
            Raced(WORKLOAD.problem), None, ("compile-default", "compile-frozen", "eager"), EFFORT
        )
    assert tuple(found.timings) == ("eager",)
    told = "no C++ compiler was found; apt install g++, or set CXX"
    assert found.failures == {"compile-default": told, "compile-frozen": told}


def test_cudnn_compares_its_algorithms_for_all_routes_and_not_for_a_plan(racing, plan, monkeypatch):
    seen = []

    def noting(name):
        seen.append((name, torch.backends.cudnn.benchmark))

    def make(module, x):
        noting("made")

        def run(x):
            noting("ran")
            return module(x)

        return run

    of_plan = RouteBuilder.plan

    def spied(self, plan, *, frozen=False):
        noting("plan")
        return of_plan(self, plan, frozen=frozen)

    monkeypatch.setattr(RouteBuilder, "plan", spied)
    racing({"one": RouteSpec(make), "other": RouteSpec(make, channels_last=True)}, plan)
    assert set(seen) == {("plan", False), ("made", True), ("ran", True)}
    assert not torch.backends.cudnn.benchmark


def test_a_detailed_race_has_ours_frozen_too_and_images_in_turns(racing, plan):
    seen = set()

    def make(module, x):
        def run(x):
            seen.add(x.data_ptr())
            return module(x)

        return run

    found = racing({"eager": RouteSpec(make)}, plan, detailed=True)
    assert tuple(found.timings) == ("plantune", "plantune-frozen", "eager")
    assert found.in_turns == 64
    assert 3 < len(seen) <= 64
    seen.clear()
    quick = racing({"eager": RouteSpec(make)}, plan)
    assert tuple(quick.timings) == ("plantune", "eager")
    assert tuple(quick.details["eager"].queued) == ("same",)
    assert len(seen) == 2  # those with which it is proved


def test_whole_steps_move_the_weights_of_every_route(monkeypatch):
    workload = Workload(NAME, batch=1, mode="train")
    plan = framework_plan(workload.graph, load_search_space("cpu"), network=NAME)
    monkeypatch.setattr("plantune.measure.racing.training_calls.RATE", 1e-3)
    monkeypatch.setitem(routes.ROUTES, "cpu", {"eager": RouteSpec(as_it_is)})
    made = RouteBuilder(Raced(workload.problem, steps=True), 0, 1)
    modules, laid_out = [], made._laid_out

    def noted(channels_last):
        modules.append(laid_out(channels_last))
        return modules[-1]

    monkeypatch.setattr(made, "_laid_out", noted)
    ready_made = (made.plan(plan), made.framework_route("eager"))
    for built, (module, _) in zip(ready_made, modules, strict=True):
        weight = next(module.parameters())
        before = weight.detach().clone()
        built.same()
        assert not torch.equal(weight, before)
    first, second = (module for module, _ in modules)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2, msg=name)
    for built in ready_made:
        assert list(parts_us(built.marked, CPU)) == ["forward", "backward", "optimizer"]
    assert 0 <= made.between_plans() < 1e-4


def test_a_route_that_takes_an_image_for_a_constant_does_not_race(racing):
    def folded(module, x):
        output = module(x)
        return lambda other: output

    found = racing({"eager": RouteSpec(as_it_is), "folded": RouteSpec(folded)})
    assert tuple(found.timings) == ("eager",)
    assert "folded gives another output" in found.failures["folded"]


@pytest.mark.parametrize(
    ("image_bytes", "count"), [(1, 64), (8 << 20, 64), (16 << 20, 32), (1 << 30, 2)]
)
def test_images_in_turns_take_a_gibibyte_at_most(image_bytes, count):
    assert images_that_fit(image_bytes, 64) == count


@pytest.mark.usefixtures("queue")
class TestOnAGpu:
    def test_a_captured_call_copies_fresh_images_into_its_own(self, monkeypatch):
        outputs = []

        def make(module, x):
            def run(x):
                outputs.append((x.data_ptr(), module(x)))
                return outputs[-1][1]

            return run

        monkeypatch.setitem(routes.ROUTES, "cpu", {"graph": RouteSpec(make, captured=True)})
        made = RouteBuilder(Raced(WORKLOAD.problem), 0)
        with torch.no_grad():
            built = made.framework_route("graph")
            outputs.clear()
            for call in (built.same, built.same, built.fresh, built.fresh):
                call()
        places, given = zip(*outputs, strict=True)
        assert len(set(places)) == 1
        assert torch.equal(given[0], given[1])
        assert not torch.equal(given[2], given[3])

    @pytest.mark.parametrize("right", [True, False])
    def test_images_at_one_address_are_told_of_only_if_new_values_there_count(
        self, monkeypatch, right
    ):
        def make(module, x):
            if right or not hasattr(x, "_dynamo_static_input_type"):
                return module
            output = module(x)
            return lambda other: output

        monkeypatch.setitem(routes.ROUTES, "cpu", {"route": RouteSpec(make, static=True)})
        made = RouteBuilder(Raced(WORKLOAD.problem), 0)
        with torch.no_grad():
            built = made.framework_route("route")
            told = made.with_static_images("route", built)
        assert told.static == right
        assert (told == built) != right

    def test_a_route_that_fails_when_it_is_told_races_as_it_was(self, racing, monkeypatch):
        def make(module, x):
            if hasattr(x, "_dynamo_static_input_type"):
                raise RuntimeError("it cannot")
            return module

        monkeypatch.setattr(race, "_sides", lambda ready, device: dict.fromkeys(ready, (1.0, 2.0)))
        found = racing({"route": RouteSpec(make, static=True)}, detailed=True)
        assert found.failures == {}
        assert not found.details["route"].static
        assert found.details["route"].gpu_us == 2.0


def weighing(peak, routes=()):
    class Gpu:
        def held_bytes(self):
            return 200 << 20

        def peak_bytes(self, call):
            return peak

    made = object.__new__(RouteBuilder)
    made.device, made.peaks_mib = Gpu(), {}
    made._routes, made._pool_is_there = dict(routes), False
    return made


@pytest.mark.parametrize(
    ("peak", "told"), [(300 << 20, {"route": 100.0}), (100 << 20, {})], ids=["takes", "gives back"]
)
def test_a_route_that_gives_back_more_than_it_takes_has_no_figure(peak, told):
    made = weighing(peak)
    route = built_routes.BuiltRoute(print, print, "live", 1.0)
    assert made.weighed("route", lambda: route) is route
    assert made.peaks_mib == told


def test_of_routes_that_share_a_pool_the_first_alone_has_a_figure():
    made = weighing(300 << 20, routes.ROUTES["cuda"])
    names = ["plantune", "compile-default", "compile-max-autotune", "compile-reduce-overhead"]
    for name in (*names, "cuda-graph"):
        made.weighed(name, lambda: built_routes.BuiltRoute(print, print, "live", 1.0))
    assert list(made.peaks_mib) == [*names[:3], "cuda-graph"]


def test_images_are_there_before_a_route_is_weighed():
    """In both layouts: the first route that takes one would count it as its own memory."""
    made = RouteBuilder(Raced(WORKLOAD.problem), 0)
    kept = made._images, made._images_last
    for channels_last in (False, True):
        _, images = made._laid_out(channels_last)
        assert images is kept[channels_last]
        assert images[0][0].is_contiguous(
            memory_format=torch.channels_last if channels_last else torch.contiguous_format
        )


def detail(same, fresh):
    kinds = {"same": Timing((same,) * 5), "fresh": Timing((fresh,) * 5)}
    return Detail("live", 1.0, False, False, kinds, kinds, 1.0, 2.0)


@pytest.mark.parametrize(
    ("ours", "images", "best", "ratio"),
    [((1.0, 9.0), "fresh", "b", 9 / 4), ((3.0, 1.0), "same", "a", 3 / 2)],
)
def test_the_headline_is_the_worse_of_same_and_fresh_images(ours, images, best, ratio):
    routes = {
        "plantune": detail(*ours),
        "plantune-frozen": detail(0.1, 0.1),
        "a": detail(2.0, 8.0),
        "b": detail(5.0, 4.0),
    }
    found = race._judged(routes)
    assert (found.images, found.best_route) == (images, best)
    assert found.ratio.ratio == pytest.approx(ratio)
    assert found.timings["a"] == routes["a"].queued[images]


@pytest.mark.gpu
# torch's compiler warns of its own scripted functions, and of the empty graph that it begins with.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_a_detailed_race_on_a_gpu():
    """Graphs with images of their own, images at one address, host and GPU each for itself."""
    problem = Workload(NAME, batch=8, dtype="float16", arch=best_arch()).problem
    routes = ("eager", "cuda-graph", "compile-reduce-overhead")
    found = race.race(ready, Raced(problem), None, routes, EFFORT, 0, detailed=True)
    assert found.failures == {}
    assert found.details["compile-reduce-overhead"].static
    assert found.clocks_mhz
    for route in found.details.values():
        assert route.host_us > 0
        assert route.gpu_us > 0


def test_the_recurrent_weights_of_another_route_are_in_one_piece(monkeypatch):
    """Copies are apart in memory, and cuDNN would gather them in each call."""
    flattened = []

    def flatten_parameters(self):
        flattened.append(self)

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten_parameters)
    made = RouteBuilder(Raced(WORKLOAD.problem), 0)
    made._module = nn.GRU(2, 3)
    module, _ = made._laid_out(channels_last=False)
    assert flattened[-1] is module
