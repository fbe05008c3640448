"""torch.autograd.Functions with a backward pass of their own: planned in training, with the very
gradients that eager has.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from plantune import TunedModule, optimize
from plantune.graph.nested import tensors_in
from plantune.plans.guess import framework_plan
from plantune.runtime.calls.framework import UnplannedCall
from plantune.space.search_space import load_search_space


class Reversed(Function):
    """Of a domain's adversary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.neg() * ctx.strength, None


class Straight(Function):
    """A sign whose gradient is that of a hard tanh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        passed = gradient.clone()
        passed[x.abs() > 0.5] = 0
        return passed


class Swish(Function):
    """Keeps its input alone, and one attribute; the documentation's style of today."""

    @staticmethod
    def forward(x: Tensor, beta: float = 1.5) -> Tensor:
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.beta = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.beta * x)
        return gradient * (s + ctx.beta * x * s * (1 - s)) * 0.9, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, beta: float) -> Any:
        return Swish.apply(x, beta), in_dims[0]


class Product(Function):
    """A linear layer, with gradients as needed_input_grad asks for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        made = x.mm(weight.t())
        return made if bias is None else made + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = gradient.mm(weight) * 2
        if ctx.needs_input_grad[1]:
            dweight = gradient.t().mm(x)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = gradient  # which autograd sums over the rows
        return dx, dweight, dbias


class Nearest(Function):
    """A quantizer: codes, their numbers, and a distance that nobody differentiates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor) -> Any:
        distances = (x[:, None] - codes).square().sum(-1)
        places = distances.argmin(-1)
        ctx.save_for_backward(places)
        ctx.count = len(codes)
        nearest = distances.amin(-1)
        ctx.mark_non_differentiable(places, nearest)
        return codes[places], places, nearest, "codes"

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *others: Any) -> Any:
        (places,) = ctx.saved_tensors
        assert len(others) == 3
        summed = gradient.new_zeros(ctx.count, gradient.shape[1])
        return gradient, summed.index_add_(0, places, gradient)


class Parts(Function):
    """Several results, of which a loss reads some; gradients may be missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, x + y, x - y

    @staticmethod
    def backward(ctx: Any, product: Any, total: Any, difference: Any) -> Any:
        x, y = ctx.saved_tensors
        dx = 0 if product is None else product * y * 3
        dx = dx if total is None else dx + total
        return dx if difference is None else dx + difference * x, None


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2).clamp_(-1, 1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


class Noisy(Function):
    """Both passes draw, and the second one reads what the first one drew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = torch.rand_like(x) > 0.3
        ctx.save_for_backward(kept)
        return x * kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        return gradient * kept + torch.rand_like(gradient)


class Contiguous(Function):
    """Asks for what its input is already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous().to(x.dtype), weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t() * 2, x.t() @ gradient


class Stopped(Function):
    """Has no gradient, as a straight cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


reverse = Reversed.apply


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.randn(5, 4))
        self.register_buffer("seen", torch.zeros(4))


Body = Callable[[Any, Tensor], Any]


def of(body: Body) -> nn.Module:
    class Own(Layers):
        def forward(self, x: Tensor) -> Any:
            return body(self, x)

    return Own().double()


def vq(m: Any, x: Tensor) -> Any:
    y = m.one(x)
    chosen, places, distance, name = Nearest.apply(y, m.codes)
    assert name == "codes"
    return m.two(chosen), places, distance * 2 + y.sum(), (y - chosen.detach()).square()


