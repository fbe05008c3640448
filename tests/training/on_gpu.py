"""What tests of training steps on a GPU share."""

from __future__ import annotations

import torch
from torch import nn

from plantune import LAMB

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=1e-2, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, 0.05, 0.9, dampening=0.5, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, betas=(0.8, 0.95), weight_decay=0.1),
    "lamb": lambda p: LAMB(p, 1e-2, weight_decay=0.1),
}


def linear():
    """Layers whose sizes fit into no vector."""
    layers = (nn.Linear(35, 129), nn.Tanh(), nn.Linear(129, 65), nn.Tanh(), nn.Linear(65, 5))
    return nn.Sequential(nn.Flatten(), *layers).cuda()


def random_batches():
    return [
        (torch.randn(8, 5, 7, device="cuda"), torch.randint(5, (8,), device="cuda"))
        for _ in range(20)
    ]


def captured(step):
    """How many kinds of calls are replays."""
    return sum(kind.captured is not None for kind in step._run._kinds.values())


def assert_moved_alike(start, ours, theirs, bound=1e-2):
    """The difference is small beside the way: steps of adaptive optimizers have one length where a
    gradient is nearly nothing, so rounding decides of the direction of a few elements.
    """
    states = [module.state_dict() for module in (start, ours, theirs)]
    for name, before in states[0].items():
        if before.is_floating_point():
            a, b = (state[name].double() - before.double() for state in states[1:])
            assert float((a - b).norm()) <= bound * float(b.norm()), name
