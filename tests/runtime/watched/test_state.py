"""What a module is made of besides its weights: each change counts in the next call."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from plantune import check, optimize
from plantune.errors import PlantuneError
from plantune.runtime.watched import epoch


class Scaled(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self._gain = gain

    def forward(self, x):
        return self.conv(x) * self.scale()

    def scale(self):
        gain = self._gain
        while not isinstance(gain, (int, float, np.number)):
            gain = next(iter(gain.values() if isinstance(gain, dict) else gain))
        return float(gain)


# By the interpreter's own watchers where it has them, and without.
WAYS = ["compared", *(["counted"] if sys.version_info >= (3, 12) else [])]


@pytest.fixture(params=WAYS, autouse=True)
def _watching(request, monkeypatch):
    if request.param == "compared":
        monkeypatch.setattr(epoch, "_watcher", lambda: None)
    else:
        assert epoch._watcher() is not None


@pytest.fixture(autouse=True)
def _planned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def follows(images, close):
    """Checks that a change counts in the next call, and that the call after it is right, too."""

    def check(model, change):
        before = model(images)
        model(images)
        change(model)
        for _ in range(2):
            after = model(images)
            close(after, model.reference(images))
        assert after.shape != before.shape or not torch.allclose(after, before)
        assert model.last_call().how == "planned"

    return check


def set_gain(value):
    return lambda m: setattr(m, "_gain", value)


class TestAttributes:
    @pytest.mark.parametrize("old", [1, 1.0, (1.0,), [1.0], {"a": 1.0}, {1.0}, np.float32(1)])
    def test_a_private_one_set(self, old, images, follows):
        follows(optimize(Scaled(old).eval(), images), set_gain(3.0))

    @pytest.mark.parametrize(
        ("old", "change"),
        [
            ([1.0], lambda gain: gain.__setitem__(0, 3.0)),
            ([1.0], lambda gain: gain.insert(0, 3.0)),
            ([[1.0]], lambda gain: gain[0].__setitem__(0, 3.0)),
            (([1.0],), lambda gain: gain[0].__setitem__(0, 3.0)),
            ({"a": 1.0}, lambda gain: gain.update(a=3.0)),
            ({"a": [1.0]}, lambda gain: gain["a"].__setitem__(0, 3.0)),
            (OrderedDict(a=1.0), lambda gain: gain.update(a=np.float64(3))),
            ({1.0}, lambda gain: (gain.clear(), gain.add(3.0))),
            (deque([1.0]), lambda gain: gain.__setitem__(0, 3.0)),
        ],
    )
    def test_a_container_changed_inside(self, old, change, images, follows):
        follows(optimize(Scaled(old).eval(), images), lambda m: change(m._gain))

    def test_through_the_dict_of_attributes(self, images, follows):
        model = optimize(Scaled(1.0).eval(), images)
        follows(model, lambda m: vars(m.reference).update(_gain=3.0))

    def test_the_stride_as_a_list(self, named, images, follows):
        model = optimize(named(conv=nn.Conv2d(3, 4, 3)), images)
        model.conv.stride = [1, 1]
        follows(model, lambda m: m.conv.stride.__setitem__(slice(None), [2, 2]))

    def test_many_changes_in_a_row(self, named, images, follows):
        """Python specialises code that runs often; a change is seen all the same."""
        model = optimize(named(conv=nn.Conv2d(3, 4, 3)), images)
        for padding in [0, 1, 2] * 10:
            model.conv.padding = (padding, padding)
            assert model(images).shape[-1] == 62 + 2 * padding

    def test_a_forward_that_is_replaced(self, named, images, follows):
        model = optimize(named(conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU()), images)
        plain = model.conv.forward
        follows(model, lambda m: setattr(m.conv, "forward", lambda x: plain(x) * 2.0))
        follows(model, lambda m: delattr(m.conv, "forward"))

    def test_one_that_the_graph_does_not_read_costs_no_new_program(self, images):
        model = optimize(Scaled(1.0).eval(), images)
        pool = model.pool()
        model.seen = 5
        model(images)
        assert model.pool() is pool

    def test_what_nothing_reports_counts_after_a_refresh(self, images, follows):
        foreign = types.SimpleNamespace(gain=1.0)
        module = Scaled(1.0).eval()
        module.scale = lambda: foreign.gain
        model = optimize(module, images)

        def change(m):
            foreign.gain = 3.0
            m.refresh()

        follows(model, change)


class TestReplacedForward:
    """As adapters do: a function in the place of a child's forward holds the child."""

    @pytest.fixture
    def adapted(self, named, randomise):
        module = randomise(named(conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU()))
        down = nn.Conv2d(3, 4, 3)
        module.conv.add_module("down", down)
        plain = module.conv.forward

        def forward(x, scale=2.0):
            return plain(x) + down(x) * scale

        module.conv.forward = forward
        return module

    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_it_counts_and_the_copys_own_weights_do(self, mode, adapted, images, close):
        adapted.train(mode == "train")
        model = optimize(adapted, images, mode=mode)
        close(model(images), adapted(images))
        expected = model(images).detach()
        with torch.no_grad():
            for parameter in adapted.parameters():
                parameter.zero_()
        close(model(images), expected)
        with torch.no_grad():
            model.conv.weight.zero_()
            model.conv.bias.zero_()
            model.conv.down.weight.zero_()
            model.conv.down.bias.fill_(1)
        close(model(images), torch.full_like(expected, 2.0))
        assert model.last_call().how == "planned"

    def test_a_copy_of_the_tuned_module(self, adapted, images, close):
        model = optimize(adapted, images)
        other = copy.deepcopy(model)
        expected = model(images)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        close(other(images), expected)
        close(other(images), other.reference(images))

    def test_the_proof_of_a_plan_uses_the_copys_weights(self, adapted, images):
        check(optimize(adapted, images), images)