def written(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 3
    z = InPlace.apply(y)
    with torch.no_grad():
        m.seen.add_(z.mean(0))
    return y * m.codes[0], z


def some(m: Any, x: Tensor) -> Any:
    product, _, difference = Parts.apply(m.one(x), m.one(x).tanh())
    return m.two(product) + difference


def tower(m: Any, x: Tensor) -> Any:
    y = Straight.apply(m.one(x))
    return m.two(reverse(Swish.apply(y + m.codes[1]), 0.3)), reverse(y, 2.0), y


def checkpointed(m: Any, x: Tensor) -> Any:
    y = checkpoint(lambda h: m.two(h).tanh() * m.codes[0], m.one(x), use_reentrant=True)
    return checkpoint(lambda h: reverse(h, 0.5), y, use_reentrant=False)


CASES: dict[str, Body] = {
    "reversed": lambda m, x: reverse(m.one(x), 0.5),
    "straight": lambda m, x: m.two(Straight.apply(m.one(x))),
    "swish": lambda m, x: Swish.apply(m.one(x)) + Swish.apply(m.one(x), 0.5),
    "product": lambda m, x: Product.apply(m.one(x), m.two.weight, m.two.bias),
    "without bias": lambda m, x: Product.apply(m.one(x), m.codes, None),
    "of the input": lambda m, x: m.one(Straight.apply(x)),
    "stopped": lambda m, x: m.two(m.one(x)) * Stopped.apply(m.one(x)),
    "nested": lambda m, x: m.two(Reversed.apply(Reversed.apply(m.one(x), 2.0), 3.0)),
    "the input itself": lambda m, x: (m.one(x), reverse(x, 0.5)),
    "vq": vq,
    "contiguous": lambda m, x: m.two(Contiguous.apply(m.one(x), m.two.weight)),
    "in place": written,
    "parts": some,
    "tower": tower,
    "reentrant checkpoint": checkpointed,
}


def planned(module: nn.Module, x: Tensor) -> TunedModule:
    graph = optimize(module, x, mode="train").pool().graph
    plan = framework_plan(graph, load_search_space("cpu"), network="functions")
    return optimize(module, x, mode="train", plan=plan, fallback="error")


def results(module: nn.Module, x: Tensor) -> list[Any]:
    """What it returns, with its kind, its gradients and its buffers."""
    module.zero_grad()
    made = tensors_in(module(x))
    sum((y.square() + y).sum() for y in made if y.requires_grad).backward()
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    flags = torch.tensor([y.requires_grad for y in made])
    return [*(y.detach() for y in made), *gradients, *(b.clone() for b in module.buffers()), flags]


def check_beside_eager(module: nn.Module, *, gradient: bool = False) -> None:
    module = module.train()
    example = torch.randn(6, 3, dtype=torch.float64).requires_grad_(gradient)
    tuned, reference = planned(module, example), copy.deepcopy(module)
    for _ in range(2):
        check_a_pass(tuned, reference, gradient=gradient)
    assert tuned.last_call().how == "planned"


def check_a_pass(
    tuned: nn.Module, reference: nn.Module, device: str = "cpu", *, gradient: bool = False
) -> None:
    """In float64, in which a plan may take sums in another order."""
    x = torch.randn(6, 3, dtype=torch.float64, device=device)
    ours, theirs = (
        results(each, x.clone().requires_grad_(gradient)) for each in (tuned, reference)
    )
    assert [y is None for y in ours] == [y is None for y in theirs]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
def test_its_gradients_are_those_of_eager(body: Body) -> None:
    check_beside_eager(of(body))


def test_what_is_frozen_has_none() -> None:
    module = of(lambda m, x: Product.apply(m.one(x), m.two.weight, m.two.bias).relu())
    module.get_parameter("two.weight").requires_grad_(False)
    check_beside_eager(module)


@pytest.mark.parametrize("name", ["reversed", "product", "tower", "of the input", "in place"])
def test_an_input_has_its_gradient_too(name: str) -> None:
    check_beside_eager(of(CASES[name]), gradient=True)


class Numpy(Function):
    """Torch sees neither pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Branching(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient if gradient.sum().item() > 0 else -gradient


class Derives(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            return torch.autograd.grad(own.tanh(), own, gradient)[0]


@pytest.mark.parametrize("function", [Numpy, Branching, Derives])
def test_what_torch_cannot_trace_runs_as_it_is(function: Any) -> None:
    module = of(lambda m, x: m.two(function.apply(m.one(x))))
    tuned, reference = optimize(module, torch.randn(6, 3).double(), mode="train"), module
    x = torch.randn(6, 3, dtype=torch.float64)
    with pytest.warns(UnplannedCall, match=f"{function.__name__}, a Function"):
        ours = results(tuned, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results(tuned, x)
    for one, other in zip(ours, results(reference, x), strict=True):
        torch.testing.assert_close(one, other)


def test_both_passes_may_draw() -> None:
    module, x = of(lambda m, x: Noisy.apply(m.one(x))), torch.ones(400, 3, dtype=torch.float64)
    tuned = planned(module, x)
    for _ in range(2):
        tuned.zero_grad()
        y = tuned(x)
        y.sum().backward()
        kept = (y != 0).double().sum(0)
        extra = tuned.get_parameter("one.bias").grad - kept
        assert ((extra > 160) & (extra < 240)).all()
        assert extra.unique().numel() > 1
