"""Weights that change after the first call."""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.runtime.module import UnplannedCall
from plantune.runtime.watched.live_state import LiveState, OwnedTensors


@pytest.fixture
def model(small, images, tuned):
    """With prepacked weights, which a change must renew."""
    made = tuned(small, images, plan="hand")
    made(images)
    return made


@pytest.fixture
def follows(images, close):
    """Checks that a module computes what its reference does, and not what it did before."""

    def check(model, before):
        after = model(images)
        with torch.no_grad():
            close(after, model.reference(images))
        assert not torch.allclose(after, before, rtol=1e-4)

    return check


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class TestReplaced:
    @pytest.mark.parametrize("name", ["conv1.weight", "fixup_bias1a", "se.excite.2.bias"])
    def test_a_parameter(self, name, model, images, follows):
        before = model(images)
        path, _, key = f"layers.0.0.{name}".rpartition(".")
        old = model.get_parameter(f"layers.0.0.{name}")
        setattr(model.get_submodule(path), key, nn.Parameter(torch.randn_like(old)))
        follows(model, before)

    def test_a_parameter_in_training_gets_the_gradient(self, small, images, tuned, results, close):
        model = tuned(small, images, "train", "hand")
        results(model, images)
        for module in (model, small):
            torch.manual_seed(1)
            conv = module.layers[1][0].conv1
            conv.weight = nn.Parameter(torch.randn_like(conv.weight) * 0.1)
        expected = results(small, images)
        for name, value in results(model, images).items():
            close(value, expected[name])

    def test_a_submodule(self, model, images, follows):
        before = model(images)
        model.layers[2] = copy.deepcopy(model.layers[2])
        nn.init.normal_(model.layers[2][0].conv1.weight, std=0.1)
        follows(model, before)
        assert model.reference.layers[2] is model.layers[2]

    def test_the_head_by_one_of_another_size(self, named, images, tuned, close):
        body = {"conv": nn.Conv2d(3, 8, 3), "relu": nn.ReLU(), "flatten": nn.Flatten()}
        model = tuned(named(**body, fc=nn.Linear(8 * 62 * 62, 10)), images)
        assert model(images).shape == (2, 10)
        model.fc = nn.Linear(8 * 62 * 62, 7)
        assert model(images).shape == (2, 7)
        close(model(images), model.reference(images))

    def test_weights_by_ones_of_another_size(self, named, images, tuned, close):
        model = tuned(named(conv=nn.Conv2d(3, 8, 3), relu=nn.ReLU()), images, plan="hand")
        assert model(images).shape == (2, 8, 62, 62)
        model.conv.weight = nn.Parameter(torch.randn(5, 3, 3, 3))
        model.conv.bias = nn.Parameter(torch.randn(5))
        assert model(images).shape == (2, 5, 62, 62)
        close(model(images), model.reference(images))

    def test_a_setting_of_a_layer(self, named, images, tuned, close):
        model = tuned(named(conv=nn.Conv2d(3, 8, 3)), images)
        assert model(images).shape == (2, 8, 62, 62)
        model.conv.padding = (1, 1)
        assert model(images).shape == (2, 8, 64, 64)
        close(model(images), model.reference(images))

    def test_a_layer_added(self, named, images, tuned, close):
        model = tuned(named(conv=nn.Conv2d(3, 8, 3)), images)
        assert model(images).min() < 0
        model.add_module("relu", nn.ReLU())
        assert model(images).min() == 0
        close(model(images), model.reference(images))

    def test_a_layer_that_only_torch_knows(self, named, images, tuned, close):
        model = tuned(named(conv=nn.Conv2d(3, 8, 3), last=nn.ReLU()), images)
        model.last = nn.Hardswish()
        close(model(images), model.reference(images))

    def test_what_cannot_be_traced_is_named_once_and_runs_in_the_framework(
        self, model, images, close
    ):
        model.layers[3] = nn.Sequential(Branching())
        with pytest.warns(UnplannedCall, match=r"layers\.3.*value"):
            after = model(images)
        with torch.no_grad():
            close(after, model.reference(images))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(images)

    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_weights_tied_and_untied(self, mode, named, images, tuned, close, results):
        module = named(first=nn.Conv2d(3, 3, 3, bias=False), last=nn.Conv2d(3, 3, 3, bias=False))
        model = tuned(module, images, mode)
        for tied in (True, False, True, False):
            weight = model.first.weight
            model.last.weight = weight if tied else nn.Parameter(torch.randn_like(weight))
            assert len(list(model.parameters())) == 2 - tied
            close(model(images), model.reference(images))
            if mode == "train":
                got, expected = results(model, images), results(model.reference, images)
                for name, value in expected.items():
                    close(got[name], value)

    def test_parameters_for_one_call_alone(self, small, images, close):
        model = optimize(small, images, mode="train", fallback="silent")
        swapped = {name: p.detach() * 1.1 for name, p in small.named_parameters()}
        swapped["stem.1.weight"].requires_grad_()
        outputs = [torch.func.functional_call(m, swapped, (images,)) for m in (model, small)]
        close(*outputs)
        gradients = [torch.autograd.grad(y.sum(), swapped["stem.1.weight"])[0] for y in outputs]
        close(*gradients)
        close(model(images), small(images))


