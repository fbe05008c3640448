"""ResNets on a GPU as torchvision's users have them.

What their training computes, and how weights may change, is tested on the CPU in `test_resnet.py`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from plantune import optimize
from plantune.devices.machine import arch_of
from plantune.models import resnet
from plantune.plans.guess import hand_plan
from plantune.space.search_space import load_search_space

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
# What is allowed beside twice the framework's own error, as a part of the whole: a rounding of each
# value, and tf32's in float32.
ROUNDING = {HALF: 1e-3, BRAIN: 8e-3, FULL: 1e-6}
TF32_ROUNDING = 1e-3


def pool(name):
    """The network that a user has: torchvision's where it is installed."""
    try:
        import torchvision
    except ImportError:
        return getattr(resnet, name)
    return getattr(torchvision.models, name)


@pytest.fixture(params=["ieee", "tf32"])
def precision(request) -> Iterator[str]:
    """What torch rounds factors of float32 to: nothing, or tf32."""
    places = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = request.param
    yield request.param
    for place, was in zip(places, before, strict=True):
        place.fp32_precision = was


@pytest.fixture
def build(randomise):
    def make(name, dtype, **options):
        return randomise(pool(name)(num_classes=40, **options)).eval().to("cuda", dtype)

    return make


def by_hand(module, x):
    """The module with the plan that one would pick without measuring."""
    space = load_search_space(arch_of(x.device))
    graph = optimize(module, x).pool().graph
    return optimize(module, x, plan=hand_plan(graph, space, network="by hand"))


def images(batch, size, dtype=HALF):
    return torch.randn(batch, 3, size, size, device="cuda", dtype=dtype)


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def assert_follows(model, x, rounding=None):
    """The error against fp64 is at most twice the framework's own, and some roundings."""
    module = model.reference
    exact = copy.deepcopy(module).double()(x.double())
    ours, theirs = (off(m(x), exact) for m in (model, module))
    allowed = 2 * theirs + (rounding or ROUNDING[x.dtype])
    assert ours <= allowed, f"error {ours:.3g}, the framework's {theirs:.3g}"


def off(y, exact):
    y, exact = y.detach().double(), exact.detach()
    return float((y - exact).norm() / exact.norm())


class TestSizes:
    """The layers of a ResNet at odd and even sizes, with both orders of an image's axes."""

    @pytest.mark.parametrize("size", [224, 225, 97])
    @pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
    def test_the_frameworks_kernels(self, build, dtype, size):
        x = images(4, size, dtype)
        model = optimize(build("resnet18", dtype), x)
        assert_follows(model, x)
        assert_follows(model, channels_last(x))

    @pytest.mark.parametrize(("dtype", "size"), [(HALF, 225), (BRAIN, 97), (HALF, 224)], ids=str)
    def test_ours(self, build, dtype, size):
        x = images(4, size, dtype)
        model = by_hand(build("resnet18", dtype), x)
        assert_follows(model, x)
        assert_follows(model, channels_last(x))

    def test_both_orders_of_axes_give_the_same(self, build):
        x = images(2, 97)
        model = by_hand(build("resnet18", HALF), x)
        with torch.no_grad():
            assert torch.equal(model(x), model(channels_last(x)))

    @pytest.mark.parametrize("batch", [1, 7, 64])
    def test_batches(self, build, batch):
        x = images(batch, 64)
        assert_follows(by_hand(build("resnet18", HALF), x), x)

    @pytest.mark.parametrize("size", [225, 97])
    def test_float32(self, build, precision, size):
        x = images(2, size, FULL)
        rounding = TF32_ROUNDING if precision == "tf32" else None
        assert_follows(optimize(build("resnet18", FULL), x), x, rounding)

    def test_our_float32(self, build, precision):
        x = images(2, 97, FULL)
        rounding = TF32_ROUNDING if precision == "tf32" else None
        assert_follows(by_hand(build("resnet18", FULL), x), x, rounding)

    @pytest.mark.parametrize("precision", ["tf32"], indirect=True)
    def test_the_precision_may_change_between_calls(self, build, precision):
        x = images(2, 97, FULL)
        model = optimize(build("resnet18", FULL), x)
        assert_follows(model, x, TF32_ROUNDING)
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert_follows(model, x)

    @pytest.mark.parametrize("name", ["resnet34", "resnet50"])
    def test_deeper_ones(self, build, name):
        x = images(2, 97)
        module = build(name, HALF)
        assert_follows(optimize(module, x), x)
        assert_follows(by_hand(module, x), x)


