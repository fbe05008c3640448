"""Concatenations of images: which steps, which configs, that they are right."""

from __future__ import annotations

import json

import torch
from torch import nn

from plantune.base.canonical import Attrs
from plantune.graph.fusions import all_fusions
from plantune.graph.partition import alternatives
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.concat import FAMILY

from .contract import Contract

CONFIG = Attrs(threads=128, vectors=2)


def concat(*channels, size=(5, 3), axis=1, then=(), order=None):
    """Images of so many channels; `order` are the places of those that are joined."""

    def emit(b):
        x = [b.x(2, count, *size) for count in channels]
        joined = [{"tensor": at} for at in order or range(len(x))]
        arguments = json.dumps({"tensors": joined, "dim": axis})
        y = b("aten.cat.default", *x, arguments=arguments)
        total = sum(channels[at["tensor"]] for at in joined)
        for op in then:
            more = (b.w(total),) if op.endswith("channel") else ()
            y = b(op, y, *more, **({"axis": 1} if more else {}))
        return y

    return emit


STEPS = {
    "two": concat(16, 8),
    "scaled": concat(8, 24, 8, then=("mul_channel", "add_channel", "relu")),
    "odd": concat(3, 4, 6, then=("add_channel", "silu")),
    "one twice": concat(8, 16, order=(0, 1, 0), then=("mul_channel",)),
    "many": concat(*(8,) * 24, then=("relu",)),
    "wide": concat(1024, 1200),
    "one pixel": concat(64, 32, size=(1, 1), axis=-3),
}


def test_it_reads_what_is_joined_in_order(step_of):
    parts = FAMILY.parts(step_of(STEPS["one twice"], "float16"))
    assert parts.x == ("x0", "x1", "x0")
    assert parts.begins == (0, 8, 24, 32)
    assert parts.vector == 8
    assert FAMILY.parts(step_of(STEPS["odd"], "float16")).vector == 1


REFUSED = {
    "another op": (lambda b: b("relu", b.x(2, 8)), "not with a concatenation"),
    "rows": (concat(4, 4, axis=2), "along their channels"),
    "a scale after a bias": (concat(8, 8, then=("add_channel", "mul_channel")), "too late"),
    "a scale after a function": (concat(8, 8, then=("relu", "mul_channel")), "has no place"),
    "a sum": (lambda b: b("sum", STEPS["two"](b), dims=(1,), keepdim=False), "has no place"),
    "an early value": (lambda b: (y := STEPS["two"](b), b("relu", y)), "read outside"),
    "a moving scale": (
        lambda b: b("mul_channel", concat(8, 8)(b), b.x(16), axis=1),
        "the scale is not constant",
    ),
}


class TestContract(Contract):
    family, steps, refused = FAMILY, STEPS, REFUSED
    builds = ("scaled", "many")
    config = Attrs(threads=256, vectors=4)


class DenseLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 8, 3, padding=1, bias=False), nn.BatchNorm2d(24)
        self.next = nn.Conv2d(24, 8, 1, bias=False)

    def forward(self, x):
        both = nn.functional.relu(self.norm(torch.cat([x, self.conv(x)], 1)))
        return self.next(both)


def test_a_dense_layer_joins_and_normalises_at_once():
    graph = extract(DenseLayer().half().eval(), TensorType((2, 16, 14, 14), "float16", "nhwc"))
    fits = [s.ops for s in alternatives(graph, all_fusions()) if FAMILY.why_not_step(s) is None]
    assert max(fits, key=len) == ("aten.cat.default", "mul_channel", "add_channel", "relu")
