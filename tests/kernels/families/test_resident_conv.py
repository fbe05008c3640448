"""Convolutions with resident weights: what they refuse, that they build, pack and run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from plantune.kernels.families.resident_conv import FAMILY, Design, Packed
from plantune.kernels.family import Candidate
from plantune.kernels.registry import why_not
from plantune.planning import hand_plan
from plantune.problem import Problem
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space
from plantune.values import Attrs

ARCH, SPACE = load_arch("sm90"), load_search_space("sm90")


@dataclass(frozen=True)
class Conv:
    """A convolution of ResNet's first stage; other sizes and parts where a test says so."""

    n: int = 2
    c: int = 64
    size: tuple[int, int] = (56, 56)
    o: int = 64
    kernel: tuple[int, int] = (3, 3)
    stride: int = 1
    parts: tuple[str, ...] = ("bias", "residual", "relu")

    def __call__(self, b):
        padding = (self.kernel[0] // 2, self.kernel[1] // 2)
        geometry = {"stride": (self.stride, self.stride), "padding": padding}
        x = b.x(self.n, self.c, *self.size)
        y = b.conv(x, b.w(self.o, self.c, *self.kernel), **geometry)
        if "scale" in self.parts:
            y = b("mul_channel", y, b.w(self.o), axis=1)
        if "bias" in self.parts:
            y = b("add_channel", y, b.w(self.o), axis=1)
        if "residual" in self.parts:
            y = b("add", y, b.x(*b.graph.types[y].shape))
        if "input" in self.parts:
            y = b("add", y, x)
        if "relu" in self.parts:
            y = b("relu", y)
        return b("add", y, b.w(1)) if "offset" in self.parts else y


def config(stages=2, threads=256):
    return Attrs(stages=stages, threads=threads)


def refusal(step, chosen):
    return why_not(step, Candidate("resident_conv", chosen), SPACE)


@pytest.mark.parametrize(
    ("emit", "dtype", "reason"),
    [
        (Conv(), "float32", "float16 or bfloat16, got float32"),
        (Conv(c=12), "float16", "do not start at 16 bytes"),
        (Conv(stride=2), "float16", "with stride 1 read the same pixels"),
        (Conv(kernel=(1, 1)), "float16", "of a larger kernel"),
        (Conv(parts=("scale", "bias")), "float16", "a bias, a residual and ReLU are all"),
        (Conv(parts=("relu", "offset")), "float16", "a bias, a residual and ReLU are all"),
        (Conv(c=192), "float16", "bytes of shared memory, a block has"),
        (Conv(o=0), "float16", "there is nothing to compute"),
        (Conv(n=1, c=8, size=(16, 70000), o=2048), "float16", "are counted in 31 bits"),
    ],
)
def test_it_says_which_steps_it_does_not_run(step_of, emit, dtype, reason):
    assert reason in refusal(step_of(emit, dtype), config(1))


def test_other_archs_have_no_warpgroup_products():
    assert "wgmma" in FAMILY.why_not_arch(load_arch("sm80"))
    assert "wgmma" in FAMILY.why_not_arch(load_arch("sm100"))
    assert FAMILY.why_not_arch(ARCH) is None


@pytest.mark.parametrize(("rows", "high"), [(56, 14), (28, 14), (16, 16), (17, 9), (7, 7), (1, 1)])
def test_tiles_divide_the_rows_evenly(step_of, rows, high):
    design = Design.of(step_of(Conv(size=(rows, 30)), "float16"), config())
    assert design.box == (8, high, 1)


def test_rows_of_a_packed_weight_are_in_the_order_of_products(step_of):
    step = step_of(Conv(o=72, parts=()), "float16")
    design = Design.of(step, config())
    values = {name: torch.randn(72, 64, 3, 3).half() for name in step.constants}
    packed = Packed(design, torch.float16, torch.device("cpu"))
    packed.refresh(values)
    (w,) = values.values()
    channels = [16 * a + 2 * c + b for a in range(8) for b in range(2) for c in range(8)]
    for row, channel in enumerate(channels):
        expected = w[channel].permute(1, 2, 0) if channel < 72 else torch.zeros(3, 3, 64)
        assert torch.equal(packed.weight[row], expected.half()), row


def test_a_plan_picked_by_hand_takes_it_where_it_looks_faster():
    graph = Problem("resnet18", 64, 3, "infer", "float16", "sm90").graph
    plan = hand_plan(graph, SPACE, network="resnet18")
    families = {choice.nodes[0]: choice.candidate.family for choice in plan.choices}
    assert families["conv1/conv2d"] == "first_conv"
    assert families["layer1.0.conv1/conv2d"] == "resident_conv"
    assert families["layer4.1.conv1/conv2d"] == "hopper_conv"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("emit", [Conv(), Conv(c=128, size=(28, 28), o=128)], ids=str)
def test_it_builds_without_spilling(step_of, build_within_limits, emit, dtype):
    build_within_limits(FAMILY, step_of(emit, dtype), config(2), ARCH)


RUN = {
    "first stage": (Conv(n=5), config(2)),
    "many tiles": (Conv(n=20, parts=("bias", "relu")), config(3)),
    "one box each": (Conv(n=20), config(1)),
    "two chunks": (Conv(n=9, c=128, size=(28, 28), o=128), config(2)),
    "two chunks, one box": (Conv(n=40, c=128, size=(28, 28), o=128), config(1)),
    "uneven": (Conv(n=3, c=72, size=(19, 13), o=40), config(2)),
    "few channels": (Conv(c=8, size=(9, 40), o=8, parts=("bias",)), config(4)),
    "one pixel": (Conv(n=1, size=(1, 1), parts=()), config()),
    "5x3": (Conv(size=(17, 17), kernel=(5, 3), c=24), config(1)),
    "one row of taps": (Conv(size=(12, 20), kernel=(1, 3), c=256, o=200), config(4)),
    "added to its input": (Conv(parts=("bias", "input", "relu")), config(2)),
    "many outputs": (Conv(c=16, size=(10, 10), o=600), config(3)),
}


@pytest.mark.parametrize("name", RUN)
def test_what_is_to_run_is_legal(step_of, name):
    emit, chosen = RUN[name]
    assert refusal(step_of(emit, "float16"), chosen) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", RUN)
def test_it_is_right(step_of, assert_right, name, dtype):
    emit, chosen = RUN[name]
    assert_right(step_of(emit, dtype), Candidate("resident_conv", chosen), SPACE)
