"""A module whose calls are plain ones, from a plan, by a trace and by eager."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from plantune import optimize
from plantune.plans.plan import EAGER, PROGRAM
from plantune.runtime.calls.plain_calls import MISSED

ROUTES = {"planned": PROGRAM, "torchscript-traced": "torchscript-traced", "eager": EAGER}


class Net(nn.Module):
    """Reads a number, a list and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.gain, self.terms = 2.0, [1.0, 0.5]
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x):
        y = self.second(torch.relu(self.first(x))) * self.gain + self.shift
        return y + sum(self.terms) * (1 if self.training else 2)


def plain(model, x):
    """Called until its calls are plain ones."""
    with torch.no_grad():
        for _ in range(4):
            model(x)
        assert model._calls.plain.answer((x,)) is not MISSED
    return model


def tuned(route, x, **options):
    module = Net().eval()
    plan = replace(optimize(module, x).plan, origin="measured", route=ROUTES[route])
    model = plain(optimize(module, x, plan=plan, **options), x)
    assert model.last_call().how == route
    return model
