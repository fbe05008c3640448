"""Residual blocks of two convolutions and squeeze-and-excite, in one kernel."""

from __future__ import annotations

import ctypes
import math
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.devices.cuda.tensor_map import TensorMap
from plantune.graph.fusions import fusions_named
from plantune.graph.layouts import view_bytes
from plantune.graph.partition import alternatives
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.se_resnet9.hopper_block import FAMILY
from plantune.kernels.family import Candidate, Frame
from plantune.kernels.hopper import launch as hopper_launch
from plantune.kernels.hopper.family import filter_and_scalars
from plantune.kernels.hopper.squeeze import GateScalars, layer_constants
from plantune.kernels.registry import estimate_us, why_not
from plantune.kernels.weights.constants import Constants
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

ARCH = load_arch("sm90")
SPACE = load_search_space("sm90")
SAME = {"padding": (1, 1)}


def tail(b, y, hidden, *, residual=True, relu=True, offset=True, leak=False):
    """Squeeze-and-excite of a value, with all that may follow."""
    n, c, h, w = b.graph.types[y].shape
    mean = b("mean", y, dims=(2, 3), keepdim=False)
    small = b("relu", b("add_channel", b.linear(mean, b.w(hidden, c)), b.w(hidden), axis=1))
    gate = b("sigmoid", b("add_channel", b.linear(small, b.w(c, hidden)), b.w(c), axis=1))
    out = b("mul", y, b("reshape", gate, shape=(n, c, 1, 1)))
    if residual:
        out = b("add", out, b.x(n, c, h, w))
    if relu:
        out = b("relu", out)
    before = out
    if offset:
        out = b("add", out, b.w(1))
    left = (before, out) if offset else (out,)
    return (mean, *left) if leak else left


def conv(n=2, c=64, size=16, hidden=4, **parts):
    """conv2, its scale and bias, and the tail."""

    def emit(b):
        y = b.conv(b.x(n, c, size, size), b.w(c, c, 3, 3), **SAME)
        y = b("add", b("mul", y, b.w(1)), b.w(1))
        return tail(b, y, hidden, **parts)

    return emit


def block(n=2, c=64, size=16, o=64, stride=1, hidden=4, kernel=3, **parts):
    """conv1 with its biases and ReLU, and all of `conv`."""

    def emit(b):
        y = b.conv(b.x(n, c, size, size), b.w(o, c, 3, 3), stride=(stride, stride), **SAME)
        y = b("add", b("relu", b("add", y, b.w(1))), b.w(1))
        y = b.conv(y, b.w(o, o, kernel, kernel), padding=(kernel // 2, kernel // 2))
        y = b("add", b("mul", y, b.w(1)), b.w(1))
        return tail(b, y, hidden, **parts)

    return emit


def two_convolutions(b):
    y = b.conv(b.x(2, 64, 8, 8), b.w(64, 64, 3, 3), **SAME)
    return b.conv(y, b.w(64, 64, 3, 3), **SAME)


def config(tile_m, stages=4, blocks_per_sm=1):
    return Attrs(tile_m=tile_m, stages=stages, blocks_per_sm=blocks_per_sm)


def refusal(step, chosen):
    return why_not(step, Candidate("hopper_block", chosen), SPACE)


def test_the_network_offers_steps():
    """Of its four blocks two have images of 8x8 pixels or more."""
    type_ = TensorType((128, 3, 64, 64), "float16")
    graph = extract(SEResNet9Fixup().half().eval(), type_)
    fitting = [
        step
        for step in alternatives(graph, fusions_named("residual_block"))
        if FAMILY.why_not_step(step) is None
    ]
    assert {step.types[step.nodes[0].name].shape[1] for step in fitting} == {64, 128}
    for step in fitting:
        assert any(
            FAMILY.why_not_config(FAMILY.parts(step), c, ARCH) is None
            for c in FAMILY.configs(SPACE)
        )


REFUSED = [
    (two_convolutions, "no squeeze-and-excite"),
    (conv(), "two convolutions"),
    (block(o=32), "64 or 128, got 32"),
    (block(size=4), "8x8 pixels, got 4x4"),
    (block(hidden=40), "up to 32 hidden channels"),
    (block(size=32, stride=2), "images of 8 columns"),
    (block(kernel=2), "with an odd kernel"),
    (block(leak=True), "read outside"),
]


@pytest.mark.parametrize(("emit", "reason"), REFUSED)
def test_it_says_which_steps_it_does_not_run(step_of, emit, reason):
    assert reason in FAMILY.why_not_step(step_of(emit, "float16"))


def test_other_dtypes_are_refused(step_of):
    assert "got float32" in FAMILY.why_not_step(step_of(block(), "float32"))


def test_tiles_are_whole_images(step_of):
    step = step_of(block(), "float16")
    assert "not whole images of 16x16" in refusal(step, config(64))
    assert refusal(step, config(256)) is None


CASES = {
    "64 channels": (block(3), config(256)),
    "128 channels, stride 2": (block(3, 64, 16, 128, 2, 8), config(64)),
    "images in pairs": (block(5, 40, 8, 64), config(128, 3)),
    "ten hidden channels": (block(5, 64, 8, hidden=10), config(128)),
    "5x5 second": (block(2, 64, 8, kernel=5, offset=False), config(64)),
    "little after it": (block(3, 64, 8, residual=False, relu=False, offset=False), config(64, 6)),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, ("float16", "bfloat16")[at % 2]) for at, name in enumerate(CASES)],
)
def test_it_builds_without_spilling(step_of, build_within_limits, name, dtype):
    """The kernel asserts its threads and shared memory against the plan's."""
    emit, chosen = CASES[name]
    step = step_of(emit, dtype)
    assert refusal(step, chosen) is None
    usage = build_within_limits(FAMILY, step, chosen, ARCH)
    assert usage["run"].shared_bytes == 0
    assert 2 < estimate_us(step, Candidate("hopper_block", chosen)) < 100


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_right(step_of, assert_right, name, dtype):
    emit, chosen = CASES[name]
    assert_right(step_of(emit, dtype), Candidate("hopper_block", chosen), SPACE)


