"""A function that is added to the table works wherever plantune has code of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plantune.base.canonical import Attrs
from plantune.graph.fusions import all_fusions
from plantune.graph.ops import OPS
from plantune.graph.ops.functions import FUNCTIONS, Derivative, Function, ops_of
from plantune.graph.partition import alternatives
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.spelling import OVERLOADS
from plantune.graph.spelling.arithmetic import readers_of
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.cuda.cuda_family import CudaFamily
from plantune.kernels.registry import candidates, estimate_us, family_named
from plantune.measure.numerics import check
from plantune.space.search_space import load_search_space

aten = torch.ops.aten
ADDED = Function(
    *("added", aten.hardswish, "{0} * fminf(fmaxf({0} + 3.0f, 0.0f), 6.0f) / 6.0f"),
    ("aten.hardswish.default",),
    Derivative(
        aten.hardswish_backward,
        "{1} < -3.0f ? 0.0f : {1} <= 3.0f ? {0} * ({1} / 3.0f + 0.5f) : {0}",
        of_argument=True,
        writes="out",
    ),
)
NAME = ADDED.name
POOL = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FUNCTIONS, NAME, ADDED)
    for op in ops_of(ADDED):
        monkeypatch.setitem(OPS, op.name, op)
    for overload, reader in readers_of([ADDED]).items():
        monkeypatch.setitem(OVERLOADS, overload, reader)


def conv(b, *parts, x=(2, 64, 16, 16), w=(64, 64, 3, 3), padding=1, **more):
    """A convolution, its bias, and more in this order."""
    y = b.conv(b.x(*x), b.w(*w), padding=(padding, padding), **more)
    y = b("add_channel", y, b.w(w[0]), axis=1)
    return after(b, y, *parts)


def after(b, y, *parts):
    for part in parts:
        if part == "residual":
            y = b("add", y, b.x(*b.graph.types[y].shape))
        elif part == "offset":
            y = b("add", y, b.w(1))
        else:
            y = b(part, y)
    return y


def squeezed(b, y, *parts):
    n, c, _, _ = b.graph.types[y].shape
    mean = b("mean", y, dims=(2, 3), keepdim=False)
    hidden = b("relu", b("add_channel", b.linear(mean, b.w(8, c)), b.w(8), axis=1))
    gate = b("sigmoid", b("add_channel", b.linear(hidden, b.w(c, 8)), b.w(c), axis=1))
    return after(b, b("mul", y, b("reshape", gate, shape=(n, c, 1, 1))), *parts)


def block(b):
    y = conv(b, NAME, "offset")
    y = b.conv(y, b.w(64, 64, 3, 3), padding=(1, 1))
    return squeezed(b, y, "residual", NAME, "offset")


def stem(b):
    y = b.conv(b("space_to_depth", b.x(2, 3, 32, 32), block=4), b.w(64, 48, 1, 1))
    return after(b, y, NAME, "offset")


def pooled(b):
    y = b("avg_pool2d", b.x(2, 64, 8, 8), **POOL, count_padding=True)
    return b(NAME, b("add_channel", b.conv(y, b.w(64, 64, 1, 1)), b.w(64), axis=1))


def linear(b):
    return b(NAME, b("add_channel", b.linear(b.x(16, 64), b.w(32, 64)), b.w(32), axis=1))


def first(*parts):
    sizes = {"x": (2, 3, 32, 32), "w": (64, 3, 7, 7), "padding": 3, "stride": (2, 2)}
    return lambda b: conv(b, *parts, **sizes)


def small(*parts):
    return lambda b: conv(b, *parts, x=(2, 8, 8, 8), w=(16, 8, 3, 3))


CPU = {
    "winograd": small("residual", NAME, "offset"),
    "winograd of 2x2": lambda b: conv(b, NAME, x=(2, 8, 2, 2), w=(16, 8, 3, 3)),
    "direct_conv": small("residual", NAME, "offset"),
    "direct_linear": linear,
    "onednn_conv": small("residual", NAME, "offset"),
    "patch_conv": stem,
    "pooled_conv": pooled,
    "squeeze_excite": lambda b: squeezed(b, b.x(2, 16, 4, 4), "residual", NAME, "offset"),
    "gemm": linear,
    "gemm of a convolution": lambda b: conv(
        b, "residual", NAME, "offset", x=(2, 8, 5, 5), w=(16, 8, 1, 1), padding=0
    ),
    "framework": small(NAME),
    "framework backwards": lambda b: b(f"{NAME}_grad", b.x(3, 5), b.x(3, 5)),
}
EVERY_ORDER = {
    "implicit_gemm_conv": lambda b: conv(b, "residual", NAME, "offset"),
    "implicit_gemm_conv, then the residual": lambda b: conv(b, NAME, "residual", "relu"),
    "hopper_conv": lambda b: conv(b, "residual", NAME, "offset"),
    "hopper_conv, then the residual": lambda b: conv(b, NAME, "residual", "sigmoid", "offset"),
    "resident_conv": lambda b: conv(b, "residual", NAME),
    "resident_conv, then the residual": lambda b: conv(b, NAME, "residual"),
}
CUDA = {
    **EVERY_ORDER,
    "first_conv": first(NAME),
    "first_conv, then relu": first(NAME, "relu"),
    "first_conv with a pool": lambda b: b("max_pool2d", first(NAME)(b), **POOL),
    "pool_conv": pooled,
    "stem": stem,
    "linear": linear,
    "pointwise": lambda b: b(NAME, b("mul", b.x(3, 5, 8, 8), b.x(3, 5, 8, 8))),
    "pointwise backwards": lambda b: b(f"{NAME}_grad", b.x(30, 8), b.x(30, 8)),
    "se_tail": lambda b: squeezed(b, b.x(2, 64, 8, 8), "residual", NAME, "offset"),
    "hopper_block": block,
}


def family_in(name: str) -> str:
    return name.replace(",", "").split()[0]


def best(step, family, space):
    """The candidate that a guess likes best."""
    legal = [c for c in candidates(step, space) if c.family == family]
    assert legal, f"no config of {family} is legal"
    return min(legal, key=lambda candidate: estimate_us(step, candidate, space.arch))


@pytest.mark.parametrize("name", CPU)
def test_it_is_right_on_a_cpu(step_of, space, name):
    step = step_of(CPU[name])
    found = [c for c in candidates(step, space) if c.family == family_in(name)]
    assert found
    for candidate in found:
        check(step, candidate, space)


@pytest.mark.parametrize(("at", "name"), list(enumerate(CUDA)))
def test_it_builds(step_of, build_within_limits, at, name):
    """For one of two archs, in turn: the function's text is the same for both."""
    family = family_named(family_in(name))
    spaces = [load_search_space(arch_name) for arch_name in ("sm80", "sm90")]
    theirs = [space for space in spaces if family.name in space.families]
    space = theirs[at % len(theirs)]
    step = step_of(CUDA[name], "float16")
    assert isinstance(family, CudaFamily)
    assert family.why_not_step(step) is None
    build_within_limits(family, step, best(step, family.name, space).config, space.arch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA)
