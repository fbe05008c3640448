"""The tuned module stands in for the original."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, weight_norm

from plantune import UnplannedCall, optimize
from plantune.errors import UnsupportedModule


class Policy(nn.Module):
    n_actions = 4
    limit = 2

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, self.n_actions)
        self.gain = 1.0
        self.seen = 0

    def forward(self, x):
        return self.body(x) * self.gain

    def act(self, x):
        self.seen += 1
        return self(x).argmax(-1)

    @property
    def size(self):
        return self.body.weight.numel()

    @staticmethod
    def kind():
        return "policy"

    def extra_repr(self):
        return super().extra_repr() + "a policy"

    def described(self):
        return f"{super().__repr__()} of {self.n_actions}"


@pytest.fixture
def x():
    return torch.randn(5, 3)


@pytest.fixture
def policy():
    return Policy().eval()


@pytest.fixture
def model(policy, x):
    return optimize(policy, x)


def test_attributes_are_the_originals(model):
    assert (model.n_actions, model.gain, model.size, model.kind()) == (4, 1.0, 12, "policy")
    assert hasattr(model, "act")
    assert not hasattr(model, "missing")
    with pytest.raises(AttributeError, match="'Policy' object has no attribute 'missing'"):
        model.missing  # noqa: B018
    assert {"act", "n_actions", "body", "refresh"} <= set(dir(model))


def test_a_method_runs_from_the_plan(model, policy, x):
    assert torch.equal(model.act(x), policy.act(x))
    assert model.last_call().how == "planned"
    assert (model.seen, model.reference.seen) == (1, 1)


def test_a_method_that_needs_its_class(model):
    assert "of 4" in model.described()


def test_setting_does_what_it_did(model, policy, x, close):
    before = model(x)
    model.gain = 3.0
    close(model(x), before * 3)
    assert model.reference.gain == 3.0
    model.body = nn.Linear(3, 2)
    assert model(x).shape == (5, 2)
    assert "body.weight" in dict(model.named_parameters())
    model.extra = nn.Parameter(torch.ones(1))
    assert model.reference.extra is model.extra
    del model.extra
    assert not hasattr(model.reference, "extra")


def test_setting_what_the_tuned_module_needs_itself_raises(model):
    with pytest.raises(AttributeError, match="'plan' is the tuned module's own"):
        model.plan = 3


def test_items_are_the_originals(x):
    model = optimize(nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), x)
    assert len(model) == 2
    assert [*model] == [model[0], model[1]]
    assert isinstance(model[-1], nn.ReLU)
    assert model


@pytest.mark.filterwarnings("error")
def test_other_arguments_than_planned(x, close):
    class Flagged(nn.Module):
        def forward(self, x, scale=1.0):
            return torch.relu(x) * scale

    model = optimize(Flagged().eval(), x)
    with pytest.warns(UnplannedCall, match=r"got \(5, 3\), 2\.0"):
        close(model(x, scale=2.0), torch.relu(x) * 2)
    close(model(x), torch.relu(x))


def test_what_cannot_be_traced_is_named_at_once_with_its_line(policy, x):
    policy.forward = lambda v: v * policy.body(v).sum().item()
    line = inspect.getsourcelines(policy.forward)[1]
    with pytest.raises(UnsupportedModule, match=rf"values.*{__file__}:{line}"):
        optimize(policy, x)


def test_passes_that_wait_for_their_backward_pass_are_bounded(policy, x, close):
    model = optimize(policy, x, mode="train", fallback="silent")
    losses = [model(x + i).square().sum() for i in range(20)]
    assert model.stats().instances == 8
    assert "8 passes wait for their backward pass" in model.last_call().reason
    expected = [policy(x + i).square().sum() for i in range(20)]
    for module, sums in ((model, losses), (policy, expected)):
        module.zero_grad()
        torch.stack(sums).sum().backward()
    for ours, theirs in zip(model.parameters(), policy.parameters(), strict=True):
        close(ours.grad, theirs.grad)
    model(x)
    assert (model.last_call().how, model.stats().instances) == ("planned", 8)


class OwnWays(nn.Module):
    """Does what nn.Module does in its own way, as libraries do."""

    _version = 3

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.tag, self.moved = nn.Linear(3, 3), nn.BatchNorm1d(3), "a", 0
        self.register_state_dict_post_hook(OwnWays.add_extra)

    @staticmethod
    def add_extra(module, state, prefix, metadata):
        state[prefix + "extra"] = torch.ones(1)

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        state.pop(prefix + "extra", None)
        if metadata.get("version") is None:  # of before this layer had a name of its own
            for name in ("weight", "bias"):
                state[f"{prefix}body.{name}"] = state.pop(prefix + name)
        super()._load_from_state_dict(state, prefix, metadata, *others)

    def get_extra_state(self):
        return {"tag": self.tag}

    def set_extra_state(self, state):
        self.tag = state["tag"]

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def _apply(self, *args, **kwargs):
        self.moved += 1
        return super()._apply(*args, **kwargs)

    def parameters(self, recurse=True):
        return self.body.parameters(recurse)

    def requires_grad_(self, requires_grad=True):
        self.body.bias.requires_grad_(requires_grad)
        return self

    def forward(self, x):
        return self.norm(self.body(x))


class TestOwnWays:
    """Of the reference's class: the tuned module takes them, alone and inside of another one."""

    @pytest.fixture(params=["alone", "inside"])
    def both(self, request, x):
        def make():
            torch.manual_seed(3)
            return OwnWays().eval()

        tuned, plain = optimize(make(), x), make()
        if request.param == "inside":
            tuned, plain = nn.Sequential(tuned), nn.Sequential(plain)
        return tuned, plain

    def test_what_is_saved(self, both):
        ours, theirs = (module.state_dict() for module in both)
        assert [*ours] == [*theirs]
        assert ours._metadata == theirs._metadata

    def test_an_old_file_is_loaded(self, both, x, close):
        old = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
        prefix = "0." if isinstance(both[1], nn.Sequential) else ""
        for module in both:
            found = module.load_state_dict({prefix + k: v for k, v in old.items()}, strict=False)
            assert found.unexpected_keys == []
        close(both[0](x), both[1](x))

    def test_a_new_file_is_loaded(self, both):
        for module in both:
            own = module if isinstance(module, OwnWays) or hasattr(module, "tag") else module[0]
            state = module.state_dict()
            own.tag = "b"
            module.load_state_dict(state)
            assert own.tag == "a"

    def test_modes_moves_and_parameters(self, both):
        found = []
        for module in both:
            own = module if hasattr(module, "tag") else module[0]
            module.train()
            module.double()
            own.requires_grad_(False)
            found.append((own.training, own.norm.training, own.moved))
            found[-1] += (len([*own.parameters()]), [p.requires_grad for p in own.parameters()])
        assert found[0] == found[1]


