"""The framework's routes keep what they promise, also when they are made beside each other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import compile_tasks

from plantune.devices.host import cxx_compiler
from plantune.measure.racing import routes
from plantune.measure.racing.routes import ROUTES, framework_routes

# What torch itself warns of when inductor is imported.
pytestmark = pytest.mark.filterwarnings("ignore")
COMPILER = pytest.mark.skipif(cxx_compiler() is None, reason="inductor needs a C++ compiler")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return torch.relu(self.conv(x)).mean((2, 3))


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, 3, 8, 8)


def follows(name, arch, module, x):
    """Whether a route's output is the module's again after its weights have changed."""
    near = {"rtol": 1e-2, "atol": 1e-2} if x.is_cuda else {"rtol": 1e-4, "atol": 1e-5}  # tf32
    with torch.no_grad():
        run = ROUTES[arch][name].make(module, x)
        torch.testing.assert_close(run(x), module(x), **near)
        torch.testing.assert_close(run(-x), module(-x), **near)
        before = run(x).clone()
        module.conv.weight.mul_(-3)
        after = run(x)
        assert not torch.allclose(module(x), before, rtol=0.1)
        changed = not torch.equal(after, before)
        assert torch.allclose(after, module(x), **near) == changed
    return changed


@COMPILER
def test_a_frozen_compiled_route_is_frozen_and_a_live_one_beside_it_is_not(x):
    """In either order: what Dynamo compiled for one must not serve the other."""
    module = Net().eval()
    found = [
        follows(name, "cpu", copy.deepcopy(module), x)
        for name in ("compile-default", "compile-frozen", "compile-default")
    ]
    assert found == [True, False, True]


def test_what_tries_many_kernels_uses_its_workers_assembler_and_waits_for_them(x, monkeypatch):
    """Both are torch's own: the test fails if it has them no more."""
    done = []
    monkeypatch.setattr(AsyncCompile, "wait_pool_ready", lambda: done.append("ready"))
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: done.append("ptxas"))
    ROUTES["cuda"]["compile-reduce-overhead"].make(Net().eval(), x)
    assert not done
    ROUTES["cuda"]["compile-max-autotune"].make(Net().eval(), x)
    assert done == ["ptxas", "ready"]


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["cpu", "cuda"])
def test_every_route_keeps_its_promise(arch, x):
    """Those for GPUs run on a CPU here, without graphs."""
    for name, route in ROUTES[arch].items():
        # What torch.jit froze keeps reading some of the parameters' own memory.
        if not name.startswith("torchscript") or not route.frozen:
            assert follows(name, arch, Net().eval(), x) == (route.promise("infer") == "live"), name


@COMPILER
@pytest.mark.gpu
@pytest.mark.slow
def test_every_route_keeps_its_promise_on_a_gpu(x):
    for name, route in ROUTES["cuda"].items():
        if not route.frozen or route.compiles:
            module = Net().eval().cuda()
            found = follows(name, "cuda", module, x.cuda())
            assert found == (route.promise("infer") == "live"), name


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["cpu", "cuda"])
def test_every_route_trains(arch, x):
    for name in framework_routes("cpu" if arch == "cpu" else "sm90", "train"):
        module = Net().train()
        run = ROUTES[arch][name].make(module, x)
        run(x).sum().backward()
        gradient = module.conv.weight.grad.clone()
        module.zero_grad()
        module(x).sum().backward()
        torch.testing.assert_close(gradient, module.conv.weight.grad, rtol=1e-4, atol=1e-5)


def test_no_frozen_route_is_told_that_images_stay_at_one_address():
    """Inductor folds such images into constants when it freezes."""
    assert not any(
        route.static and route.frozen for kind in ROUTES.values() for route in kind.values()
    )


def test_the_best_route_asks_for_what_this_torch_has_alone(monkeypatch, x):
    asked = {}

    def compiled(function, options, dynamic):
        asked.update(options)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["max_autotune"])
    routes._best(Net().eval(), x)
    assert asked == {"max_autotune": True}


def test_routes_and_promises_of_an_arch():
    assert set(framework_routes("sm80")) == set(framework_routes("sm90")) == set(ROUTES["cuda"])
    assert "compile-frozen" not in framework_routes("cpu", "train")
    torchscript = ROUTES["cpu"]["torchscript"]
    assert (
        torchscript.promise("infer") == ROUTES["cuda"]["compile-best"].promise("infer") == "frozen"
    )
    assert torchscript.promise("train") == "live"
    assert ROUTES["cuda"]["cuda-graph"].promise("infer") == "live"
