"""torch.autograd.Functions with a backward of their own, on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from plantune import optimize

from ..test_functions import CASES, check_a_pass, of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]


@pytest.mark.parametrize("name", CASES)
def test_replays_have_the_gradients_of_functions(name: str) -> None:
    module = of(CASES[name]).cuda().train()
    example = torch.randn(6, 3, dtype=torch.float64, device="cuda")
    tuned = optimize(module, example, mode="train", fallback="error")
    reference = copy.deepcopy(module)
    for _ in range(4):
        check_a_pass(tuned, reference, "cuda")
    assert tuned.last_call().how == "captured"


class Mixed(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert x.dtype == weight.dtype
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, (gradient.t() @ x) * 3


def test_functions_cast_under_autocast_as_in_eager() -> None:
    module = of(lambda m, x: m.two(Mixed.apply(m.one(x), m.two.weight)).float()).float().cuda()
    x = torch.randn(64, 3, device="cuda")
    tuned = optimize(module, x, mode="train", fallback="error")
    for _ in range(3):
        made = []
        for each in (tuned, module):
            each.zero_grad()
            with torch.autocast("cuda", torch.float16):
                y = each(x)
            y.square().mean().backward()
            made.append([y, *(p.grad for p in each.parameters())])
        for one, other in zip(*made, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=5e-3)
    assert tuned.last_call().how == "captured"


class Noisy(Function):
    """Its backward pass draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.rand_like(gradient)


def test_each_replay_of_a_backward_pass_draws_anew() -> None:
    module, x = of(lambda m, x: Noisy.apply(m.one(x))).cuda(), torch.ones(400, 3).double().cuda()
    tuned = optimize(module, x, mode="train", fallback="error")
    found = []
    for _ in range(3):
        tuned.zero_grad()
        tuned(x).sum().backward()
        found.append(tuned.get_parameter("one.bias").grad.clone() - 400)
    assert tuned.last_call().how == "captured"
    assert ((torch.stack(found) - 200).abs() < 60).all()
    assert torch.stack(found).unique().numel() == 12


def test_a_mask_is_written_to_in_a_captured_pass() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.one(x) * 1
        y[y < 0] = 0.25
        return m.two(y)

    module = of(body).cuda()
    tuned = optimize(module, torch.randn(6, 3).double().cuda(), mode="train", fallback="error")
    reference = copy.deepcopy(module)
    for _ in range(3):
        check_a_pass(tuned, reference, "cuda")
    assert tuned.last_call().how == "captured"
