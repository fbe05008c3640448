"""Changes of a module by every promised route, in any order: the next call is right."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.runtime.kinds import KEPT_FORMS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self._gain = [1.0]
        self.settings = {"gains": (1.0, [2.0])}

    def forward(self, x):
        y = self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return y * self._gain[0] * self.settings["gains"][1][0]


def scaled_by(conv, factor):
    plain = conv.forward
    conv.forward = lambda x: plain(x) * factor


def as_it_was(m):
    vars(m.conv).pop("forward", None)


def write_unseen(m, **options):
    m.conv.weight.data.mul_(1.1)
    m.refresh(**options)


CHANGES = [
    lambda m: torch.optim.AdamW(m.parameters(), 1e-2).step(),
    lambda m: m.load_state_dict({k: v + (v.dim() > 1) for k, v in m.state_dict().items()}),
    lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
    lambda m: m._gain.__setitem__(0, random.uniform(0.5, 2)),
    lambda m: m.settings["gains"][1].__setitem__(0, random.uniform(0.5, 2)),
    lambda m: m.train(),
    lambda m: m.eval(),
    lambda m: m.norm.train(not m.norm.training),
    lambda m: setattr(m.conv, "padding", (random.randint(0, 2),) * 2),
    lambda m: setattr(m, "head", nn.Linear(4, random.randint(2, 6))),
    lambda m: setattr(m.head, "weight", nn.Parameter(torch.randn_like(m.head.weight))),
    lambda m: setattr(m.conv.weight, "data", m.conv.weight.data * 1.3),
    lambda m: m.conv.weight.requires_grad_(not m.conv.weight.requires_grad),
    lambda m: nn.utils.vector_to_parameters(
        torch.randn(sum(p.numel() for p in m.parameters())), m.parameters()
    ),
    lambda m: torch._foreach_mul_(list(m.parameters()), 1.01),
    lambda m: m.norm.register_buffer("running_mean", torch.randn(4)),
    lambda m: m.double().float(),
    lambda m: (as_it_was(m), setattr(m, "conv", copy.deepcopy(m.conv))),
    lambda m: (as_it_was(m), scaled_by(m.conv, 1.5)),
    as_it_was,
    write_unseen,
    lambda m: write_unseen(m, weights_only=True),
]


def found(module, x, trains):
    """The output, the gradients, and the statistics that moved."""
    module.zero_grad()
    with torch.set_grad_enabled(trains):
        y = module(x)
    if trains:
        y.square().sum().backward()
    gradients = [p.grad for p in module.parameters()]
    return [y.detach(), *gradients, *(b.clone() for b in module.buffers())]


@pytest.mark.parametrize(
    ("seed", "calls"), [(0, 150), pytest.param(1, 10_000, marks=pytest.mark.slow)]
)
def test_nothing_is_stale(seed, calls):
    random.seed(seed)
    model = optimize(Net().train(), torch.randn(2, 3, 8, 8), mode="train", fallback="silent")
    for call in range(calls):
        change = random.choice(CHANGES)
        with torch.no_grad():
            change(model)
        # The reference itself runs on the same weights, with its statistics put back.
        before = [b.clone() for b in model.buffers()]
        x, trains = torch.randn(random.choice([2, 2, 3]), 3, 8, 8), random.random() < 0.5
        ours = found(model, x, trains)
        with torch.no_grad():
            for buffer, old in zip(model.buffers(), before, strict=True):
                if not torch.equal(buffer, old):  # else a write would hide a stale weight
                    buffer.copy_(old)
        theirs = found(model.reference, x, trains)
        # A sum of terms that cancel, such as the gradient of a bias before a batch norm, is off by
        # their roundings.
        rounding = 1e-7 * max(float(t.abs().max()) for t in theirs if t is not None) + 1e-4
        for got, expected in zip(ours, theirs, strict=True):
            assert (got is None) == (expected is None), (call, CHANGES.index(change))
            if got is not None:
                scale = float(expected.abs().max())
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * scale + rounding)
    stats = model.stats()
    assert stats.planned > calls / 2
    # Of each form that is kept: two batches, in training and without.
    assert stats.instances <= 4 * KEPT_FORMS
