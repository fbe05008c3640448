"""ResNets as torchvision's users have them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.models import resnet

# Of a gradient's norm: eager itself is off by up to 0.02 here.
JUMPS = 0.05
# A block of each form once: as torchvision's deeper ones repeat them.
SHALLOW = {"basic": resnet.BasicBlock, "bottleneck": resnet.Bottleneck}
DEPTHS = (1, 2, 1, 1)


def network(name):
    if name in SHALLOW:
        return resnet.ResNet(SHALLOW[name], DEPTHS, num_classes=10, in_channels=3)
    return getattr(resnet, name)(num_classes=10)


@pytest.fixture(scope="module")
def build(randomise):
    return lambda name: randomise(network(name))


@pytest.fixture(scope="module")
def x():
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def statistics(module):
    return dict(module.named_buffers())


def everything(module):
    """All that a conversion might change in a module, by value."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "tensors": {name: (id(t), t._version, t.detach().clone()) for name, t in tensors.items()},
        "gradients": {name: p.grad.clone() for name, p in module.named_parameters()},
        "wanted": {name: p.requires_grad for name, p in module.named_parameters()},
        "modes": {name: m.training for name, m in module.named_modules()},
        "attributes": {name: list(vars(m)) for name, m in module.named_modules()},
        "hooks": {name: list(m._forward_hooks) for name, m in module.named_modules()},
    }


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, tuple):
        return all(same(a, b) for a, b in zip(first, second, strict=True))
    return first == second


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("resnet18", "infer"),
        ("resnet18", "train"),
        ("resnet34", "infer"),
        ("resnet50", "train"),
        pytest.param("resnet34", "train", marks=pytest.mark.slow),
        pytest.param("resnet50", "infer", marks=pytest.mark.slow),
    ],
)
def test_one_call_converts_it_and_leaves_the_original_alone(name, mode, build, x):
    original = build(name).train(mode == "train")
    original(x).square().sum().backward()
    original.layer3.eval()
    original.conv1.weight.requires_grad_(False)
    before = everything(original)
    model = optimize(original, x, mode=mode)
    y = model(x)
    if mode == "train":
        y.sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert same(everything(original), before)
    for (key, ours), theirs in zip(
        model.state_dict().items(), original.state_dict().values(), strict=True
    ):
        assert ours.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr(), key


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 97),
        ("resnet50", 64),
        pytest.param("resnet18", 224, marks=pytest.mark.slow),
        pytest.param("resnet50", 225, marks=pytest.mark.slow),
    ],
)
def test_eval_is_within_the_bound(name, size, plan, build, tuned, exact, within_bound):
    """Norms are folded into the convolutions, residual and ReLU fused after them."""
    reference = build(name).eval()
    x = torch.randn(2, 3, size, size)
    model = tuned(reference, x, plan=plan)
    assert "batch_norm" not in {node.op for node in model.pool().graph.nodes}
    with torch.no_grad():
        found = [{"y": m(v)} for m, v in ((reference, x), (exact(reference), x.double()))]
    before = {key: value.clone() for key, value in statistics(model).items()}
    within_bound({"y": model(x)}, *found)
    assert same(statistics(model), before)


def test_the_hand_picked_plan_fuses_the_residual(build, tuned, x):
    model = tuned(build("resnet18").eval(), x, plan="hand")
    ops = {node.name: node.op for node in model.pool().graph.nodes}
    steps = {tuple(ops[name] for name in choice.nodes) for choice in model.plan.choices}
    assert ("conv2d", "add_channel", "add", "relu") in steps


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("basic", True),
        ("basic", False),
        ("bottleneck", True),
        pytest.param("resnet50", True, marks=pytest.mark.slow),
        pytest.param("resnet50", False, marks=pytest.mark.slow),
    ],
)
def test_gradients_in_fp64_are_the_frameworks(name, training, plan, build, tuned, results, x):
    """Batch statistics forward and backward; in eval mode norms are linear and still learn.

    In fp64, since gradients of so many ReLUs jump where a rounding of fp32 changes a sign.
    """
    reference, x = build(name).double().train(training), x.double()
    model = tuned(reference, x, "train", plan).train(training)
    reference.train(training)
    got, expected = (results(m, x, wrt_input=plan == "framework") for m in (model, reference))
    for key, value in expected.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(got[key], value, rtol=1e-7, atol=1e-10 * scale)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("resnet18", "hand"),
        ("resnet50", "framework"),
        pytest.param("resnet50", "hand", marks=pytest.mark.slow),
    ],
)
def test_gradients_in_fp32_are_within_the_bound(
    name, plan, build, tuned, exact, results, within_bound
):
    """The output in train mode strictly, gradients as whole tensors and but for such jumps."""
    reference = build(name).train()
    x = torch.randn(4, 3, 64, 64)
    model = tuned(reference, x, "train", plan)
    pairs = ((model, x), (reference, x), (exact(reference), x.double()))
    found = [results(m, v) for m, v in pairs]
    within_bound(*({"y": each.pop("the output")} for each in found))
    for key, true in found[2].items():
        error, own = ((each[key].double() - true).norm() / true.norm() for each in found[:2])
        assert error <= 2 * own + JUMPS, key


