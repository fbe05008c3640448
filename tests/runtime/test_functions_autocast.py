"""torch.autograd.Functions under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from plantune import optimize

from .test_functions import Body, of


class Mixed(Function):
    """In half of the precision in both passes."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, (gradient.t() @ x) * 3


class Narrow(Function):
    """Casts its inputs, and computes without autocast then."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        assert x.dtype == scale.dtype
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradient * scale * 2, gradient * x


MIXED: dict[str, Body] = {
    "mixed": lambda m, x: m.two(Mixed.apply(m.one(x), m.two.weight)),
    "narrow": lambda m, x: m.two(Narrow.apply(m.one(x).float(), m.codes[0])),
}


@pytest.mark.parametrize("body", MIXED.values(), ids=MIXED)
def test_functions_cast_under_autocast_as_in_eager(body: Body) -> None:
    module = of(body).float()
    x = torch.randn(6, 3)
    with torch.autocast("cpu", torch.bfloat16):
        tuned, reference = optimize(module, x, mode="train", fallback="error"), module
    for _ in range(2):
        x = torch.randn(6, 3)
        made = []
        for each in (tuned, reference):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y = each(x)
            y.float().square().sum().backward()
            made.append([y, *(p.grad for p in each.parameters())])
        for one, other in zip(*made, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert tuned.last_call().how == "planned"


class Wide(Function):
    """On a CPU without autocast nothing is cast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


def test_in_inference_functions_cast_too() -> None:
    module, x = of(lambda m, x: Wide.apply(m.one(x).float())).float().eval(), torch.randn(6, 3)
    with torch.no_grad():
        tuned = optimize(module, x)
        assert tuned(x).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert tuned(x).dtype == torch.bfloat16
            torch.testing.assert_close(tuned(x), module(x), rtol=4e-2, atol=2e-2)