class TestHooks:
    @pytest.mark.parametrize("replaced", [False, True])
    def test_one_that_comes_and_goes(self, replaced, named, images, close):
        model = optimize(named(conv=nn.Conv2d(3, 4, 3)), images, fallback="silent")
        before = model(images)
        hook = lambda m, args, out: out * 2  # noqa: E731
        if replaced:
            model.conv._forward_hooks = OrderedDict({1: hook})
        else:
            handle = model.conv.register_forward_hook(hook)
        close(model(images), before * 2)
        assert model.last_call().how == "eager"
        assert "hooks" in model.last_call().reason
        model.conv._forward_hooks.clear() if replaced else handle.remove()
        close(model(images), before)
        assert model.last_call().how == "planned"


class TestModes:
    """Each submodule keeps its own."""

    @pytest.fixture
    def normed(self, named, randomise):
        layers = {"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "relu": nn.ReLU()}
        return randomise(named(**layers))

    def same(self, model, module, images, close):
        with torch.no_grad():
            close(model(images), module(images))
        for (name, ours), theirs in zip(model.named_buffers(), module.buffers(), strict=True):
            close(ours, theirs), name
        assert model.last_call().how == "planned"

    @pytest.mark.parametrize("mode", ["infer", "train"])
    @pytest.mark.parametrize("training", [False, True])
    def test_a_norm_in_the_other_mode(self, mode, training, normed, images, close):
        normed.train(mode == "train").norm.train(training)
        model = optimize(normed, images, mode=mode)
        assert model.norm.training == training
        self.same(model, normed, images, close)
        for either in (model, normed):
            either.norm.train(not training)
        self.same(model, normed, images, close)

    def test_train_and_eval_take_turns(self, normed, images, close):
        model = optimize(normed, images, mode="train")
        pools = set()
        for training in (True, False) * 3:
            for either in (model, normed):
                either.train(training)
            self.same(model, normed, images, close)
            pools.add(model.pool())
        assert len(pools) == 2

    def test_the_modules_own_train_is_called(self, images, normed):
        class Frozen(nn.Sequential):
            def train(self, mode=True):
                super().train(mode)
                self.norm.eval()
                return self

        model = optimize(Frozen(OrderedDict(normed.named_children())), images, mode="train")
        assert model.train() is model
        assert model.training
        assert not model.norm.training

    def test_without_gradients_there_is_no_gradient_graph(self, normed, images):
        model = optimize(normed.train(), images, mode="train")
        with torch.no_grad():
            model(images)
        assert [program.graph.backward_from for program in model._calls.programs()] == [None]

    def test_inference_in_training_mode_is_said(self, normed, images):
        with pytest.warns(UserWarning, match=r"training mode.*eval\(\)"):
            optimize(normed.train(), images)


class TestOutputs:
    @pytest.mark.parametrize("mode", ["infer", "train"])
    @pytest.mark.parametrize(
        "made",
        [lambda y: (y,), lambda y: [y, y * 2.0], lambda y: {"y": y, "aux": (None, [y * 2.0], 3)}],
    )
    def test_the_structure_is_the_modules(self, mode, made, images, close):
        class Made(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 3)

            def forward(self, x):
                return made(self.conv(x))

        module = Made().train(mode == "train")
        got, expected = optimize(module, images, mode=mode)(images), module(images)
        flat = [torch.utils._pytree.tree_flatten(value) for value in (got, expected)]
        assert flat[0][1] == flat[1][1]
        for ours, theirs in zip(flat[0][0], flat[1][0], strict=True):
            close(ours, theirs) if isinstance(theirs, torch.Tensor) else None
            assert isinstance(theirs, torch.Tensor) or ours == theirs


class TestParametrized:
    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_a_weight_follows_its_original(self, mode, named, images, close):
        class Halved(nn.Module):
            def forward(self, w):
                return w * 0.5

        module = named(conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU()).train(mode == "train")
        nn.utils.parametrize.register_parametrization(module.conv, "weight", Halved())
        model = optimize(module, images, mode=mode)
        close(model(images), module(images))
        assert model.last_call().how == "planned"
        with torch.no_grad():
            model.conv.parametrizations.weight.original.mul_(3)
        close(model(images), model.reference(images))

    def test_by_an_op_of_torchs_own(self, named, images, close):
        module = named(conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU())
        nn.utils.parametrizations.weight_norm(module.conv)
        model = optimize(module, images)
        for _ in range(2):
            close(model(images), module(images))
            assert model.last_call().how == "planned"
            for parameter in model.parameters():
                parameter.data.uniform_(0.5, 1.5)
            module.load_state_dict(model.state_dict())
            model.refresh()

    def test_what_cannot_be_planned_runs_in_the_framework(self, named, images, close):
        class Branching(nn.Module):
            def forward(self, w):
                return w if w.sum() > 0 else -w

        module = named(conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU())
        nn.utils.parametrize.register_parametrization(module.conv, "weight", Branching())
        model = optimize(module, images, fallback="silent")
        close(model(images), module(images))
        assert "parametrized" in model.last_call().reason


def test_averaged_weights_get_statistics_of_their_own(images, close):
    """As torch.optim.swa_utils has it: batch norms without a momentum, which are set back."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    model = optimize(module, images, mode="train", fallback="silent")
    model(images)
    for either in (module, model):
        torch.optim.swa_utils.update_bn([images, 2 * images], either)
    close(model[1].running_mean, module[1].running_mean)


def test_what_becomes_impossible_later_is_an_error_if_that_is_asked_for(images):
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    model = optimize(module, images, fallback="error")
    model[1] = Branching()
    with pytest.raises(PlantuneError, match="changed in a way without a plan"):
        model(images)


class TestCopiesOfWeights:
    """What a CPU's kernels keep of weights is renewed after a refresh, whatever changed."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda p: p.data.view(-1)[7].add_(5),
            lambda p: setattr(p, "data", p.data.transpose(0, 1)),
            lambda p: p.data.transpose_(2, 3),
            lambda p: p.data.as_strided_(p.shape, (0, 9, 3, 1)),
            lambda p: p.detach().numpy().fill(0.5),
            lambda p: torch.from_dlpack(p.detach()).mul_(3),
        ],
        ids=[
            "one element",
            "transposed data",
            "transposed in place",
            "as strided",
            "numpy",
            "dlpack",
        ],
    )
    def test_writes_that_leave_no_trace(self, change, named, images, tuned, close):
        module = named(conv=nn.Conv2d(3, 3, 3), relu=nn.ReLU())
        model = tuned(module, images, plan="hand")
        model(images)
        with torch.no_grad():
            change(model.conv.weight)
        model.refresh()
        close(model(images), copy.deepcopy(model.reference)(images))
