"""Convolutions with resident weights: what they refuse, that they build, pack and run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.kernels.families.resident_conv import FAMILY
from plantune.kernels.family import Frame
from plantune.kernels.hopper import resident
from plantune.kernels.hopper.resident_family import read_constants
from plantune.plans.guess import hand_plan
from plantune.plans.workload import Workload
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import DTYPES
from .contract import Contract
from .epilogues import ended

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
        return ended(b, x, y, self.parts)


SCALED = ("scale", "bias", "residual", "relu")
FIXUP = ("bias", "relu", "offset", "unshifted")


def config(stages=2, threads=256):
    return Attrs(stages=stages, threads=threads)


def test_other_archs_have_no_warpgroup_products():
    assert "wgmma" in FAMILY.why_not_arch(load_arch("sm80"))
    assert "wgmma" in FAMILY.why_not_arch(load_arch("sm100"))
    assert FAMILY.why_not_arch(ARCH) is None


@pytest.mark.parametrize(("rows", "high"), [(56, 14), (28, 14), (16, 16), (17, 9), (7, 7), (1, 1)])
def test_tiles_divide_the_rows_evenly(step_of, rows, high):
    parts = FAMILY.parts(step_of(Conv(size=(rows, 30)), "float16"))
    design = FAMILY.design(parts, config())
    assert design.box == (8, high, 1)


class Copied(NamedTuple):
    """What the arguments of `tensor_map` say of a tensor."""

    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    address: int


def box_of(weight: torch.Tensor, copied: Copied, *starts: int) -> torch.Tensor:
    """The box at these coordinates as it arrives in shared memory: zeros outside."""
    itemsize = weight.element_size()
    strides = (1, *(stride // itemsize for stride in copied.strides_bytes))
    places = torch.zeros(copied.box[::-1], dtype=torch.long)
    inside = torch.ones_like(places, dtype=torch.bool)
    for axis, (start, size, stride) in enumerate(zip(starts, copied.sizes, strides, strict=True)):
        shape = [1] * len(starts)
        shape[len(starts) - 1 - axis] = -1
        at = (start + torch.arange(copied.box[axis])).view(shape)
        places, inside = places + at * stride, inside & (at < size)
    offset = (copied.address - weight.untyped_storage().data_ptr()) // itemsize
    memory = weight.untyped_storage()
    whole = torch.empty(0, dtype=weight.dtype).set_(memory)
    return torch.where(inside, whole[(offset + places) * inside], 0)


def read_of(step, values):
    """What the kernel reads of these constants."""
    parts = FAMILY.parts(step)
    return read_constants(parts, FAMILY.design(parts, config()), Frame(values))


@pytest.mark.parametrize("o", [64, 80, 72, 40, 8, 200])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_rows_of_a_weight_arrive_in_the_order_of_products(step_of, monkeypatch, o, layout):
    """The map takes 64 rows at a time, of each 16 the even ones before the odd ones."""
    step = step_of(Conv(c=72, o=o, parts=()), "float16")
    w = torch.randn(o, 72, 3, 3).half().contiguous(memory_format=layout)
    weight, *_ = read_of(step, dict.fromkeys(step.constants, w)).all
    if not weight.is_in_place():
        weight.fill()
    monkeypatch.setattr(
        resident,
        "tensor_map",
        lambda dtype, address, sizes, strides, box: Copied(sizes, strides, box, address),
    )
    copied = resident.weight_map(weight.tensor)
    order = [16 * a + 2 * c + b for a in range(4) for b in range(2) for c in range(8)]
    expected = torch.zeros(-(-o // 64) * 64, 128, 3, 3).half()
    expected[:o, :72] = w
    for tile, chunk, tap in itertools.product(range(-(-o // 64)), range(2), range(9)):
        box = box_of(weight.tensor, copied, 64 * chunk, tap, 0, 0, 4 * tile)
        rows = expected[[64 * tile + channel for channel in order]]
        assert torch.equal(
            box.reshape(64, 64), rows[:, 64 * chunk : 64 * chunk + 64, tap // 3, tap % 3]
        )


@pytest.mark.parametrize(
    ("o", "layout", "in_place"),
    [
        (64, torch.channels_last, True),
        (80, torch.channels_last, True),
        (72, torch.channels_last, False),  # of the last sixteen rows only eight are there
        (64, torch.contiguous_format, False),
    ],
)
def test_a_weight_of_whole_sixteens_is_read_in_place(step_of, o, layout, in_place):
    step = step_of(Conv(o=o, parts=()), "float16")
    w = torch.randn(o, 64, 3, 3).half().contiguous(memory_format=layout)
    read = read_of(step, dict.fromkeys(step.constants, w))
    assert (read.tensor("w").data_ptr() == w.data_ptr()) == in_place


def test_scales_and_biases_are_padded_with_zeros(step_of):
    step = step_of(Conv(o=40, parts=("scale", "bias")), "float16")
    values = {name: torch.randn(step.types[name].shape).half() for name in step.constants}
    _, *vectors = read_of(step, values).all
    assert len(vectors) == 2
    for vector in vectors:
        vector.fill()
        assert torch.equal(vector.tensor, values[vector.name].float())
        assert not vector.tensor.as_strided((64,), (1,))[40:].any()


def test_a_plan_picked_by_hand_takes_it_where_it_looks_faster():
    graph = Workload("resnet18", 64, 3, "infer", "float16", "sm90").graph
    plan = hand_plan(graph, SPACE, network="resnet18")
    families = {choice.nodes[0]: choice.candidate.family for choice in plan.choices}
    assert families["conv1/conv2d"] == "first_conv"
    assert families["layer1.0.conv1/conv2d"] == "resident_conv"
    assert families["layer4.1.conv1/conv2d"] == "hopper_conv"


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
    "scaled": (Conv(n=5, parts=SCALED), config(2)),
    "scaled, no bias": (Conv(n=3, parts=("scale", "relu")), config(3)),
    "scaled, uneven": (Conv(n=3, c=72, size=(19, 13), o=40, parts=SCALED), config(2)),
    "scaled, two tiles of channels": (Conv(c=128, size=(14, 14), o=104, parts=SCALED), config(2)),
    "offset": (Conv(n=3, size=(19, 13), o=40, parts=("bias", "relu", "offset")), config(2)),
    "with and without the offset": (Conv(n=5, size=(16, 16), parts=FIXUP), config(2)),
    "strided": (Conv(n=129, size=(16, 16), o=128, stride=2, parts=FIXUP), config(1)),
    "strided, uneven": (Conv(n=3, c=40, size=(19, 13), o=72, stride=2), config(1)),
    "strided, three groups": (Conv(n=7, size=(16, 16), stride=2), config(1, 384)),
    "strided, 5x3": (Conv(size=(17, 17), kernel=(5, 3), c=24, stride=2), config(1)),
    "sixteens but no whole tile": (Conv(n=3, c=24, size=(9, 9), o=80), config(2)),
}
# With so many tiles that whole ones are brought and taken away.
STAGED = {
    "staged": (Conv(n=270, size=(16, 16), parts=()), config(2)),
    "staged, with and without the offset": (Conv(n=270, size=(16, 16), parts=FIXUP), config(1)),
    "staged, apart": (Conv(n=270, size=(16, 16), parts=("bias", "relu", "apart")), config(2)),
    "staged, three groups": (Conv(n=270, size=(16, 16), parts=FIXUP), config(2, 384)),
    "staged, uneven": (Conv(n=140, c=72, size=(19, 13), o=40, parts=SCALED), config(1)),
    "staged, strided": (Conv(n=300, size=(16, 16), o=128, stride=2, parts=FIXUP), config(1)),
    "staged, added to its input": (
        Conv(n=270, size=(16, 16), parts=("bias", "input", "relu")),
        config(1),
    ),
    "staged, two tiles of channels": (
        Conv(n=280, c=128, size=(8, 8), o=104, parts=SCALED),
        config(2),
    ),
}
RUN |= STAGED


@pytest.mark.parametrize("name", STAGED)
def test_what_many_tiles_read_and_write_is_staged(step_of, name):
    emit, chosen = STAGED[name]
    assert FAMILY.design(FAMILY.parts(step_of(emit, "float16")), chosen).staged > 0


REFUSED = {
    "float32": (Conv(), "float16 or bfloat16, got float32", "float32"),
    "odd channels": (Conv(c=12), "do not start at 16 bytes"),
    "far steps": (Conv(stride=3, kernel=(5, 5)), "only strides up to 2, got (3, 3)"),
    "2x2, stride 2": (Conv(stride=2, kernel=(2, 2)), "of a larger kernel"),
    "1x1": (Conv(kernel=(1, 1)), "of a larger kernel"),
    "no outputs": (Conv(o=0), "there is nothing to compute"),
    "many pixels": (Conv(n=1, c=8, size=(16, 70000), o=2048), "are counted in 31 bits"),
}
BUILT = (
    (Conv(), config()),
    (Conv(c=128, size=(28, 28), o=128), config()),
    (Conv(parts=SCALED), config()),
    (Conv(parts=FIXUP), config()),
    (Conv(size=(16, 16), o=128, stride=2, parts=("bias", "relu", "offset")), config(1)),
)


class TestContract(Contract):
    family, chosen, refused = FAMILY, RUN, REFUSED
    dtypes = ("float16", "bfloat16")
    configs = ((Conv(c=192), config(1), "bytes of shared memory, a block has"),)
    builds_chosen = (
        *((*built, dtype) for built in BUILT for dtype in DTYPES[:2]),
        STAGED["staged, with and without the offset"],
    )

    def kernels(self, step, config):
        return {"run"}
