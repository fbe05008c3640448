"""The gradient of squeeze-and-excite in one step: which steps it reads, that it is right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
from torch import nn

from plantune.base.canonical import Attrs
from plantune.graph.fusions import fusions_named
from plantune.graph.partition import alternatives
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.se_grad import FAMILY
from plantune.kernels.registry import candidates
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import BLOCKS
from .contract import KERNELS, Contract

CONFIG = Attrs(images=1, threads=256, math="simt", hold="registers", blocks_per_sm=1)


@dataclass(frozen=True)
class Gradient:
    """The sizes of a tail, and which parts of its gradient are in the step."""

    n: int = 3
    channels: int = 64
    height: int = 4
    width: int = 4
    hidden: int = 4
    added: bool = True
    masked: bool = True
    residual: bool = True
    remade: bool = True
    scaled: bool = True
    layers: bool = True
    sums: bool = True
    by_rows: bool = True
    convolutions: bool = False
    functions: tuple[str, str] = ("relu", "sigmoid")

    @property
    def shape(self):
        return (self.n, self.channels, self.height, self.width)

    def layer(self, b, dy, argument, width, depth):
        """The gradients of a layer's argument, then of its weight and bias."""
        if self.convolutions:
            plain = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
            dx = b(
                "conv2d_dgrad", dy, b.w(width, depth, 1, 1), shape=(self.n, depth, 1, 1), **plain
            )
            dw = ("conv2d_wgrad", dy, argument)
            made = {"shape": (width, depth, 1, 1), **plain}
            dims = (0, 2, 3)
        else:
            weight = b.w(*((width, depth) if self.by_rows else (depth, width)))
            dx = b("matmul", dy, weight, transpose_a=False, transpose_b=not self.by_rows)
            dw = ("matmul", *((dy, argument) if self.by_rows else (argument, dy)))
            made, dims = {"transpose_a": True, "transpose_b": False}, (0,)
        if not self.layers:
            return dx, ()
        return dx, (b(dw[0], *dw[1:], **made), b("sum", dy, dims=dims, keepdim=False))

    def vector(self, b, width):
        return b.x(self.n, width, *((1, 1) if self.convolutions else ()))

    def spread(self, b, dgate):
        """The gradient of the mean from that of the gates, and those of both layers."""
        c, r = self.channels, self.hidden
        first, second = self.functions
        if not self.convolutions:
            dgate = b("reshape", dgate, shape=(self.n, c))
        excited = b(f"{second}_grad", dgate, self.vector(b, c))
        dh, excite = self.layer(b, excited, self.vector(b, r), c, r)
        squeezed = b(f"{first}_grad", dh, self.vector(b, r))
        dmean, squeeze = self.layer(b, squeezed, self.vector(b, c), r, c)
        scaled = b("affine", dmean, alpha=1 / (self.height * self.width), beta=0.0)
        if not self.convolutions:
            scaled = b("reshape", scaled, shape=(self.n, c, 1, 1))
        return scaled, (*(() if self.layers else (excited, squeezed)), *excite, *squeeze)

    def __call__(self, b):
        dy, leaving = b.x(*self.shape), []
        if self.added:
            dy = b("add", dy, b.x(*self.shape))
            leaving += [b("sum_to", dy, shape=(1,))] if self.sums else []
        g = b("relu_grad", dy, b.x(*self.shape)) if self.masked else dy
        leaving += [g] if self.masked and self.residual else []
        z = u = b.x(*self.shape)
        scale = b.w(1)
        if self.remade:
            u = b("add", b("mul", z, scale), b.w(1))
        direct = b("mul", g, b.x(self.n, self.channels, 1, 1))
        dgate = b("sum_to", b("mul", g, u), shape=(self.n, self.channels, 1, 1))
        spread, layers = self.spread(b, dgate)
        du = b("add", direct, spread)
        leaving += [b("sum_to", du, shape=(1,))] if self.sums else []
        if self.scaled:
            leaving += [b("sum_to", b("mul", du, z), shape=(1,))] if self.sums else []
            du = b("mul", du, scale)
        return (*leaving, *layers, du)