def matrix_at(address, shape):
    """A matrix of half precision that lies there."""
    raw = (ctypes.c_char * (2 * math.prod(shape))).from_address(address)
    return torch.frombuffer(raw, dtype=torch.float16).view(shape)


def numbers_at(parameter, count):
    """What `load_parameter` reads of each channel."""
    dtype = torch.float32 if parameter.is_float else torch.float16
    size = ((count - 1) * parameter.stride + 1) * dtype.itemsize
    raw = (ctypes.c_char * size).from_address(parameter.from_)
    return torch.frombuffer(raw, dtype=dtype).as_strided((count,), (parameter.stride,)).float()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("hidden", [4, 10])
def test_the_layers_are_those_of_the_network(step_of, hidden, turned):
    """Both by rows, in place if they lie so, and their biases."""
    step = step_of(block(n=1, hidden=hidden), "float16")
    random = torch.Generator().manual_seed(0)
    values = {name: torch.randn(t.shape, generator=random).half() for name, t in step.inputs}
    parts = FAMILY.parts(step)
    epilogue, layers = parts.second, parts.layers
    if turned:
        for layer in (layers.squeeze, layers.excite):
            values[layer.weight] = values[layer.weight].t().contiguous().t()
    read = filter_and_scalars(step, epilogue) | layer_constants(step, layers)
    constants = Constants(Frame(values), read)
    for constant in constants.all:
        if not constant.is_in_place():
            constant.fill()
    scalars = constants.into(GateScalars, {})
    w1, b1, w2, b2 = (values[name] for name in (
        layers.squeeze.weight, layers.squeeze.bias, layers.excite.weight, layers.excite.bias
    ))  # fmt: skip
    assert torch.equal(matrix_at(scalars.weight1, w1.shape), w1)
    assert torch.equal(matrix_at(scalars.weight2, w2.shape), w2)
    assert (scalars.weight1 == w1.data_ptr()) == (not turned)
    assert torch.equal(numbers_at(scalars.bias1, hidden), b1.float())
    assert torch.equal(numbers_at(scalars.bias2, 64), b2.float())
    assert torch.equal(numbers_at(scalars.scale, 64), values[epilogue.scale].float().expand(64))
    assert (scalars.scale.stride, scalars.bias1.stride) == (0, 1)


class Recorder:
    """In the place of a kernel: keeps what it was launched with."""

    launches: ClassVar[list[tuple[object, dict[str, object]]]] = []
    written_for = (9, 0)

    def __init__(self, binary, name):
        self.launches.clear()

    def launch(self, stream, grid, block, arguments, **options):
        self.launches.append((arguments, {"grid": grid, "block": block, **options}))


@pytest.mark.parametrize("shift", [0, 2])
def test_a_block_is_launched_with_maps_of_all_it_copies(step_of, monkeypatch, shift):
    """Each map gets the address of its tensor; an image that lies off 16 bytes is copied first."""
    encoded = []

    def encode(dtype, address, sizes, strides, box, **options):
        encoded.append((address, tuple(sizes), tuple(box)))
        return TensorMap()

    monkeypatch.setattr(hopper_launch, "tensor_map", encode)
    monkeypatch.setattr("plantune.kernels.cuda.launcher.Kernel", Recorder)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream: stream)
    chosen = config(64)
    step = step_of(block(3, 64, 16, 128, 2, 8), "float16")
    values = {}
    for name, type_ in (*step.inputs, *step.outputs):
        layout = "nchw" if len(type_.shape) != 4 or name in step.constants else "nhwc"
        memory = torch.zeros(type_.size_bytes + 256, dtype=torch.uint8)
        start = -memory.data_ptr() % 256 + (shift if name == "x0" else 0)
        values[name] = view_bytes(memory, start, type_, layout)
    workspace = torch.zeros(
        FAMILY.workspace_bytes(FAMILY.parts(step), chosen) + 256, dtype=torch.uint8
    )
    aligned = workspace[-workspace.data_ptr() % 256 :]
    binding = FAMILY.bind(FAMILY.parts(step), chosen, Frame(values, aligned, built=object()))
    binding.launch(0)
    (((maps, scalars), options),) = Recorder.launches
    assert (type(maps).__name__, type(scalars).__name__) == ("BlockMaps", "BlockScalars")
    assert options["grid"] == (3, 1, 1)
    assert options["block"] == FAMILY.threads(FAMILY.parts(step), chosen)
    assert options["programmatic"] is (shift == 0)
    boxes = {sizes: (address, box) for address, sizes, box in encoded}
    x_address, x_box = boxes[64, 16, 16, 3]
    assert x_address == (aligned.data_ptr() if shift else values["x0"].data_ptr())
    assert x_box == (64, 16, 16, 1)  # every second of 16 pixels
    assert boxes[64, 9, 128][1] == boxes[128, 9, 128][1] == (64, 1, 128)
    assert boxes[128, 8, 8, 3][1] == (64, 8, 8, 1)
    assert [name for name, _ in scalars._fields_] == ["mid_scale", "mid_bias", "mid_offset"]
    assert scalars.weight1
    assert scalars.weight2
    assert scalars.mid_bias.from_
    assert scalars.mid_scale.from_ is None