class TestFusion:
    def test_the_original_stays_as_it_is(self, build):
        original, x = build("resnet18", HALF), images(2, 64)
        before = copy.deepcopy(original.state_dict())
        model = by_hand(original, x)
        model(x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        model(x)
        assert original.state_dict().keys() == before.keys()
        for name, value in original.state_dict().items():
            assert torch.equal(value, before[name]), name

    def test_a_convolution_takes_all_that_follows_it(self, build):
        model = by_hand(build("resnet18", HALF), images(2, 64))
        ops = {node.name: node.op for node in model.pool().graph.nodes}
        constants = model.pool().graph.constants
        steps = Counter(
            tuple(ops[name] for name in choice.nodes)
            for choice in model.plan.choices
            if not constants.issuperset(choice.nodes)
        )
        residual = ("conv2d", "mul_channel", "add_channel", "add", "relu")
        assert steps[residual] == 8
        assert not {("add_channel",), ("add",), ("relu",), ("batch_norm",)} & set(steps)


class TestNewWeights:
    """What changes a weight changes the next call."""

    @pytest.fixture
    def x(self):
        return images(2, 64)

    @pytest.fixture
    def model(self, build, x):
        made = by_hand(build("resnet18", HALF), x)
        assert_follows(made, x)
        return made

    def assert_changed(self, model, x, before):
        assert_follows(model, x)
        assert off(model(x), before.double()) > 0.01

    def test_after_an_optimizers_step(self, model, x):
        before = model(x)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        torch.optim.SGD(model.parameters(), lr=1e-2).step()
        self.assert_changed(model, x, before)

    def test_after_load_state_dict(self, build, model, x):
        before, other = model(x), build("resnet18", HALF)
        model.load_state_dict(other.state_dict())
        self.assert_changed(model, x, before)
        assert off(model(x), other.double()(x.double())) <= 2 * ROUNDING[HALF]

    @pytest.mark.parametrize("key", ["conv1.weight", "layer2.0.downsample.0.weight", "fc.weight"])
    def test_after_any_one_of_them(self, model, x, key):
        before = model(x)
        with torch.no_grad():
            model.get_parameter(key).mul_(1.5)
        self.assert_changed(model, x, before)

    @pytest.mark.parametrize("key", ["bn1.running_mean", "layer3.1.bn2.running_var"])
    def test_after_a_statistic(self, model, x, key):
        before = model(x)
        model.get_buffer(key).mul_(2).add_(0.5)
        self.assert_changed(model, x, before)


def test_training_follows_the_framework(build):
    """Batch statistics and running ones, in the graph that is captured."""
    reference, x = build("resnet18", FULL).train(), images(4, 64, FULL)
    model = optimize(reference, x, mode="train")
    for scale in (1.0, 2.0, 3.0):
        y, expected = model(x * scale), reference(x * scale)
        assert off(y.detach(), expected.detach().double()) <= 1e-2
        y.square().sum().backward()
    for name, value in reference.named_buffers():
        ours = dict(model.named_buffers())[name]
        torch.testing.assert_close(ours, value, rtol=1e-2, atol=1e-3)
    model.eval()
    reference.eval()
    assert off(model(x).detach(), reference(x).detach().double()) <= 1e-2


def test_batch_norms_train_as_the_frameworks(build):
    """Kernels of ours: each gradient and statistic within twice the framework's error."""
    theirs, x = build("resnet18", HALF).train(), images(32, 64)
    space = load_search_space(arch_of(x.device))
    graph = optimize(theirs, x, mode="train").pool().graph
    plan = hand_plan(graph, space, network="by hand")
    families = Counter(choice.candidate.family for choice in plan.choices)
    assert families["batch_norm"] == families["batch_norm_grad"] == 20
    ours, exact = optimize(theirs, x, mode="train", plan=plan), copy.deepcopy(theirs).double()
    errors: dict[str, list[float]] = {}
    for count in (1, 2, 3):
        x, dy = images(32, 64), torch.randn(32, 40, device="cuda", dtype=HALF)
        for module in (ours, theirs, exact):
            module.zero_grad()
            module(x.to(next(module.parameters()).dtype)).backward(dy.to(module.fc.weight.dtype))
        assert all(value == count for value in ours.buffers() if not value.is_floating_point())
        wanted = values_of(exact)
        for place, module in enumerate((ours, theirs)):
            for name, value in values_of(module).items():
                errors.setdefault(name, [0.0, 0.0])[place] += off(value, wanted[name]) ** 2
    assert len(errors) == 62 + 40
    for name, (own, framework) in errors.items():
        assert own**0.5 <= 2 * framework**0.5 + ROUNDING[HALF], name


def values_of(module):
    """Gradients and running statistics."""
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    buffers = {name: value for name, value in module.named_buffers() if value.is_floating_point()}
    return {**gradients, **buffers}
