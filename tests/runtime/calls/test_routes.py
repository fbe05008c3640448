"""The framework's routes compute with the module as it is now, as eager does."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import TunedModule, optimize
from plantune.graph.outputs import TENSOR, Outputs
from plantune.plans.plan import EAGER, FROZEN_ROUTES, LIVE_ROUTES, PROGRAM
from plantune.runtime.calls.planned import Planned
from plantune.runtime.calls.routes import ROUTE_FEATURES, FrameworkRoute
from plantune.runtime.watched.live_state import OwnedTensors

ROUTES = tuple(name for name in LIVE_ROUTES if name != PROGRAM)
FROZEN = "torchscript"


class Policy(nn.Module):
    """Convolutions, a batch norm and a Python setting."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        self.gain = 2.0

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        return self.head(y.mean((2, 3))) * self.gain, y


@pytest.fixture
def module(randomise):
    return randomise(Policy()).eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 8)


@pytest.fixture
def run_by():
    """The module, tuned with a plan that has lost to such a route."""

    def tuned(module, x, route, *, mode="infer", frozen=False) -> TunedModule:
        plan = optimize(module, x, mode=mode).plan
        plan = replace(plan, origin="measured", route=route if route in ROUTES else EAGER)
        if frozen:
            plan = replace(plan, frozen_route=route)
        return optimize(module, x, mode=mode, plan=plan, frozen=frozen)

    return tuned


