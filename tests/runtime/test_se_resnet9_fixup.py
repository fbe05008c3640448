"""SE-ResNet9-Fixup as its users run it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from plantune import load_model
from plantune.models.se_resnet9 import SEResNet9Fixup, se_resnet9_fixup

CHANNELS = (1, 3, 11, 14)
BATCHES = (1, 7, 64, 127, 128, 129)
LARGE = 64
PLANES = 64


def cases(batches):
    """Every (channels, planes, batch). Of the full width: one image, and three channels in batches
    below `LARGE`; others have a quarter, large ones three channels. All of the full width are slow
    tests.
    """
    every = list(itertools.product(CHANNELS, (PLANES,), batches))
    cheap = [(c, planes, n) for c, planes, n in every if n == 1 or (c == 3 and n < LARGE)]
    left = [(c, n) for c, planes, n in every if (c, planes, n) not in cheap]
    narrow = [(c, PLANES // 4, n) for c, n in left if c == 3 or n < LARGE]
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in cheap]
    return [*cheap, *narrow, *slow]


@pytest.fixture
def random(randomise):
    return lambda channels, planes: randomise(SEResNet9Fixup(channels, planes))


class TestParameters:
    """The reference's own names, both ways."""

    @pytest.fixture
    def model(self):
        return load_model("se_resnet9_fixup", batch=2, mode="train", fallback="silent")

    def test_state_dict_has_the_references_keys_in_their_order(self, model):
        reference = se_resnet9_fixup()
        assert list(model.state_dict()) == list(reference.state_dict())
        assert [n for n, _ in model.named_parameters()] == [
            n for n, _ in reference.named_parameters()
        ]
        modules = [(name, type(m)) for name, m in reference.named_modules() if name]
        assert [(name, type(m)) for name, m in model.named_modules() if name] == modules

    def test_loads_the_references_state_strictly_and_gives_it_back(self, model, randomise):
        reference, other = randomise(se_resnet9_fixup()), se_resnet9_fixup()
        assert str(model.load_state_dict(reference.state_dict(), strict=True)) == (
            "<All keys matched successfully>"
        )
        other.load_state_dict(model.state_dict(), strict=True)
        for key, value in reference.state_dict().items():
            assert torch.equal(other.state_dict()[key], value), key

    @pytest.mark.parametrize("change", [lambda s: s.pop("stem.1.weight"), lambda s: s.update(a=1)])
    def test_a_missing_or_unknown_key_is_refused(self, model, change):
        state = model.state_dict()
        change(state)
        with pytest.raises(RuntimeError, match="in state_dict"):
            model.load_state_dict(state, strict=True)

    def test_state_dict_holds_the_parameters_themselves(self, model):
        kept = model.state_dict(keep_vars=True)
        shared = model.state_dict()
        for name, parameter in model.named_parameters():
            assert kept[name] is parameter
            assert shared[name].data_ptr() == parameter.data_ptr()
            assert model.get_parameter(name) is parameter
        assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in model.parameters())

    def test_a_non_persistent_buffer_stays_out_of_the_state(self, tuned):
        module = nn.Sequential(nn.Conv2d(3, 4, 3))
        module.register_buffer("seen", torch.zeros(3), persistent=False)
        model = tuned(module, torch.randn(1, 3, 8, 8))
        assert list(model.state_dict()) == list(module.state_dict())

    def test_its_parameters_feed_an_optimizer(self, small, images, tuned, close):
        model = tuned(small, images, "train")
        pair = [(m, torch.optim.Adam(m.parameters(), lr=1e-3)) for m in (small, model)]
        losses = []
        for _ in range(4):
            for module, optimizer in pair:
                optimizer.zero_grad()
                loss = module(images).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        close(losses[1::2], losses[0::2])
        assert losses[1] > losses[3] > losses[5] > losses[7]

    def test_has_the_face_of_a_module(self, small, images, tuned):
        model = tuned(small, images, "train")
        assert isinstance(model, nn.Module)
        assert model.training
        assert not model.eval().training
        assert not any(m.training for m in model.modules())
        assert model.train().layers[0][0].training
        model(images).sum().backward()
        model.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        model.requires_grad_(False)
        assert not any(p.requires_grad for p in model.parameters())
        visited = []
        model.apply(lambda m: visited.append(type(m).__name__))
        assert visited.count("FixupBlock") == 4
        assert "(2, 3, 64, 64)" in repr(model)


