"""The gradient of every parameter of the first users' network, by our own kernels: each for itself,
its errors pooled over draws of weights and images, at most twice PyTorch's own. Also that of images
of any number of planes, on request.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

from plantune.devices.cuda.flags import plain_float32
from plantune.models.se_resnet9 import SEResNet9Fixup

# The error of a scalar is one number a draw: over 8 of them it is by luck twice another's in 3 of
# 100 cases, and there are 20 scalars; over 32 in one of 10,000. Of few images, the rare input of a
# ReLU that roundings put on either side of zero is most of the error: 256 images at least.
DRAWS, IMAGES = 32, 256
BATCHES = [1, 7, 128, 129, pytest.param(2048, marks=pytest.mark.slow)]
# More take long in float64; float32 errs a thousandth as much as 16 bits do.
MOST_IN_DOUBLE = 8

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("planned")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_every_parameter(randomise, tuned, batch, dtype):
    x = torch.randn(batch, 3, 64, 64, device="cuda", dtype=dtype)
    model = tuned(randomise(SEResNet9Fixup(3)).to("cuda", dtype), x, mode="train", plan="hand")
    assert_at_most_twice_torchs(model, x)


@pytest.mark.parametrize("channels", [1, 11, 14])
def test_every_parameter_and_the_images(randomise, tuned, channels):
    x = torch.randn(7, channels, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    module = randomise(SEResNet9Fixup(channels)).cuda().half()
    model = tuned(module, x, mode="train", plan="hand")
    assert_at_most_twice_torchs(model, x)
    assert model.stats().eager == 0


def assert_at_most_twice_torchs(model, x):
    batch, dtype = len(x), x.dtype
    module = model.reference
    wide = torch.float64 if batch <= MOST_IN_DOUBLE else torch.float32
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    ours, theirs, sizes = Counter(), Counter(), Counter()
    for draw in range(max(DRAWS, IMAGES // batch)):
        torch.manual_seed(draw)
        with torch.no_grad():
            x.normal_()
            for parameter, weight in zip(module.parameters(), weights, strict=True):
                # Always of the first ones: products of all factors would make one draw the largest.
                parameter.copy_(weight * torch.empty_like(weight).uniform_(0.9, 1.1))
        dy = torch.randn_like(module(x)) / 8
        with plain_float32():
            images = x.detach().to(wide).requires_grad_(x.requires_grad)
            exact = gradients(copy.deepcopy(module).to(wide), images, dy.to(wide))
        sizes.update({name: squared(wanted) for name, wanted in exact.items()})
        for which, errors in ((model, ours), (module, theirs)):
            for name, found in gradients(which, x, dy).items():
                errors[name] += squared(found.double() - exact[name].double())
    ratios = {name: (ours[name] / theirs[name]) ** 0.5 for name in sizes}
    worst = sorted(ratios, key=ratios.__getitem__)[-3:]
    told = {n: (ratios[n], (theirs[n] / sizes[n]) ** 0.5) for n in worst}
    print(f"batch {batch}, {dtype}: ratio to PyTorch's error, and that error: {told}")
    assert ratios[worst[-1]] <= 2, told


def gradients(module, x, dy):
    module.zero_grad()
    x.grad = None
    module(x).backward(dy)
    asked = {"images": x} if x.requires_grad else {}
    return {
        name: p.grad.clone() for name, p in {**dict(module.named_parameters()), **asked}.items()
    }


def squared(x):
    return float(x.double().norm()) ** 2
