"""A network that shares its weights with a tuned module, and what tests ask of both."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from plantune import TunedModule, UnplannedCall, optimize
from plantune.plans.guess import framework_plan
from plantune.space.search_space import load_search_space


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(5, 6), nn.Dropout(0.0))
        self.head = nn.Linear(6, 2)
        self.scale, self.shifts, self.how = 1.5, [0.5, 0.25], {"power": 1}
        self.settings = SimpleNamespace(sign=1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.body(self.bn(self.fc(x)))) * self.scale ** self.how["power"]
        for shift in self.shifts:
            x = x + shift
        return x * self.settings.sign


def of(module: nn.Module, x: Tensor, **how: Any) -> TunedModule:
    """One whose plan is known, so that it runs from it."""
    graph = optimize(module, x).pool().graph
    plan = framework_plan(graph, load_search_space("cpu"), network="net")
    return optimize(module, x, plan=plan, **how)


def called(tuned: nn.Module, x: Tensor) -> Tensor:
    """Without what is said where the framework runs it."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UnplannedCall)
        made: Tensor = tuned(x)
        return made


def alike(tuned: nn.Module, module: nn.Module, x: Tensor) -> None:
    for _ in range(2):
        torch.testing.assert_close(called(tuned, x), called(module, x))