class TestBuffersThatPassesUpdate:
    """They feed no constant, but a pass must update the ones that are there."""

    @pytest.fixture(params=["infer", "train"])
    def normed(self, request, named, images, tuned):
        module = named(conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), relu=nn.ReLU())
        model = tuned(module, images, request.param)
        model.norm.train()
        for _ in range(2):
            model(images)
        return model

    def test_replaced(self, normed, images, close):
        normed.norm.running_var = torch.full((8,), 5.0)
        other = copy.deepcopy(normed.reference)
        close(normed(images), other(images))
        close(normed.norm.running_var, other.norm.running_var)

    def test_for_one_call_alone(self, normed, images, close):
        before = normed.norm.running_mean.clone()
        given = [{name: b.clone() for name, b in normed.named_buffers()} for _ in range(2)]
        other = copy.deepcopy(normed.reference)
        for model, buffers in zip((normed, other), given, strict=True):
            torch.func.functional_call(model, buffers, (images + 3,))
        close(given[0]["norm.running_mean"], given[1]["norm.running_mean"])
        assert torch.equal(normed.norm.running_mean, before)


class TestBetweenForwardAndBackward:
    """What is as it was again has not changed."""

    @pytest.fixture
    def trained(self, small, images, tuned):
        model = tuned(small, images, "train", "hand")
        model(images).sum().backward()
        return model

    def test_averaged_weights_in_their_place_for_a_while(self, trained, images, close):
        y = trained(images)
        kept = {name: p.data for name, p in trained.named_parameters()}
        for p in trained.parameters():
            p.data = p.data * 0.9
        with torch.no_grad():
            other = trained(images)
            close(other, trained.reference(images))
        for name, p in trained.named_parameters():
            p.data = kept[name]
        (y - other).square().sum().backward()

    def test_a_call_with_other_parameters(self, trained, images):
        y = trained(images)
        other = {name: p.detach() * 0.9 for name, p in trained.named_parameters()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            teacher = torch.func.functional_call(trained, other, (images,))
        (y - teacher).square().sum().backward()

    def test_layers_of_other_sizes(self, named, images, tuned, close):
        """No gradient reads them, and the old ones get theirs, as in eager."""
        module = named(conv=nn.Conv2d(3, 8, 3), relu=nn.ReLU())
        model = tuned(module, images, "train")
        found = []
        for either in (module, model):
            y, old = either(images), either.conv.weight
            either.conv.weight = nn.Parameter(torch.ones(5, 3, 3, 3))
            either.conv.bias = nn.Parameter(torch.randn(5))
            y.sum().backward()
            found.append(old.grad)
        close(*found)
        close(model(images), model.reference(images))

    def test_a_weight_that_no_gradient_reads(self, trained, small, images, close):
        """A bias is one: eager does not mind, either."""
        trained.zero_grad()
        for module in (trained, small):
            y = module(images)
            with torch.no_grad():
                module.layers[0][0].fixup_bias2a.add_(1)
            y.square().sum().backward()
        for ours, theirs in zip(trained.parameters(), small.parameters(), strict=True):
            close(ours.grad, theirs.grad)

    def test_a_refresh_reaches_an_instance_in_use(self, trained, images, close):
        y = trained(images)
        weight = trained.layers[0][0].conv1.weight
        before = y.detach().clone()
        weight.data.view(-1)[1] += 100
        trained.refresh()
        del y
        assert not torch.allclose(trained(images), before)
        close(trained(images), trained.reference(images))


class TestLoaded:
    @pytest.mark.parametrize("assign", [False, True])
    def test_a_state_dict_after_the_first_call(self, assign, model, images, randomise, follows):
        before = model(images)
        other = randomise(copy.deepcopy(model.reference))
        model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        follows(model, before)
        assert torch.equal(model.stem[1].weight, other.stem[1].weight)

    def test_into_a_part(self, model, images, randomise, follows):
        before = model(images)
        other = randomise(copy.deepcopy(model.layers[1]))
        model.layers[1].load_state_dict(other.state_dict())
        follows(model, before)

    def test_into_the_reference(self, model, images, randomise, follows):
        before = model(images)
        model.reference.load_state_dict(randomise(copy.deepcopy(model.reference)).state_dict())
        follows(model, before)

    @pytest.mark.parametrize("shared", ["expanded", "sliced"])
    def test_weights_that_are_views(self, shared, model, images, follows):
        before = model(images)
        state = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
        if shared == "expanded":
            state["layers.0.0.conv2.weight"] = torch.full((), 0.1).expand(16, 16, 3, 3)
        else:
            state["layers.0.0.conv2.weight"] = torch.randn(16, 16, 3, 6)[..., ::2]
        model.load_state_dict(state, assign=True)
        follows(model, before)


class Looking(LiveState):
    """Looks before each question."""

    def __init__(self, module, names):
        super().__init__(OwnedTensors(module), names)

    def changed(self):
        self._owned.look()
        return super().changed()

    def forget(self):
        self._owned.forget()


class TestLiveState:
    """Each way in which a tensor changes, by itself."""

    @pytest.fixture
    def module(self):
        return nn.Linear(40, 30)

    @pytest.fixture
    def state(self, module):
        state = Looking(module, ["weight", "bias"])
        assert state.changed(), "the first look is always new"
        assert not state.changed()
        return state

    def assert_seen_once(self, state):
        assert state.changed()
        assert not state.changed()

    def test_nothing(self, module, state):
        module(torch.randn(2, 40)).sum().backward()
        assert not state.changed()

    @pytest.mark.parametrize("name", ["weight", "bias"])
    def test_one_element_in_place(self, name, module, state):
        with torch.no_grad():
            getattr(module, name).flatten()[-1] += 1
        self.assert_seen_once(state)

    def test_an_equal_tensor_in_its_place(self, module, state):
        module.weight = nn.Parameter(module.weight.detach().clone())
        self.assert_seen_once(state)
        assert state.tensors()["weight"] is module.weight

    def test_other_data(self, module, state):
        module.bias.data = module.bias.data.clone()
        self.assert_seen_once(state)

    def test_what_the_user_tells_of(self, module, state):
        module.weight.data.add_(1)
        state.forget()
        self.assert_seen_once(state)

    def test_a_step_that_writes_single_elements_through_data(self, module, state):
        class Careless(torch.optim.Optimizer):
            def step(self, closure=None):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.data.view(-1)[1] += 1

        optimizer = Careless(module.parameters(), {})
        optimizer.step()
        self.assert_seen_once(state)


class TestSharedMemory:
    """Actors of several processes read weights that a learner in another one writes."""

    def written_by_another(self, module):
        """As torch reports it here: not at all. A second view of the same memory has versions of
        its own, as another process has.
        """
        for parameter in module.parameters():
            storage = parameter.untyped_storage()
            view = torch.empty(0).set_(storage)
            assert view.is_shared()
            view.mul_(1.5)

    @pytest.mark.parametrize("mode", ["infer", "train"])
    @pytest.mark.parametrize("early", [False, True])
    def test_each_call_reads_them(self, mode, early, small, images, tuned, follows):
        if early:
            small.share_memory()
        model = tuned(small, images, mode, "hand").share_memory()
        before = model(images).detach()
        for _ in range(2):
            self.written_by_another(model)
            follows(model, before)
        assert model.last_call().how == "planned"

    def test_by_another_process(self, named, images, tuned, follows):
        model = tuned(named(conv=nn.Conv2d(3, 8, 3), relu=nn.ReLU()), images, plan="hand")
        model.share_memory()
        before = model(images)
        pid = os.fork()
        if pid == 0:
            with torch.no_grad():
                model.conv.weight.mul_(2)
            os._exit(0)
        os.waitpid(pid, 0)
        follows(model, before)

    def test_a_trace_in_channels_last_reads_them_too(self, named, images, follows):
        module = named(conv=nn.Conv2d(3, 8, 3), relu=nn.ReLU()).share_memory()
        model = optimize(module, images, share=True)
        route = "torchscript-traced-channels-last"
        model.run_from(replace(model.plan, route=route, origin="measured"))
        before = model(images)
        assert model.last_call().how == route
        self.written_by_another(model)
        follows(model, before)
