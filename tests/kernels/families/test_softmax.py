"""Softmaxes of rows: which steps, which configs, that they are right."""

from __future__ import annotations

import torch
from torch import nn

from plantune.base.canonical import Attrs, canonical
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.softmax import FAMILY
from plantune.plans.guess import guessed_plan
from plantune.space.search_space import load_search_space

from .contract import Contract


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
    "in float32": lambda b: softmax(b, b.x(5, 12), dtype={"dtype": "float32"}),
}
CONFIG = Attrs(lanes=32, threads=128)


REFUSED = {
    "another op": (lambda b: b("relu", b.x(2, 8)), "not with a softmax"),
    "another axis": (lambda b: softmax(b, b.x(2, 8), dim=0), "along the last axis"),
    "another dtype": (lambda b: softmax(b, b.x(2, 8), dtype={"dtype": "float64"}), "got float64"),
    "an early value": (lambda b: (y := b("relu", b.x(2, 8)), softmax(b, y)), "read outside"),
    "nothing": (lambda b: softmax(b, b.x(0, 8)), "nothing to compute"),
    "a sum before": (
        lambda b: softmax(b, b("mean", b.x(2, 8, 3), dims=(2,), keepdim=False)),
        "place by place",
    ),
}


def row(length):
    return lambda b: softmax(b, b.x(3, length))


class TestContract(Contract):
    family, steps, refused = FAMILY, STEPS, REFUSED
    builds = ("a bias and a mask", "wide")
    configs = (
        (row(1025), CONFIG, "would hold 33 elements"),
        (row(16), CONFIG, "more than a row"),
        (row(16), Attrs(lanes=16, threads=128), None),
    )


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
