"""A whole training step in one compiled function, with its backward pass and its optimizer."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import plantune
from plantune.backend import pieces

from .compiled import Net, assert_alike, image

PACKAGE = str(Path(plantune.__file__).parent)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_what_a_backward_pass_runs_is_not_captured():
    """Dynamo took plantune's own functions for the caller's, and warned of their lines."""
    ours, x = Net(), image()
    theirs = copy.deepcopy(ours)

    def step(module, x):
        loss = module(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        step(theirs, x)
    compiled = torch.compile(step, backend="plantune")
    for _ in range(2):
        compiled(ours, x)
    assert_alike([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
    assert pieces()
    assert not [piece.line for piece in pieces() if piece.line.startswith(PACKAGE)]
