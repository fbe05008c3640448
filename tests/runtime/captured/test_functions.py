"""Gradients of torch.autograd.Functions in captured passes."""

from __future__ import annotations

import copy

import pytest
import torch

from plantune import optimize

from ..test_functions import CASES, check_a_pass, of


@pytest.mark.usefixtures("captured_modules")
@pytest.mark.parametrize("name", ["tower", "vq", "in place", "parts", "the input itself"])
def test_replays_have_the_gradients_of_functions(name: str) -> None:
    module = of(CASES[name]).train()
    example = torch.randn(6, 3, dtype=torch.float64)
    tuned = optimize(module, example, mode="train", fallback="error")
    reference = copy.deepcopy(module)
    for _ in range(3):
        check_a_pass(tuned, reference)
    assert tuned.stats().captures == 2