@pytest.mark.parametrize(("channels", "planes", "batch"), cases(BATCHES))
def test_forward_is_within_the_bound(channels, planes, batch, plan, random, tuned, within_bound):
    """With random weights and scalars."""
    reference = random(channels, planes)
    exact = copy.deepcopy(reference).double()
    x = torch.randn(batch, channels, 64, 64)
    model = tuned(reference, x, plan=plan)
    assert model.plan.origin == plan
    with torch.no_grad():
        found = [{"y": m(v)} for m, v in ((reference, x), (exact, x.double()))]
    within_bound({"y": model(x)}, *found)
    within_bound({"y": model(x)}, *found)


@pytest.mark.parametrize("bias", ["fixup_bias1a", "fixup_bias2a"])
@pytest.mark.parametrize("block", range(4))
def test_a_bias_before_the_padding_is_missing_at_the_border(
    block, bias, plan, small, images, tuned, close
):
    """B1a and b2a are added before zeros are padded, so they are no bias per channel."""
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            if "fixup_bias" in name:
                parameter.zero_()
        getattr(small.layers[block][0], bias).fill_(3.0)
    model = tuned(small, images, plan=plan)
    close(model(images), small(images).detach())


def test_block_0_adds_its_input_without_b1a(plan, small, images, tuned, close):
    """With conv2 and all later biases zero the block is relu(x), whatever b1a is."""
    with torch.no_grad():
        block = small.layers[0][0]
        block.conv2.weight.zero_()
        block.fixup_bias2b.zero_()
        block.fixup_bias1a.fill_(5.0)
    model = tuned(small, images, plan=plan)
    close(model(images), small(images).detach())
    without = model(images)
    with torch.no_grad():
        model.layers[0][0].fixup_bias1a.zero_()
    close(model(images), without)
    with torch.no_grad():
        model.layers[1][0].fixup_bias1a.add_(1.0)
    assert not torch.allclose(model(images), without)


@pytest.mark.parametrize(("channels", "planes", "batch"), cases((1, 7, 64, 128, 129)))
def test_gradients_of_all_parameters_and_of_the_input_are_within_the_bound(
    channels, planes, batch, random, tuned, gradients_within_bound
):
    reference = random(channels, planes)
    shape = (batch, channels, 64, 64)
    model = tuned(reference, torch.randn(shape), "train")
    gradients_within_bound(model, reference, shape, wrt_input=True)


@pytest.mark.parametrize(("channels", "planes", "batch"), cases((1, 7, 64, 129)))
def test_gradients_from_the_hand_picked_plan_are_within_the_bound(
    channels, planes, batch, random, tuned, gradients_within_bound
):
    """Where the convolutions run fused and on prepacked weights."""
    reference = random(channels, planes)
    shape = (batch, channels, 64, 64)
    model = tuned(reference, torch.randn(shape), "train", "hand")
    assert "onednn_conv" in {choice.candidate.family for choice in model.plan.choices}
    gradients_within_bound(model, reference, shape)


@pytest.mark.parametrize("wrt_input", [False, True])
def test_gradients_in_fp64_are_the_frameworks(wrt_input, plan, small, images, tuned, results):
    """Without the chance of rounding: what is computed is the same to the last digits."""
    small, images = small.double(), images.double()
    model = tuned(small, images, "train", plan)
    got = results(model, images, wrt_input=wrt_input)
    expected = results(small, images, wrt_input=wrt_input)
    assert len(expected) == len(list(small.parameters())) + 1 + wrt_input
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11)


def test_a_thousand_replays_follow_the_input_and_the_weights(plan, small, images, tuned, close):
    """Each replay has a new input, and one parameter was written in place before it."""
    images = images[:1, :, ::2, ::2].contiguous()
    model = tuned(small, images, plan=plan)
    theirs, ours = (list(m.parameters()) for m in (small, model))
    start = [parameter.detach().clone() for parameter in ours]
    last = torch.zeros(())
    for replay in range(1000):
        index = replay % len(ours)
        value = start[index] * torch.empty_like(start[index]).uniform_(0.5, 1.5)
        with torch.no_grad():
            theirs[index].copy_(value)
            ours[index].copy_(value)
            x = torch.randn(images.shape)
            expected, got = small(x), model(x)
        close(got, expected)
        assert not torch.equal(got, last), "a replay must not return the last result"
        last = got


def test_weights_change_between_steps_of_training(plan, small, images, tuned, close):
    """In training an optimizer updates in place, replay after replay."""
    model = tuned(small, images, "train", plan)
    pair = [(m, torch.optim.SGD(m.parameters(), lr=1e-2)) for m in (small, model)]
    for step in range(50):
        x = torch.randn(images.shape)
        for module, optimizer in pair:
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        if step % 10 == 9:
            for ours, theirs in zip(model.parameters(), small.parameters(), strict=True):
                close(ours, theirs)
