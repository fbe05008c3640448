"""The first users' network from our own kernels: every size that they run, by the bound that every
kernel is held to.
"""

from __future__ import annotations

import copy

import pytest
import torch

from plantune.models.se_resnet9 import SEResNet9Fixup

ROUNDINGS = 8
BATCHES = (1, 7, 64, 127, 128, 129, 512, 1024, 2048, 8192)
# An exact copy of everything at once would not fit beside the others.
CHUNK = 512

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("planned")]


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def made(randomise, dtype):
    """The network for so many channels; all of its scalars and biases are random, too."""
    return lambda channels: randomise(SEResNet9Fixup(channels)).to("cuda", dtype)


@torch.no_grad()
def assert_follows(model, x):
    exact = copy.deepcopy(model.reference).double()
    ours, theirs, whole = 0.0, 0.0, 0.0
    found = model(x)
    for images, outputs in zip(x.split(CHUNK), found.split(CHUNK), strict=True):
        wanted = exact(images.double())
        whole += float(wanted.square().sum())
        ours += float((outputs - wanted).square().sum())
        theirs += float((model.reference(images) - wanted).square().sum())
    allowed = 2 * (theirs / whole) ** 0.5 + ROUNDINGS * torch.finfo(x.dtype).eps
    assert (ours / whole) ** 0.5 <= allowed


@pytest.mark.parametrize("batch", BATCHES)
def test_every_size(made, tuned, dtype, batch):
    for channels in (3, 1, 11, 14):
        x = torch.randn(batch, channels, 64, 64, device="cuda", dtype=dtype)
        assert_follows(tuned(made(channels), x, plan="hand"), x)


@pytest.mark.parametrize("plan", ["framework", "hand"])
def test_a_thousand_replays_with_other_inputs_and_weights(made, tuned, dtype, plan):
    x = torch.randn(128, 3, 64, 64, device="cuda", dtype=dtype)
    model = tuned(made(3), x, plan=plan)
    parameters = list(model.parameters())
    for turn in range(1000):
        x.normal_()
        if turn % 3 == 0:
            with torch.no_grad():
                # No rounding undoes it, and nothing drifts.
                parameters[turn // 3 % len(parameters)].neg_()
        if turn % 50 == 0:
            assert_follows(model, x)
        else:
            model(x)


def test_an_image_alone_and_in_a_batch_are_alike(made, tuned, dtype):
    """Nothing of one image reaches another."""
    x = torch.randn(128, 3, 64, 64, device="cuda", dtype=dtype)
    model = tuned(made(3), x, plan="hand")
    before = model(x)
    x[1:] = float("nan")
    after = model(x)
    assert torch.equal(after[0], before[0])
    assert after[1:].isnan().all()