def test_running_statistics_follow_the_frameworks_over_several_steps(plan, build, tuned, x, close):
    """Running mean, unbiased running variance, and the count of batches."""
    reference = build("basic").train()
    model = tuned(reference, x, "train", plan)
    for step in range(1, 4):
        batch = torch.randn(x.shape) * step
        expected, got = reference(batch), model(batch)
        close(got, expected)
        for name, value in statistics(reference).items():
            close(statistics(model)[name], value)
        assert model.bn1.num_batches_tracked == step
    close(model.eval()(x), reference.eval()(x))


def test_statistics_are_updated_without_gradients_too(build, tuned, x, close):
    reference = build("basic").train()
    model = tuned(reference, x, "train")
    with torch.no_grad():
        close(model(x), reference(x))
    close(model.layer4[0].bn2.running_var, reference.layer4[0].bn2.running_var)


def test_eval_after_training_uses_the_new_statistics(plan, build, tuned, x, close):
    """Never stale, also where the folded weights of an earlier eval call are kept."""
    reference = build("basic").eval()
    model = tuned(reference, x, "train", plan)
    model.eval()
    reference.eval()
    with torch.no_grad():
        early = model(x)
        close(early, reference(x))
        for module in (model, reference):
            module.train()
            for scale in (2.0, 3.0):
                module(x * scale + 1)
            module.eval()
        late = model(x)
    close(late, reference(x).detach())
    assert not torch.allclose(late, early, rtol=1e-2)


def test_a_changed_momentum_counts(build, tuned, x, close):
    reference = build("basic").train()
    model = tuned(reference, x, "train")
    model(x)
    reference(x)
    for module in (*model.modules(), *reference.modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.5
    model(x + 1)
    reference(x + 1)
    close(model.bn1.running_mean, reference.bn1.running_mean)


def test_frozen_norms_in_train_mode_keep_their_statistics(build, tuned, x, close, results):
    """The usual way to fine-tune small batches: norms in eval mode, everything else training."""
    reference, x = build("basic").double().train(), x.double()
    model = tuned(reference, x, "train")
    model(x)
    reference(x)
    for module in (*model.modules(), *reference.modules()):
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    before = {key: value.clone() for key, value in statistics(model).items()}
    got, expected = results(model, x), results(reference, x)
    for name, value in expected.items():
        close(got[name], value)
    assert same(statistics(model), before)


@pytest.fixture(scope="module")
def changed(build, tuned, x):
    """What `model` is in each test, with the weights that it begins with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = tuned(build("resnet18").eval(), x, plan="hand")
    return made, copy.deepcopy(made.state_dict())


@pytest.fixture
def model(changed, x, close):
    made, state = changed
    made.load_state_dict(state)
    close(made(x), made.reference(x).detach())
    return made


class TestNewWeights:
    """Whatever way weights change, the next call uses them. With folded, prepacked weights."""

    def check(self, model, x, close, before):
        after = model(x)
        close(after, model.reference(x).detach())
        assert not torch.allclose(after, before, rtol=1e-3)

    @pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
    def test_after_an_optimizers_step(self, model, x, close, make):
        before = model(x)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        make(model.parameters(), lr=1e-2).step()
        self.check(model, x, close, before)

    def test_after_load_state_dict(self, model, x, close, build):
        before = model(x)
        other = build("resnet18").eval()
        model.load_state_dict(other.state_dict())
        self.check(model, x, close, before)
        close(model(x), other(x).detach())

    def test_after_load_state_dict_with_assign(self, model, x, close, build):
        before = model(x)
        other = build("resnet18").eval()
        state = copy.deepcopy(other.state_dict())
        model.load_state_dict(state, assign=True)
        assert model.conv1.weight.data_ptr() == state["conv1.weight"].data_ptr()
        self.check(model, x, close, before)
        close(model(x), other(x).detach())

    @pytest.mark.parametrize(
        "key",
        [
            "conv1.weight",
            "bn1.weight",
            "layer2.0.bn2.bias",
            "layer2.0.downsample.1.weight",
            "layer4.1.conv2.weight",
            "fc.weight",
            "fc.bias",
        ],
    )
    def test_after_copy_into_any_one_of_them(self, model, x, close, key):
        before = model(x)
        with torch.no_grad():
            parameter = model.get_parameter(key)
            parameter.copy_(parameter * 2 + 0.1)
        self.check(model, x, close, before)

    @pytest.mark.parametrize("key", ["bn1.running_mean", "layer3.1.bn2.running_var"])
    def test_after_a_statistic_is_set(self, model, x, close, key):
        before = model(x)
        model.get_buffer(key).mul_(2).add_(0.5)
        self.check(model, x, close, before)

    def test_after_writes_through_data_once_refresh_is_called(self, model, x, close):
        before = model(x)
        for parameter in model.parameters():
            parameter.data.mul_(1.1)
        model.refresh(weights_only=True)
        self.check(model, x, close, before)

    def test_after_data_is_replaced(self, model, x, close):
        before = model(x)
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.1
        self.check(model, x, close, before)

    def test_after_a_hidden_write_once_refresh_is_called(self, model, x, close):
        """A single element written through .data leaves no trace: refresh says so."""
        before = model(x)
        model.conv1.weight.data[5, 1, 3, 2] = 1e3
        model.refresh()
        self.check(model, x, close, before)