def block(channels, size, n=3, **parts):
    return Gradient(n, channels, size, size, max(channels // 16, 1), **parts)


BARE = {"added": False, "masked": False, "remade": False, "scaled": False, "sums": False}
VARIANTS = {
    "all parts": Gradient(),
    "no sums": Gradient(sums=False),
    "layers outside": Gradient(layers=False),
    "nothing is added": Gradient(layers=False, sums=False),
    "weights by columns": Gradient(by_rows=False),
    "no residual": Gradient(residual=False),
    "the gate alone": Gradient(**BARE),
    "masked": Gradient(**{**BARE, "masked": True}),
    "convolutions": Gradient(convolutions=True, functions=("silu", "sigmoid")),
    "MobileNetV3": Gradient(
        2, 72, 14, 14, 24, convolutions=True, functions=("relu", "hardsigmoid"), **BARE
    ),
    "EfficientNet": Gradient(
        2, 1152, 7, 7, 48, convolutions=True, functions=("silu", "sigmoid"), **BARE
    ),
    "odd image": Gradient(3, 24, 5, 7, 5),
    "one row": Gradient(2, 32, 1, 2, 2),
    "few channels": Gradient(5, 8, 9, 9, 1),
    "one image": Gradient(1, 64, 5, 5, 8),
    "an image read twice": Gradient(2, 256, 30, 31, 16),
    "an image read twice, no residual": Gradient(2, 256, 30, 31, 16, residual=False),
    "many images": Gradient(131, 64, 2, 2, 8),
    **{f"block {c}": block(c, size) for c, size in BLOCKS},
}


BATCHES = {
    f"{channels}-{n}": block(channels, size, n)
    for channels, size in BLOCKS
    for n in (1, 7, 128, 129)
}


def test_the_network_offers_one_step_for_the_gradient_of_each_tail():
    graph = differentiate(extract(SEResNet9Fixup(), TensorType((2, 3, 64, 64))))
    steps = alternatives(graph, fusions_named("se_grad"))
    taken = [step for step in steps if FAMILY.why_not_step(step) is None]
    whole = [step for step in taken if len(step.ops) == 24]
    assert len(whole) == 3  # nothing is added to the gradient of the last block's result
    for step in whole:
        assert {"add", "relu_grad", "sigmoid_grad", "matmul", "sum"} <= {*step.ops}
        images = [name for name, type_ in step.outputs if len(type_.shape) == 4]
        assert len(images) == 2  # the residual's gradient and the convolution's
    ends = {step.nodes[-1].name for step in taken if step.ops[0] != "add"}
    assert any("layers.3.0" in name for name in ends)


class Excited(nn.Module):
    """As other people write it: with or without axes of one pixel, in one view or several."""

    def __init__(self, *, linear, keepdim=False, repeated=False, functions=(nn.ReLU, nn.Sigmoid)):
        super().__init__()
        layer = nn.Linear if linear else partial(nn.Conv2d, kernel_size=1)
        self.squeeze, self.excite = layer(32, 8), layer(8, 32)
        self.functions = [kind() for kind in functions]
        self.linear, self.keepdim, self.repeated = linear, keepdim, repeated
        self.ends = nn.ModuleList(nn.Conv2d(32, 32, 1) for _ in range(2))

    def forward(self, x):
        first, last = self.ends
        x = first(x)
        mean = x.mean((2, 3), keepdim=self.keepdim)
        hidden, gate = self.functions
        gates = gate(self.excite(hidden(self.squeeze(mean.flatten(1) if self.linear else mean))))
        if self.repeated:
            return last(x * gates.view(*x.shape[:2], 1, 1).expand_as(x))
        return last(x * (gates[:, :, None, None] if self.linear else gates))


@pytest.mark.parametrize(
    "module",
    [
        Excited(linear=True),
        Excited(linear=True, keepdim=True),
        Excited(linear=True, repeated=True),
        Excited(linear=False, keepdim=True, functions=(nn.SiLU, nn.Sigmoid)),
        Excited(linear=False, keepdim=True, functions=(nn.ReLU, nn.Hardsigmoid)),
    ],
)
def test_other_peoples_tails_are_one_step_too(module):
    graph = differentiate(extract(module, TensorType((2, 32, 6, 6))))
    steps = alternatives(graph, fusions_named("se_grad"))
    taken = [step for step in steps if FAMILY.why_not_step(step) is None]
    (whole,) = (step for step in taken if all(FAMILY.parts(step).gradient.layers))
    weights = [layer.weight for layer in FAMILY.parts(whole).gradient.layers]
    assert None not in weights


def with_a_product(b):
    outputs = Gradient(layers=False)(b)
    inner = b.graph.nodes[[n.op for n in b.graph.nodes].index("matmul")].name
    return (*outputs, inner)


REFUSED = {
    "another start": (lambda b: b("relu", b.x(2, 64, 4, 4)), "nothing is added up"),
    "one pixel": (
        lambda b: b("sum", b.x(2, 64, 1, 1), dims=(2, 3), keepdim=False),
        "an image has one pixel",
    ),
    "no derivative": (
        lambda b: b("relu", b("sum", b.x(2, 64, 2, 2), dims=(2, 3), keepdim=False)),
        "relu at 'relu' is not a function's derivative",
    ),
    "no layer": (
        lambda b: b(
            "relu_grad", b("sum", b.x(2, 64, 2, 2), dims=(2, 3), keepdim=False), b.x(2, 64)
        ),
        "'relu_grad' goes through no layer",
    ),
    "a sum of channels": (
        lambda b: (
            y := Gradient(**BARE)(b)[-1],
            b("sum", y, dims=(0, 2, 3), keepdim=False),
        ),
        "sum at 'sum_3' has no place",
    ),
    "a value that stays inside": (with_a_product, "stays inside, but is read outside"),
    "another dtype": (Gradient(), "got float64", "float64"),
    "odd channels": (Gradient(channels=20), "channels are read by eights"),
    "many hidden channels": (Gradient(hidden=300), "up to 256 hidden channels"),
}


def test_a_value_may_be_read_outside_where_it_leaves(step_of):
    def emit(b):
        return b("relu", y := Gradient(**BARE)(b)[-1]), y

    assert FAMILY.why_not_step(step_of(emit, "float16")) is None


class TestContract(Contract):
    family, steps, refused, config = FAMILY, VARIANTS, REFUSED, CONFIG
    builds = ("block 64",)
    configs = (
        (
            Gradient(n=4, channels=512),
            Attrs(CONFIG, images=4, threads=128),
            "32 threads of an image do not cover",
        ),
        (Gradient(n=2), Attrs(CONFIG, images=4), "larger than the batch"),
        (
            Gradient(4, 2048, 4, 4, 128),
            Attrs(CONFIG, images=4, threads=1024),
            "bytes of shared memory",
        ),
        (Gradient(), Attrs(CONFIG, math="mma"), "for 2 to 4 images, got 1"),
    )

    def kernels(self, step, config):
        return KERNELS | {"add"}

    def check_usage(self, step, config, usage):
        super().check_usage(step, config, usage)
        assert usage["run"].shared_bytes <= FAMILY.parts(step).shared_bytes_declared(config)


class TestBatches(Contract):
    family, steps, dtypes = FAMILY, BATCHES, ("float16",)


def test_a_block_holds_what_the_second_pass_reads_where_it_fits(step_of):
    """The gradient after the mask leaves, so it is held, and what arrives and the mask are not."""
    small, large = (
        FAMILY.parts(step_of(VARIANTS[name], "float16"))
        for name in ("block 64", "an image read twice")
    )
    assert [p.hold(CONFIG) for p in (small, large)] == ["registers", None]
    assert len(small.first.images) == 4
    assert small.second.images == (*small.stored[0], small.first.images[-1])


def test_what_follows_from_two_images_is_held_though_it_does_not_leave(step_of):
    parts = FAMILY.parts(step_of(Gradient(residual=False), "float16"))
    assert parts.kept == ("relu_grad",)
    assert parts.second.images == ("relu_grad", parts.first.images[-1])
    assert parts.second_anew.images == parts.first.images


@pytest.mark.parametrize(("channels", "size", "images"), [(128, 8, 1), (512, 2, 4)])
def test_blocks_that_hold_images_in_shared_memory_leave_room_for_others(
    step_of, build_within_limits, channels, size, images
):
    config = Attrs(CONFIG, hold="shared", images=images, blocks_per_sm=2)
    parts = FAMILY.parts(step_of(block(channels, size, n=images), "float16"))
    usage = build_within_limits(FAMILY, parts.step, config, load_arch("sm90"))
    assert usage["run"].shared_bytes <= parts.shared_bytes_declared(config)
    assert FAMILY.shared_bytes(parts, config, load_arch("sm90")) == 2 * parts.image.size_bytes


@pytest.mark.parametrize(("channels", "size"), BLOCKS)
def test_each_arch_has_a_config_for_each_block(step_of, cuda_arch, channels, size):
    step = step_of(block(channels, size, n=128), "float16")
    assert len(candidates(step, load_search_space(cuda_arch.name), ["se_grad"])) >= 2
