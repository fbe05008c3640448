"""Products of many matrices: which steps, how they are read, that they build and are right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plantune import optimize
from plantune.base.canonical import Attrs, canonical
from plantune.devices.cuda.flags import planned_for
from plantune.graph import TensorType
from plantune.graph.ops.overload import MATMUL
from plantune.graph.tracing.extract import extract
from plantune.kernels.families.batched_product import FAMILY, Products
from plantune.plans.guess import guessed_plan
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .contract import Contract

CONFIG = Attrs(math="mma", tile_m=64, tile_n=64, tile_k=32, warp_m=32, warp_n=32, stages=2)
SIMT = Attrs(CONFIG, math="simt", tile_k=8)
DEEPER = Attrs(CONFIG, stages=3)
LARGE = Attrs(DEEPER, tile_n=128, warp_n=64, tile_k=64)
OPERANDS = canonical({"self": {"tensor": 0}, "other": {"tensor": 1}})


def products(left, right):
    return lambda b: b(MATMUL, b.x(*left), b.x(*right), arguments=OPERANDS)


def computed(images=1, groups=32, outputs=80, channels=112, size=(14, 14), op="conv2d", **changed):
    """A convolution whose filters are computed, or one of its gradients."""
    given, made = (images, groups * channels, *size), (images, groups * outputs, *size)
    filters = (groups * outputs, channels, 1, 1)
    shapes = {
        "conv2d": (given, filters, made),
        "conv2d_dgrad": (made, filters, given),
        "conv2d_wgrad": (made, given, filters),
    }
    plain = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": groups}

    def emit(b):
        *inputs, shape = shapes[op]
        asked = {} if op == "conv2d" else {"shape": shape}
        return b(op, *(b.x(*each) for each in inputs), **{**plain, **asked, **changed})

    return emit


STEPS = {
    "matrices": products((5, 70, 40), (5, 40, 24)),
    "in heads": products((2, 3, 49, 49), (2, 3, 49, 32)),
    "two matrices": products((33, 4), (4, 1000)),
    "one right matrix": products((3, 20, 36), (36, 50)),
    "right ones again and again": products((3, 2, 17, 40), (2, 40, 24)),
    "left ones again and again": products((130, 8), (7, 8, 72)),
    "a deep sum": products((2, 9, 1000), (2, 1000, 11)),
    "one row and one column": products((4, 1, 32), (4, 32, 1)),
    "one element": products((1, 1, 1), (1, 1, 1)),
    "filters of each image": computed(),
    "rows of odd pixels": computed(outputs=192, channels=130, size=(7, 7), groups=3),
    "several images": computed(images=3, groups=2, outputs=24, channels=16, size=(5, 6)),
    "one group": computed(images=2, groups=1, outputs=40, channels=24, size=(8, 4)),
    "gradient of images": computed(op="conv2d_dgrad", groups=3),
    "gradient of odd images": computed(2, 3, 5, 7, (3, 5), op="conv2d_dgrad"),
    "gradient of filters": computed(op="conv2d_wgrad", groups=3),
    "gradient of odd filters": computed(1, 3, 7, 5, (3, 5), op="conv2d_wgrad"),
}


READ = {
    "in heads": Products("x0", "x1", 49, 32, 49, 6, lefts=6, rights=6),
    # The rows of all left matrices follow each other.
    "one right matrix": Products("x0", "x1", 60, 50, 36),
    "right ones again and again": Products("x0", "x1", 17, 24, 40, 6, lefts=6, rights=2),
    "left ones again and again": Products("x0", "x1", 130, 72, 8, 7, lefts=1, rights=7),
    "several images": Products("x1", "x0", 24, 30, 16, 6, lefts=2, rights=6),
    "gradient of odd images": Products(
        "x1", "x0", 7, 15, 5, 6, lefts=3, rights=6, left_turned=True
    ),
    "gradient of odd filters": Products(
        "x0", "x1", 7, 5, 15, 3, lefts=3, rights=3, right_turned=True
    ),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_multiplied(step_of, name):
    assert FAMILY.parts(step_of(STEPS[name])).products == READ[name]


def constant_filters(b):
    return b.conv(b.x(1, 8, 4, 4), b.w(8, 8, 1, 1))


REFUSED = {
    "another op": (lambda b: b("relu", b.x(2, 3)), "only products of matrices"),
    "more than a product": (lambda b: b("relu", computed()(b)), "only one product"),
    "a vector": (products((3, 4, 5), (5,)), "is a vector"),
    "inner matrices again and again": (products((2, 1, 4, 5), (2, 3, 5, 6)), "inside of others"),
    "a larger filter": (
        lambda b: b.conv(b.x(1, 8, 4, 4), b.x(8, 8, 3, 3), padding=(1, 1)),
        "single pixels",
    ),
    "steps of two pixels": (
        lambda b: b.conv(b.x(1, 8, 4, 4), b.x(8, 8, 1, 1), stride=(2, 2)),
        "single pixels",
    ),
    "filters that stay": (constant_filters, "weights that stay"),
    "filters of several images": (computed(2, op="conv2d_wgrad"), "sums over 2 images"),
    "nothing": (products((0, 4, 5), (0, 5, 6)), "nothing to compute"),
    "another dtype": (STEPS["matrices"], "not float64", "float64"),
    "too much": (products((1, 1 << 16, 1 << 16), (1, 1 << 16, 8)), "into 32 bits"),
}


class TestContract(Contract):
    family, steps, refused, config = FAMILY, STEPS, REFUSED, CONFIG
    builds = ("filters of each image", "rows of odd pixels", "gradient of images")
    builds_chosen = tuple(
        (STEPS[name], SIMT, "float32") for name in ("filters of each image", "gradient of filters")
    )
    configs = (
        (STEPS["rows of odd pixels"], DEEPER, "single 16-bit channels"),
        (STEPS["rows of odd pixels"], CONFIG, None),
        (STEPS["matrices"], DEEPER, None),
        (computed(4, 4, 130, 258, (2, 65)), LARGE, "32 loads of a thread"),
    )


def why_not(step, config):
    return FAMILY.why_not_config(FAMILY.parts(step), config, load_arch("sm90"))


@pytest.mark.parametrize(("name", "place"), [("one group", 0), ("matrices", 1)])
def test_tf32_is_asked_for_where_the_framework_would_use_it(step_of, name, place):
    """Of convolutions and of products, each by a setting of its own."""
    step = step_of(STEPS[name], "float32")
    config = Attrs(CONFIG, math="tf32", stages=3)
    for allowed in ("tf32", "ieee"):
        settings = ["tf32" if allowed == "ieee" else "ieee"] * 3
        settings[place] = allowed
        with planned_for(tuple(settings)):
            assert (why_not(step, config) is None) == (allowed == "tf32")


def test_groups_are_multiplied_in_float32_as_the_framework_does(step_of):
    config = Attrs(CONFIG, math="tf32", stages=3)
    with planned_for(("tf32", "tf32", "tf32")):
        assert "sums groups in float32" in why_not(
            step_of(STEPS["several images"], "float32"), config
        )


def is_guessed(module, *shapes):
    graph = extract(module.half().eval(), *(TensorType(shape, "float16") for shape in shapes))
    plan = guessed_plan(graph, load_search_space("sm90"), network="one")
    return plan is not None and FAMILY.name in {each.candidate.family for each in plan.choices}


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).relu() + 1


def test_a_guess_takes_it_for_filters_of_each_image_alone():
    assert is_guessed(Conditional(), (8, 24, 7, 7), (8, 3))
    assert not is_guessed(Product(), (5, 64, 64), (5, 64, 64))


# By outputs, channels and size of 32 groups, then by tile and warps: what replayed launches took on
# an H200, in us (2026-11-24).
MEASURED = {
    (480, 80, 14): {(128, 128, 32, 64, 64): 6.1, (128, 64, 32, 32, 64): 8.1},
    (112, 480, 14): {
        (64, 128, 64, 32, 64): 10.4,
        (128, 64, 32, 64, 32): 10.8,
        (64, 128, 32, 32, 64): 11.4,
    },
    (672, 112, 14): {(128, 64, 32, 64, 32): 11.6, (128, 128, 32, 64, 64): 12.3},
    (112, 672, 14): {(64, 128, 64, 32, 64): 13.1, (64, 128, 32, 32, 64): 14.4},
    (192, 672, 7): {(64, 64, 32, 32, 32): 12.6},
    (1152, 192, 7): {(64, 64, 32, 32, 32): 12.5},
    (192, 1152, 7): {(64, 64, 32, 32, 32): 19.5},
}


@pytest.mark.parametrize("shape", MEASURED)
def test_the_guess_finds_a_fast_config(step_of, shape):
    outputs, channels, size = shape
    step = step_of(computed(1, 32, outputs, channels, (size, size)), "float16")
    parts, measured = FAMILY.parts(step), MEASURED[shape]

    def guess(tile):
        words = ("tile_m", "tile_n", "tile_k", "warp_m", "warp_n")
        config = Attrs(CONFIG, **dict(zip(words, tile, strict=True)), stages=3)
        return FAMILY.estimate_us(parts, config, load_arch("sm90"))

    assert measured[min(measured, key=guess)] <= 1.15 * min(measured.values())


class Conditional(nn.Module):
    """As conditional convolutions: each image has filters of its own, mixed from a few."""

    def __init__(self, channels=24, outputs=40, experts=3) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(experts, outputs * channels) / channels**0.5)
        self.outputs = outputs

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        weight = (mixed @ self.filters).view(count * self.outputs, channels, 1, 1)
        y = nn.functional.conv2d(x.reshape(1, -1, height, width), weight, groups=count)
        return y.view(count, self.outputs, height, width)


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("off", [0, 1])
    def test_a_call_is_as_far_from_float64_as_eager(self, off):
        """Wherever an image begins."""
        torch.manual_seed(0)
        module = Conditional().cuda().half().eval()
        mixed = torch.rand(8, 3, device="cuda").half()
        memory = torch.randn(8 * 24 * 49 + off, device="cuda").half()
        x = memory[off:].view(8, 24, 7, 7)
        tuned = optimize(module, x, mixed, fallback="silent")
        with torch.no_grad():
            ours, theirs = tuned(x, mixed), module(x, mixed)
            exact = module.double()(x.double(), mixed.double())
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm()
