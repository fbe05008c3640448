"""Attention of short sequences: which steps of which networks, that they build and are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from plantune import optimize
from plantune.base.canonical import Attrs
from plantune.graph import Step, TensorType
from plantune.graph.fusions import fusions_named
from plantune.graph.partition import fused
from plantune.graph.tracing.extract import extract
from plantune.kernels.families.attention import FAMILY
from plantune.plans.guess import guessed_plan
from plantune.space.arch import ARCH_NAMES, load_arch
from plantune.space.search_space import load_search_space

from .contract import Contract


class Windows(nn.Module):
    """As Swin's: a bias of each head, and a mask of each window of an image."""

    def __init__(self, rows=49, heads=3, masked=0, unbinds=False) -> None:
        super().__init__()
        self.heads, self.masked, self.unbinds = heads, masked, unbinds
        self.bias = nn.Parameter(torch.randn(1, heads, rows, rows))
        self.mask = nn.Parameter(torch.randn(1, max(masked, 1), 1, rows, rows))

    def forward(self, x: Tensor) -> Tensor:
        count, rows, width = x.shape
        parts = x.reshape(count, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0) if self.unbinds else (parts[0], parts[1], parts[2])
        scores = (q * 0.25) @ k.transpose(-2, -1) + self.bias
        if self.masked:
            scores = scores.view(-1, self.masked, self.heads, rows, rows) + self.mask
            scores = scores.view(count, self.heads, rows, rows)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(count, rows, width // 3)


class Crossed(nn.Module):
    """Three inputs of one head or of several; scores are scaled, a mask may come."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(-2, -1) * 0.3
        scores = scores if mask is None else scores + mask
        return scores.softmax(-1) @ v


class Scaled(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.transpose(-2, -1)).softmax(-1) * 2) @ v


Shapes = Sequence[Sequence[int]]


def attention_of(stated: tuple[Callable[[], nn.Module], Shapes], dtype: str) -> Step:
    """The step that holds both products, whether or not the family runs it."""
    make, shapes = stated
    module = make().to(getattr(torch, dtype)).eval()
    graph = extract(module, *(TensorType(tuple(shape), dtype) for shape in shapes))
    steps = fused(graph, fusions_named("attention"), lambda step: step.phase == "forward")
    return max(steps, key=lambda step: len(step.nodes))


WINDOW = [(8, 49, 3 * 3 * 32)]
CASES = {
    "windows": (Windows, WINDOW),
    "masked windows": (lambda: Windows(masked=4), WINDOW),
    "small windows": (lambda: Windows(rows=16, heads=2), [(6, 16, 3 * 2 * 16)]),
    "unbound": (lambda: Windows(rows=50, heads=4, unbinds=True), [(3, 50, 3 * 4 * 64)]),
    "one row": (lambda: Windows(rows=1, heads=2), [(5, 1, 3 * 2 * 32)]),
    "more keys than rows": (Crossed, [(4, 20, 48), (4, 100, 48), (4, 100, 24)]),
    "more rows than keys": (Crossed, [(2, 3, 130, 16), (2, 3, 7, 16), (2, 3, 7, 64)]),
    "a mask of keys": (Crossed, [(2, 3, 33, 32), (2, 3, 40, 32), (2, 3, 40, 32), (2, 1, 1, 40)]),
    "most keys": (Crossed, [(1, 2, 128, 64), (1, 2, 128, 64), (1, 2, 128, 64)]),
}


def test_it_reads_queries_keys_and_values_where_one_product_made_them():
    parts = FAMILY.parts(attention_of(CASES["masked windows"], "float16"))
    assert parts.sizes == (8, 3, 49, 49, 32, 32)
    assert {each.name for each in (parts.queries, parts.keys, parts.values)} == {"reshape"}
    assert [parts.queries.offset, parts.keys.offset, parts.values.offset] == [0, 96, 192]
    assert parts.keys.strides == (49 * 288, 32, 288, 1)
    assert parts.made == (49 * 96, 32, 96)
    assert parts.scale == 0.25
    bias, mask = parts.addends
    assert (bias.sizes, bias.strides) == ((8, 3, 49, 49), (0, 2401, 49, 1))
    assert (mask.sizes, mask.strides) == ((2, 4, 3, 49, 49), (0, 2401, 0, 49, 1))


REFUSED = {
    "too many keys": ((Crossed, [(1, 20, 32), (1, 129, 32), (1, 129, 32)]), "129 keys"),
    "too wide": ((Crossed, [(1, 20, 80), (1, 20, 80), (1, 20, 32)]), "80 or 32 columns"),
    "no whole step": ((Crossed, [(1, 20, 24), (1, 20, 24), (1, 20, 32)]), "24 and 32 columns"),
    "scaled weights": ((Scaled, [(1, 20, 32)] * 3), "two products"),
    "nothing": ((Crossed, [(0, 20, 32)] * 3), "nothing to compute"),
    "another dtype": (CASES["windows"], "not float32", "float32"),
}


class TestContract(Contract):
    family, steps, refused = FAMILY, CASES, REFUSED
    dtypes = ("float16", "bfloat16")
    builds_chosen = (
        (CASES["masked windows"], Attrs(threads=128)),
        (CASES["most keys"], Attrs(threads=128)),
        (CASES["more rows than keys"], Attrs(threads=128)),
    )
    configs = (
        (CASES["small windows"], Attrs(threads=64), "2 warps are more than 1"),
        (CASES["small windows"], Attrs(threads=32), None),
    )

    def step(self, stated, dtype="float16"):
        found = attention_of(stated, dtype)
        assert stated[0] is Scaled or found.ops.count("aten.matmul.default") == 2
        return found


@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_it_is_for_tensor_cores_from_ampere_on(arch):
    gpu = load_arch(arch).cuda
    fits = gpu is not None and gpu.compute_capability >= (8, 0)
    assert ("attention" in load_search_space(arch).families) == fits


def test_a_guess_takes_it_and_moves_no_queries():
    graph = extract(Windows().half().eval(), TensorType(WINDOW[0], "float16"))
    plan = guessed_plan(graph, load_search_space("sm90"), network="windows")
    families = [choice.candidate.family for choice in plan.choices]
    assert [name for name in families if name != "view"] == ["attention"]


@pytest.mark.gpu
def test_a_call_is_as_far_from_float64_as_eager():
    torch.manual_seed(0)
    module = Windows(masked=4).cuda().half().eval()
    x = torch.randn(64, 49, 288, device="cuda").half()
    tuned = optimize(module, x, fallback="silent")
    with torch.no_grad():
        ours, theirs = tuned(x), module(x)
        exact = module.double()(x.double())
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()
