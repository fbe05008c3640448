"""Which convolutions the tiles cover, and that the transforms belong together."""

from __future__ import annotations

import pytest
import torch

from plantune import optimize
from plantune.default_plans import Preference, compose
from plantune.graph.fusions import fusions_named
from plantune.kernels.families import winograd
from plantune.kernels.families.winograd import WEIGHT_TRANSFORMS
from plantune.plan import check_plan
from plantune.runtime.program import Program

CONFIG = {"layout": "nhwc"}
pytestmark = pytest.mark.usefixtures("as_with_a_compiler")
SAME = {"padding": (1, 1)}


def conv(size=(8, 8), kernel=3, channels=4, groups=1, **changed):
    attrs = {**SAME, **changed}

    def emit(b):
        x = b.x(2, channels, *size)
        w = b.w(8, channels // groups, kernel, kernel)
        return b.conv(x, w, groups=groups, **attrs)

    return emit


@pytest.mark.parametrize("size", [(2, 2), (4, 6), (16, 16)])
def test_even_images_are_covered(step_of, refusal, size):
    assert refusal(step_of(conv(size)), "winograd", **CONFIG) is None


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (conv((5, 8)), "tiles of 2x2 do not cover an image of 5x8"),
        (conv(kernel=1, padding=(0, 0)), "only 3x3 convolutions"),
        (conv(padding=(0, 0)), "only 3x3 convolutions"),
        (conv(stride=(2, 2)), "only 3x3 convolutions"),
        (conv(dilation=(2, 2)), "only 3x3 convolutions"),
        (conv(groups=2), "without groups"),
        (lambda b: b("affine", conv()(b), alpha=2.0, beta=0.0), "has no place in the epilogue"),
    ],
)
def test_it_says_what_it_does_not_cover(step_of, refusal, emit, reason):
    assert reason in refusal(step_of(emit), "winograd", **CONFIG)


def test_other_dtypes_are_refused(step_of, refusal):
    reason = refusal(step_of(conv(), "bfloat16"), "winograd", **CONFIG)
    assert reason == "the transforms are written for float32, got bfloat16"


def test_without_a_compiler(step_of, refusal, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert "no C++ compiler was found" in refusal(step_of(conv()), "winograd", **CONFIG)


@pytest.mark.parametrize("algorithm", WEIGHT_TRANSFORMS)
def test_the_weight_transform_belongs_to_the_other_two(algorithm):
    """A [(G w) * (B x)] is the convolution of a row: B and A as the header has them."""
    w = torch.tensor([2.0, -3.0, 5.0], dtype=torch.float64)
    g = torch.tensor(WEIGHT_TRANSFORMS[algorithm], dtype=torch.float64)
    if algorithm == "Winograd":
        x = torch.tensor([1.0, 7.0, -2.0, 4.0], dtype=torch.float64)
        v = torch.stack([x[0] - x[2], x[1] + x[2], x[2] - x[1], x[1] - x[3]])
        m = (g @ w) * v
        y = torch.stack([m[0] + m[1] + m[2], m[1] - m[2] - m[3]])
        padded = x
    else:
        x = torch.tensor([7.0, -2.0], dtype=torch.float64)
        m = (g @ w) * torch.stack([x[0], x[0] + x[1], x[1]])
        y = torch.stack([m[1] + m[2], m[1] + m[0]])
        padded = torch.nn.functional.pad(x, (1, 1))
    expected = torch.stack([(w * padded[i : i + 3]).sum() for i in range(2)])
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(("size", "at_once", "parts"), [((8, 8), 40_000, 5), ((2, 2), 3_000, 2)])
def test_many_images_are_computed_in_parts(space, monkeypatch, size, at_once, parts):
    """To the bit as all at once, with a bias and a residual, in less memory."""
    module = Residual().eval().requires_grad_(False)
    x = torch.randn(10, 8, *size)
    graph = optimize(module, x).stock().graph
    plan = compose(
        graph,
        space,
        network="parts",
        fusions=fusions_named("conv_epilogue"),
        preferences=(Preference("winograd", CONFIG),),
    )
    assert [choice.candidate.family for choice in plan.choices].count("winograd") == 1
    found = []
    for part_bytes in (1 << 30, at_once):
        monkeypatch.setattr(winograd, "PART_BYTES", part_bytes)
        (step,) = (s for s in check_plan(plan, graph, space) if len(s.nodes) > 1)
        read = winograd.FAMILY.read(step)
        program = Program(graph, plan, space)
        program.refresh(dict(module.named_parameters()))
        (y,) = program.forward(x)
        found.append((read.tiles.parts, winograd.FAMILY.workspace_bytes(read, CONFIG), y))
    (one, whole, expected), (several, less, y) = found
    assert (one, several) == (1, parts)
    assert less < whole / parts + 128
    assert torch.equal(y, expected)
    torch.testing.assert_close(y, module(x), rtol=1e-4, atol=1e-4)


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return (self.conv(x) + x).relu()


@pytest.mark.parametrize(
    ("images", "image_bytes", "weight_bytes", "at_once"),
    [
        (32, 1 << 19, 1 << 18, 8),  # 4 MiB at once
        (8, 1 << 19, 1 << 18, 8),
        (32, 1 << 16, 16 << 20, 32),  # less than the weights, which each part reads
        (31, 1 << 19, 1 << 18, 31),  # one at a time would be too little
        (32, 6 << 20, 1 << 18, 1),
    ],
)
def test_a_part_fits_into_the_caches(images, image_bytes, weight_bytes, at_once):
    assert winograd._at_once(images, image_bytes, weight_bytes) == at_once