def alike(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        assert one.is_contiguous() == other.is_contiguous()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_each_route_of_a_plan_is_one_here():
    assert set(ROUTE_FEATURES) == set(FROZEN_ROUTES) - {PROGRAM}


@pytest.mark.parametrize("route", ROUTES)
class TestLive:
    def test_it_runs_and_gives_what_eager_gives(self, module, x, route, run_by):
        model = run_by(module, x, route)
        for _ in range(4):
            alike(model(x), model.reference(x))
        assert model.last_call().how == route
        assert model._calls.expected().substitute.why_not is None

    def test_weights_written_in_place_count_in_the_next_call(self, module, x, route, run_by):
        model = run_by(module, x, route)
        before = model(x)[0]
        for write in (
            lambda: model.conv.weight.mul_(2),
            lambda: model.head.bias.add_(1),
            lambda: model.load_state_dict(Policy().eval().state_dict()),
            lambda: model.norm.running_mean.add_(0.5),
        ):
            with torch.no_grad():
                write()
            alike(model(x), model.reference(x))
            assert not torch.equal(model(x)[0], before)
            before = model(x)[0]

    def test_an_optimizers_step_counts(self, module, x, route, run_by):
        model = run_by(module, x, route)
        model(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.reference(x)[0].sum().backward()
        optimizer.step()
        alike(model(x), model.reference(x))

    def test_replaced_parameters_count(self, module, x, route, run_by):
        model = run_by(module, x, route)
        model(x)
        model.conv.weight = nn.Parameter(torch.randn_like(model.conv.weight))
        alike(model(x), model.reference(x))
        model.head = nn.Linear(8, 4)
        alike(model(x), model.reference(x))
        model.conv.weight.data = torch.randn_like(model.conv.weight)
        alike(model(x), model.reference(x))

    def test_python_state_and_modes_count(self, module, x, route, run_by):
        model = run_by(module, x, route)
        model(x)
        model.gain = 3.0
        alike(model(x), model.reference(x))
        model.train()
        twin = copy.deepcopy(model.reference)
        alike(model(x), twin(x))
        alike([model.norm.running_mean], [twin.norm.running_mean])

    def test_the_callers_strides_stay(self, module, x, route, run_by):
        model = run_by(module, x, route)
        strides = {name: t.stride() for name, t in model.state_dict().items()}
        model(x)
        model(x.contiguous(memory_format=torch.channels_last))
        assert {name: t.stride() for name, t in model.state_dict().items()} == strides
        assert {n: t.stride() for n, t in module.state_dict().items()} == strides

    def test_copies_and_states_are_those_of_the_module(self, module, x, route, run_by):
        model = run_by(module, x, route)
        model(x)
        assert model.state_dict().keys() == module.state_dict().keys()
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.conv.weight.zero_()
        alike(model(x), module(x))
        alike(other(x), other.reference(x))

    def test_no_gradient_is_recorded_and_the_callers_mode_stays(self, module, x, route, run_by):
        model = run_by(module, x, route)
        assert not model(x)[0].requires_grad
        assert torch.is_grad_enabled()
        with torch.inference_mode():
            alike(model(x), model.reference(x))
        alike(model(x), module(x))


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_made_inside_of_inference_mode_serves_outside_too(module, x, route, run_by):
    model = run_by(module, x, route)
    with torch.inference_mode():
        inside = torch.randn(2, 3, 8, 8)
        alike(model(inside), model.reference(inside))
    assert model._calls.expected().substitute.why_not is None
    with torch.no_grad():
        model.conv.weight.mul_(2)
    alike(model(x), model.reference(x))


@pytest.mark.parametrize("route", ROUTES)
def test_gradients_reach_the_callers_parameters(module, x, route, run_by):
    module.train()
    model = run_by(module, x, route, mode="train")
    twin = copy.deepcopy(module)
    for each in (model, twin):
        for _ in range(3):
            each.zero_grad()
            sum(result.square().sum() for result in each(x)).backward()
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert parameter.grad.stride() == parameter.stride(), name
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-3)
    # One pass moves the statistics once, also the one in which the module is traced.
    alike([model.norm.running_mean], [twin.norm.running_mean])
    assert model.norm.num_batches_tracked == twin.norm.num_batches_tracked == 3


@pytest.mark.parametrize("route", ROUTES)
def test_no_gradient_goes_through_what_is_under_no_grad(x, route, run_by):
    """Torch's traces do not keep it: such a module is not traced."""

    class Target(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            with torch.no_grad():
                target = self.conv(x).mean((2, 3), keepdim=True)
            return self.conv(x) * target

    module = Target()
    model = run_by(module, x, route, mode="train")
    for each in (model, module):
        each(x).square().sum().backward()
    torch.testing.assert_close(model.conv.weight.grad, module.conv.weight.grad)


class TestFrozen:
    def test_weights_stay_until_refresh(self, module, x, run_by):
        model = run_by(module, x, FROZEN, frozen=True)
        before = model(x)
        alike(before, module(x))
        with torch.no_grad():
            model.conv.weight.mul_(2)
        alike(model(x), before)
        model.refresh(weights_only=True)
        alike(model(x), model.reference(x))
        assert model.last_call().how == FROZEN

    def test_only_where_the_weights_are_frozen(self, module, x):
        plan = replace(optimize(module, x).plan, origin="measured", frozen_route=FROZEN)
        model = optimize(module, x, plan=plan)
        model(x)
        assert model.last_call().how == "planned"


class TestWhatCannotBeTraced:
    def test_runs_eagerly(self, x):
        class Lists(nn.Module):
            def forward(self, x):
                return {"a": x.relu(), "b": x.sigmoid()}

        module = Lists()
        route = FrameworkRoute("torchscript-traced", OwnedTensors(module))
        for _ in range(3):
            alike(route(x).values(), module(x).values())
        assert "cannot be traced" in route.why_not

    def test_a_tensor_that_is_not_a_parameter_is_never_baked_in(self, x):
        module = nn.Identity()
        module.mask = torch.rand(8)
        module.forward = lambda x: x * module.mask
        route = FrameworkRoute("torchscript-traced", OwnedTensors(module))
        route(x)
        module.mask = torch.rand(8)
        alike([route(x)], [x * module.mask])
        assert "neither a parameter nor a buffer" in route.why_not


def test_a_shared_filter_has_one_copy(x):
    conv = nn.Conv2d(3, 3, 3, padding=1).eval()
    module = nn.Sequential(conv, nn.ReLU(), conv)
    route = FrameworkRoute("eager-channels-last", OwnedTensors(module))
    with torch.no_grad():
        alike([route(x)], [module(x)])
        conv.weight.mul_(2)
        alike([route(x)], [module(x)])


def test_where_torch_errs_in_channels_last_eager_runs_as_the_caller_has_it(run_by, x):
    """Its gradient of a padded average pool on a GPU."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(3, 2, 1))
    model = run_by(module, x, "eager-channels-last", mode="train")
    call = model._calls._expected
    names = [
        Planned(model.pool(), Outputs(TENSOR), torch.device(kind), call, 1).substitute.name
        for kind in ("cpu", "cuda")
    ]
    assert names == ["eager-channels-last", EAGER]
