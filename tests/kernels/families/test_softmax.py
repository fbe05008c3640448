"""Softmaxes of rows: which steps, which configs, that they are right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune.base.canonical import Attrs, canonical
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.softmax import FAMILY
from plantune.plans.guess import guessed_plan
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import in_turns, legal


def softmax(b, x, dim=-1, **more):
    given = canonical({"self": {"tensor": 0}, "dim": dim, **more})
    return b("aten.softmax.int", x, arguments=given)


def scores(shape, bias=(), mask=()):
    """Attention's: scaled, with a weight and another input that are broadcast."""

    def emit(b):
        y = b("affine", b.x(*shape), alpha=0.25, beta=0.0)
        y = b("add", y, b.w(*bias)) if bias else y
        return softmax(b, b("add", y, b.x(*mask)) if mask else y)

    return emit


STEPS = {
    "rows": lambda b: softmax(b, b.x(5, 96)),
    "images": lambda b: softmax(b, b.x(2, 3, 7, 49), dim=3),
    "odd": lambda b: softmax(b, b("relu", b.x(7, 37))),
    "one element": lambda b: softmax(b, b.x(6, 1)),
    "one row": lambda b: softmax(b, b.x(300)),
    "a bias": scores((4, 3, 9, 9), bias=(1, 3, 9, 9)),
    "a bias and a mask": scores((2, 4, 3, 9, 9), bias=(1, 3, 9, 9), mask=(4, 1, 9, 9)),
    "a number of each row": scores((4, 12, 20), mask=(4, 12, 1)),
    "wide": lambda b: softmax(b, b("sigmoid", b.x(3, 1000))),
}
CONFIG = Attrs(lanes=32, threads=128)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_it_runs_every_step(step_of, name, dtype):
    assert legal(FAMILY, step_of(STEPS[name], dtype))


REFUSED = {
    "another op": (lambda b: b("relu", b.x(2, 8)), "not with a softmax"),
    "another axis": (lambda b: softmax(b, b.x(2, 8), dim=0), "along the last axis"),
    "another dtype": (
        lambda b: softmax(b, b.x(2, 8), dtype={"dtype": "float32"}),
        "got float16, float32",
    ),
    "an early value": (lambda b: (y := b("relu", b.x(2, 8)), softmax(b, y)), "read outside"),
    "nothing": (lambda b: softmax(b, b.x(0, 8)), "nothing to compute"),
    "a sum before": (
        lambda b: softmax(b, b("mean", b.x(2, 8, 3), dims=(2,), keepdim=False)),
        "place by place",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_run_is_refused_with_the_reason(step_of, name):
    emit, reason = REFUSED[name]
    assert reason in FAMILY.why_not_step(step_of(emit, "float16"))


def test_lanes_fit_the_row(step_of):
    arch = load_arch("sm90")
    wide = FAMILY.parts(step_of(lambda b: softmax(b, b.x(3, 1025)), "float16"))
    assert "would hold 33 elements" in FAMILY.why_not_config(wide, CONFIG, arch)
    narrow = FAMILY.parts(step_of(lambda b: softmax(b, b.x(3, 16)), "float16"))
    assert "more than a row" in FAMILY.why_not_config(narrow, CONFIG, arch)
    assert FAMILY.why_not_config(narrow, Attrs(lanes=16, threads=128), arch) is None


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 4, 49, 49))

    def forward(self, q, k):
        return (q @ k * 0.5 + self.bias).softmax(-1)


def test_a_guess_computes_scores_where_they_are_normalised():
    types = TensorType((8, 4, 49, 32), "float16"), TensorType((8, 4, 32, 49), "float16")
    graph = extract(Scores().half().eval(), *types)
    plan = guessed_plan(graph, load_search_space("sm90"), network="scores")
    families = {choice.candidate.family: len(choice.nodes) for choice in plan.choices}
    assert families["softmax"] == 3


@pytest.mark.parametrize(("arch_name", "name"), in_turns(["a bias and a mask", "wide"]))
def test_it_builds_within_its_limits(step_of, build_within_limits, arch_name, name):
    step = step_of(STEPS[name], "float16")
    config = legal(FAMILY, step, arch_name)[-1].config
    usage = build_within_limits(FAMILY, step, config, load_arch(arch_name))
    assert set(usage) == {"run", "run_unaligned"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", STEPS)
def test_it_is_right_on_the_gpu(assert_case_right, name, dtype):
    assert_case_right(FAMILY, STEPS, name, dtype)