def test_it_is_right_on_a_gpu(step_of, gpu_space, name):
    if family_in(name) not in gpu_space.families:
        pytest.skip(f"{gpu_space.arch.name} has no {family_in(name)}")
    for dtype in ("float16", "bfloat16"):
        step = step_of(CUDA[name], dtype)
        check(step, best(step, family_in(name), gpu_space), gpu_space)


def test_cudnn_says_why_it_does_not_run_it(step_of):
    step = step_of(EVERY_ORDER["hopper_conv"], "float16")
    assert f"relu alone, not for {NAME}" in family_named("cudnn_conv").why_not_step(step)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = (
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.Hardswish(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x)))


def test_a_network_has_it_in_one_step_with_its_convolution():
    graph = extract(Network().eval(), TensorType((2, 3, 8, 8), "float32"), fold=False)
    groups = [step.ops for step in alternatives(graph, tuple(all_fusions()))]
    assert ("conv2d", "mul_channel", "add_channel", NAME) in groups


def test_its_gradient_is_that_of_torch():
    module = nn.Sequential(nn.Linear(4, 4), nn.Hardswish()).double()
    graph = differentiate(extract(module, TensorType((2, 4), "float64")))
    assert {NAME, f"{NAME}_grad"} <= {node.op for node in graph.nodes}
    x = torch.linspace(-5, 5, 64, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(64, dtype=torch.float64)
    F.hardswish(x).backward(dy)
    (found,) = OPS[f"{NAME}_grad"].evaluate([dy, x.detach()], Attrs())
    torch.testing.assert_close(found, x.grad)
