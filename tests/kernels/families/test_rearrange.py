"""Windows of images and back: which steps, where each element comes from, that they are right."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from plantune.base.canonical import Attrs
from plantune.graph import Step, TensorType
from plantune.graph.fusions import fusions_named
from plantune.graph.partition import fused
from plantune.graph.tracing.extract import extract
from plantune.kernels.families.rearrange import FAMILY
from plantune.plans.guess import guessed_plan
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import legal
from .contract import Contract


class Cut(nn.Module):
    """As Swin cuts an image: rolled by `shift`."""

    def __init__(self, side: int, shift: int = 0) -> None:
        super().__init__()
        self.side, self.shift = side, shift

    def forward(self, x):
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        count, rows, columns, width = x.shape
        x = x.view(count, rows // self.side, self.side, columns // self.side, self.side, width)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.side**2, width)


class Join(Cut):
    """The way back, and what is added to the image."""

    def __init__(self, side: int, shift: int = 0, adds: bool = True) -> None:
        super().__init__(side, shift)
        self.adds = adds

    def forward(self, x, image):
        count, rows, columns, width = image.shape
        x = x.view(count, rows // self.side, columns // self.side, self.side, self.side, width)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(count, rows, columns, width)
        x = torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x
        return image + x if self.adds else x


class Shuffle(nn.Module):
    def forward(self, x):
        return x.view(2, 2, 4, 6, 6).transpose(1, 2).reshape(2, 8, 6, 6)


class Apart(nn.Module):
    def forward(self, x):
        return x.view(2, 4, 3, 2, 3, 2).permute(0, 1, 3, 5, 2, 4).reshape(2, 16, 3, 3)


IMAGE, WINDOWS = (2, 12, 8, 24), (12, 16, 24)
CASES = {
    "cut": (Cut(4), [IMAGE]),
    "cut and rolled": (Cut(4, 3), [IMAGE]),
    "joined": (Join(4), [WINDOWS, IMAGE]),
    "joined and rolled": (Join(4, 3), [WINDOWS, IMAGE]),
    "joined, nothing added": (Join(4, 1, adds=False), [WINDOWS, IMAGE]),
    "odd channels": (Join(7, 2), [(4, 49, 5), (1, 14, 14, 5)]),
    "large": (Cut(7, 3), [(5, 56, 56, 96)]),
}


def step_for(stated, dtype="float16") -> Step:
    module, shapes = stated
    graph = extract(module.eval(), *(TensorType(tuple(shape), dtype) for shape in shapes))
    steps = fused(graph, fusions_named("windows"))
    return max(steps, key=lambda step: len(step.nodes))


def case(name: str, dtype: str = "float16") -> Step:
    return step_for(CASES[name], dtype)


@pytest.mark.parametrize("name", [name for name in CASES if name != "large"])
def test_the_source_says_where_each_element_comes_from(name):
    """Its statements are Python's, but for integers and their division."""
    module, shapes = CASES[name]
    source = FAMILY.source(
        FAMILY.parts(case(name)), Attrs(vectors=1, threads=128), load_arch("sm90")
    )
    body = source.partition("Index rest, found;")[2].partition("return i;")[0]
    text = re.sub(r"(\d)u\b", r"\1", body).replace(", rest /=", "; rest //=")
    text = "\n".join(
        line.strip().rstrip(";").replace(", found", "; found") for line in text.split("\n")
    )
    x = torch.arange(torch.Size(shapes[0]).numel()).view(shapes[0])
    others = [torch.zeros(shape, dtype=torch.int64) for shape in shapes[1:]]
    expected = module(x, *others).flatten().tolist()
    code = compile(text, "place", "exec")

    def place(i: int) -> int:
        values = {"i": i}
        exec(code, {}, values)
        return values["i"]

    assert [place(i) for i in range(len(expected))] == expected


def test_neighbours_move_together():
    assert FAMILY.parts(case("cut")).width == 8
    assert FAMILY.parts(case("cut", "float32")).width == 4
    assert FAMILY.parts(case("odd channels")).width == 1


REFUSED = {
    "a shuffle of channels": ((Shuffle(), [(2, 8, 6, 6)]), "5 axes may be a layout"),
    "neighbours": ((Apart(), [(2, 4, 6, 6)]), "neighbours are moved apart"),
    "another shape": ((nn.Flatten(1), [(2, 4, 6, 6)]), "the order stays"),
    "nothing": ((Cut(4), [(0, 12, 8, 24)]), "nothing to move"),
    "integers": (CASES["cut"], "got int64", "int64"),
}


class TestContract(Contract):
    family, steps, refused = FAMILY, CASES, REFUSED
    builds, config = ("joined and rolled", "large"), Attrs(vectors=4, threads=256)

    def step(self, stated, dtype="float16"):
        return step_for(stated, dtype)

    def test_it_runs_every_step(self, name, dtype):
        """All of it as one."""
        step = self.step(CASES[name], dtype)
        assert len(legal(FAMILY, step)) == 6
        assert {"permute", "reshape"} <= set(step.ops)
        assert len(step.inputs) == (2 if getattr(CASES[name][0], "adds", False) else 1)


def test_a_guess_moves_windows_once():
    class Both(nn.Module):
        def forward(self, x):
            return Join(4, 3)(Cut(4, 3)(x).relu(), x)

    graph = extract(Both(), TensorType(IMAGE, "float16"))
    plan = guessed_plan(graph, load_search_space("sm90"), network="windows")
    families = [choice.candidate.family for choice in plan.choices]
    assert families == ["rearrange", "pointwise", "rearrange"]