class TestContainers:
    @pytest.fixture
    def layers(self, x):
        return optimize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval(), x)

    def test_layers_come_and_go(self, layers, x, close):
        head = layers[2]
        del layers[1]
        assert [*layers.state_dict()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert [*dict(layers.named_modules())] == ["", "0", "1"]
        close(layers(x), head(layers[0](x)))
        layers[1] = nn.ReLU()
        layers.insert(0, nn.Tanh())
        assert isinstance(layers.pop(2), nn.ReLU)
        close(layers(x), layers[1](x.tanh()))
        assert head not in layers
        assert layers.last_call().how == "planned"


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "change",
    [weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5)],
    ids=["weight_norm", "pruned"],
)
def test_what_hooks_computed_last_is_no_obstacle(change, policy, x, close):
    """It has a history, which `copy.deepcopy` refuses."""
    change(policy.body)
    policy(x)
    model = optimize(policy, x, fallback="silent")
    close(model(x), policy(x))
    with torch.no_grad():
        for module in (model, policy):
            next(module.body.parameters()).mul_(2)
    close(model(x), policy(x))


def test_what_a_forward_appends_to_a_list_of_the_caller_is_not_lost(x):
    class Appends(nn.Module):
        def forward(self, x, seen):
            seen.append(x.relu())
            return x.tanh()

    with pytest.raises(UnsupportedModule, match="changes a list or dict among its arguments"):
        optimize(Appends(), x, [])


def test_a_layer_without_a_shape_yet_is_named(x):
    with pytest.raises(UnsupportedModule, match=r"0\.weight of a lazy layer has no shape"):
        optimize(nn.Sequential(nn.LazyLinear(2)), x)


def test_sparse_gradients_are_refused_at_once():
    with pytest.raises(UnsupportedModule, match="sparse gradients"):
        optimize(nn.Embedding(5, 3, sparse=True), torch.tensor([1]), mode="train")


def test_an_input_that_is_not_strided_runs_through_the_framework(model, policy, x, close):
    model(x)
    with pytest.warns(UnplannedCall, match="sparse_coo"):
        close(model(x.to_sparse()), policy(x.to_sparse()))
