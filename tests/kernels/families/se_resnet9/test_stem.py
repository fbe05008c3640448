"""SpaceToDepth and its convolution in one kernel: what it reads, its weights, that it is right."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from plantune import optimize
from plantune.base.canonical import Attrs
from plantune.graph.fusions import fusions_named
from plantune.graph.ops import op_named
from plantune.graph.partition import alternatives
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.se_resnet9.stem import FAMILY
from plantune.kernels.registry import candidates
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.guess import FALLBACK, Preference, compose
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from ..conftest import in_turns
from ..contract import Contract

CONFIG = Attrs(tile_m=128, tile_n=64, warp_m=16)


@dataclass(frozen=True)
class Stem:
    """The sizes of a stem and which of its parts are there."""

    n: int = 2
    channels: int = 3
    height: int = 64
    width: int = 64
    outputs: int = 64
    block: int = 4
    bias: str = ""
    relu: bool = True
    offset: bool = True
    unshifted: bool = False
    kept: bool = False
    pixels: str = ""
    """The dtype of the images, where it is another one."""
    scale: str = ""

    def __call__(self, b):
        shape = (self.n, self.channels, self.height, self.width)
        if self.pixels:
            x = b("cast", b.graph.input("x0", TensorType(shape, self.pixels)), dtype=b.dtype)
        else:
            x = b.x(*shape)
        moved = b("space_to_depth", self.scaled(b, x), block=self.block)
        y = b.conv(moved, b.w(self.outputs, self.channels * self.block**2, 1, 1))
        if self.bias == "channel":
            y = b("add_channel", y, b.w(self.outputs), axis=1)
        elif self.bias == "scalar":
            y = b("add", y, b.w(1))
        if self.relu:
            y = b("relu", y)
        outputs = (*[moved] * self.kept, *[y] * self.unshifted)
        return (*outputs, b("add", y, b.w(1)) if self.offset else y)

    def scaled(self, b, x):
        """As torch spells images / 255, or as numbers by mean and deviation of each channel."""
        if self.scale == "number":
            return b("affine", x, alpha=1 / 255, beta=0.0)
        if self.scale == "tensors":
            x = b("mul", b("affine", x, alpha=1 / 64, beta=-2.0), b.w(1))
            return b("div", b("sub", x, b.w(self.channels, 1, 1)), b.w(1, self.channels, 1, 1))
        return x


VARIANTS = {
    "relu and offset": Stem(),
    "two outputs": Stem(unshifted=True),
    "convolution only": Stem(relu=False, offset=False),
    "no offset": Stem(bias="channel", offset=False),
    "all parts": Stem(bias="channel", unshifted=True),
    "scalar bias": Stem(bias="scalar", relu=False, offset=False),
    "depth": Stem(channels=11),
    "colour and depth": Stem(channels=14, unshifted=True),
    "raw depth": Stem(channels=1),
    "many channels": Stem(1, 33, 8, 16, 32),
    "odd rows of patches": Stem(3, 2, 12, 28, 40, bias="channel"),
    "one patch": Stem(1, 5, 4, 4, 8),
    "wide": Stem(1, 3, 8, 84, 136, unshifted=True),
}
BYTES, FLOATS = {"pixels": "uint8"}, {"pixels": "float32"}
VARIANTS |= {
    "bytes": Stem(**BYTES, scale="number"),
    "bytes as they are": Stem(**BYTES),
    "bytes by channel": Stem(**BYTES, scale="tensors", bias="channel", unshifted=True),
    "bytes of depth": Stem(**BYTES, scale="number", channels=11, offset=False),
    "bytes, one patch": Stem(1, 5, 4, 4, 8, **BYTES, scale="tensors"),
    "bytes, odd rows of patches": Stem(3, 2, 12, 28, 40, **BYTES, scale="number"),
    "bytes, two patches of a row": Stem(3, 2, 12, 24, 40, **BYTES, scale="number"),
    "bytes of games": Stem(2, 4, 84, 84, 32, **BYTES, scale="number"),
    "floats": Stem(**FLOATS, scale="number"),
    "floats as they are": Stem(**FLOATS, unshifted=True),
    "floats by channel": Stem(**FLOATS, scale="tensors", offset=False),
    "floats of colour and depth": Stem(**FLOATS, channels=14, scale="number", offset=False),
    "floats, one patch": Stem(1, 5, 4, 4, 8, **FLOATS),
    "scaled as they are": Stem(scale="number", offset=False),
    "of another half": Stem(pixels="bfloat16", scale="number", offset=False),
    "kept": Stem(5, kept=True, unshifted=True),
    "kept, depth": Stem(3, channels=8, kept=True),
    "kept, raw depth": Stem(channels=1, kept=True, relu=False, offset=False),
    "kept, odd rows of patches": Stem(3, 2, 12, 28, 40, kept=True),
    "kept, wide": Stem(1, 3, 8, 84, 136, kept=True, unshifted=True),
    "kept, bytes": Stem(3, 4, 12, 28, 64, **BYTES, scale="tensors", kept=True),
    "kept, floats": Stem(**FLOATS, scale="number", kept=True, unshifted=True),
}


def test_the_network_offers_the_stem_with_both_of_its_outputs():
    graph = extract(SEResNet9Fixup().half().eval(), TensorType((2, 3, 64, 64), "float16"))
    steps = alternatives(graph, fusions_named("stem"))
    ends = {step.ops[-1]: step for step in steps if FAMILY.why_not_step(step) is None}
    assert {"relu", "add"} <= set(ends)
    assert len(ends["add"].outputs) == 2


def test_training_keeps_what_the_gradient_of_the_weight_reads():
    network = extract(SEResNet9Fixup().half(), TensorType((2, 3, 64, 64), "float16"))
    steps = alternatives(differentiate(network), fusions_named("stem"))
    (whole,) = [step for step in steps if step.ops == ("space_to_depth", "conv2d", "relu", "add")]
    parts = FAMILY.parts(whole)
    assert {parts.moved, parts.epilogue.unshifted, parts.y} == {*dict(whole.outputs)}
    assert set(FAMILY.layouts(parts, CONFIG).values()) == {"nhwc", "nchw"}
    assert FAMILY.layouts(parts, CONFIG)[parts.moved] == "nhwc"


def with_something_before(b):
    x = b.x(2, 3, 8, 8)
    b("affine", x, alpha=2.0, beta=0.0)
    return b.conv(b("space_to_depth", x, block=4), b.w(8, 48, 1, 1))


def sum_of(stem):
    return lambda b: b("add", stem(b)[0], b.x(2, 64, 16, 16))


NO_START = "does not start with space_to_depth"
PLAIN = Stem(relu=False, offset=False)
REFUSED = {
    "a convolution": (lambda b: b.conv(b.x(2, 3, 8, 8), b.w(8, 3, 1, 1)), NO_START),
    "a function": (lambda b: b("relu", b.x(2, 3, 8, 8)), NO_START),
    "a sum": (lambda b: b("add", b.x(2, 3, 8, 8), b.w(3, 1, 1)), NO_START),
    "integers": (
        Stem(pixels="int64"),
        "the kernel reads float16, bfloat16, float32, uint8, got int64",
    ),
    "pixels in float64": (Stem(pixels="float64"), "got float64"),
    "2x2 patches": (Stem(block=2), "patches are 4x4, got 2"),
    "odd outputs": (Stem(outputs=20), "writes 8 channels at once, 20 do not divide"),
    "no image": (Stem(n=0), "counted in 30 bits, got 0"),
    "a sum after it": (sum_of(Stem(offset=False)), "may follow it"),
    "a sum of the convolution": (sum_of(PLAIN), "may follow it"),
    "an early value": (lambda b: (y := PLAIN(b)[0], b("relu", y)), "read outside of it"),
    "something before": (with_something_before, "does not read 'affine', which is before it"),
}


class TestContract(Contract):
    family, steps, refused = FAMILY, VARIANTS, REFUSED
    dtypes = ("float16", "bfloat16")
    configs = (
        (Stem(), CONFIG, "not float32", "float32"),
        (Stem(), CONFIG, "have no bfloat16", "bfloat16", "sm75"),
        (Stem(outputs=32), CONFIG, "without any of the 32 channels"),
        (Stem(channels=40), CONFIG, "bytes of shared memory", "float16", "sm75"),
        (Stem(channels=17, kept=True), CONFIG, "room for patches of 17 channels"),
        (
            Stem(channels=5, kept=True),
            Attrs(CONFIG, warp_m=32),
            "room for patches of 5",
            "float16",
            "sm70",
        ),
    )


class Wrapped(torch.nn.Module):
    """A network of halves after what its images need."""

    def __init__(self):
        super().__init__()
        self.network = SEResNet9Fixup()
        self.register_buffer("mean", torch.rand(3, 1, 1))
        self.half().eval()

    def forward(self, x):
        return self.network(x.to(self.mean.dtype) / 255 - self.mean)


def test_the_images_of_a_wrapped_network_are_cast_and_scaled_in_the_stem():
    graph = extract(Wrapped(), TensorType((2, 3, 64, 64), "uint8"))
    steps = alternatives(graph, fusions_named("image_stem"))
    (whole,) = [s for s in steps if s.ops[0] == "cast" and s.ops[-1] == "add" and "relu" in s.ops]
    assert FAMILY.why_not_step(whole) is None
    assert whole.ops == ("cast", "affine", "sub", "space_to_depth", "conv2d", "relu", "add")
    assert FAMILY.layouts(FAMILY.parts(whole), CONFIG)["x"] == "nchw"


class Laid:
    """Where StemWeights of stem_weights.h has the values of a block, in elements."""

    def __init__(self, channels: int) -> None:
        self.row = 4 * channels
        self.row_pitch = self.row + (8 if channels % 4 == 0 else 0)
        self.pitch = 4 * self.row_pitch
        self.eight_pitch = 8 * self.pitch + 32

    def chunk(self, output: int, value: int) -> int:
        """StemWeights::fetch."""
        more = value // self.row * (self.row_pitch - self.row)
        return output // 8 * self.eight_pitch + output % 8 * self.pitch + more + value

    def neighbours(self, output: int, dy: int, index: int) -> int:
        eight = output // 8 * self.eight_pitch
        return eight + output % 8 * self.pitch + dy * self.row_pitch + 4 * index


@pytest.mark.parametrize("channels", [*range(1, 18), 32, 33])
def test_copies_of_a_weight_are_where_products_read_them(step_of, channels):
    laid, tile_n = Laid(channels), CONFIG["tile_n"]
    weight = torch.randn(tile_n, 4, 4 * channels)
    made = torch.full((tile_n // 8 * laid.eight_pitch,), torch.nan)
    for output, value in itertools.product(range(tile_n), range(0, 16 * channels, 8)):
        to = laid.chunk(output, value)
        assert to % 8 == 0
        assert made[to : to + 8].isnan().all()
        made[to : to + 8] = weight[output].flatten()[value : value + 8]
    for output, dy, index in itertools.product(range(tile_n), range(4), range(channels)):
        begin = laid.neighbours(output, dy, index)
        assert begin % 4 == 0
        assert torch.equal(made[begin : begin + 4], weight[output, dy, 4 * index : 4 * index + 4])
    step = step_of(Stem(1, channels, 4, 4), "float16")
    assert FAMILY.parts(step).shared_bytes(CONFIG) == 2 * made.numel()


@pytest.mark.parametrize("channels", range(1, 17))
def test_lanes_that_read_weights_at_once_share_no_bank_or_few(channels):
    """16 lanes read 8 bytes each: every bank pair is read once, twice for even channels."""
    laid = Laid(channels)
    for half, index, pair in itertools.product((0, 16), range(channels), range(4)):
        lanes = range(half, half + 16)
        outputs = {lane: lane // 8 * 8 + lane // 4 % 2 + 2 * pair for lane in lanes}
        pairs = Counter(laid.neighbours(outputs[i], i % 4, index) // 4 % 16 for i in lanes)
        assert max(pairs.values()) <= (1 if channels % 2 else 2)


def interleaved(runs, channels):
    """Stem::interleave on a row of patches: 4 pixels of each channel, by `pair_of`."""
    made = runs.new_empty(channels, 4)
    for index, e in itertools.product(range(channels), range(4)):
        place = 4 * index + e
        made[index, e] = runs[place % channels, place // channels]
    return made


@pytest.mark.parametrize("channels", [1, 3, 4, 11, 16])
def test_pixels_in_the_order_of_the_weights_give_the_sum(channels):
    patch, weight = torch.randn(channels, 4, 4).double(), torch.randn(4, 4, channels).double()
    whole = sum(
        interleaved(patch[:, dy], channels).flatten() @ weight[dy].flatten() for dy in range(4)
    )
    torch.testing.assert_close(whole, (patch * weight.permute(2, 0, 1)).sum())


def test_values_of_a_weight_are_those_of_the_patches_in_the_image():
    channels, outputs = 3, 5
    image = torch.arange(2 * channels * 8 * 12.0).view(2, channels, 8, 12)
    weight = torch.arange(outputs * 16 * channels * 1.0).view(outputs, -1, 1, 1) % 7
    (moved,) = op_named("space_to_depth").evaluate([image], Attrs(block=4))
    patches = image.view(2, channels, 2, 4, 3, 4).permute(0, 2, 4, 3, 5, 1).flatten(3)
    got = patches @ weight.flatten(1).t()
    assert torch.equal(got, torch.conv2d(moved, weight).permute(0, 2, 3, 1))


def test_each_arch_has_configs_for_each_variant(step_of, cuda_arch):
    space = load_search_space(cuda_arch.name)
    for name, stem in VARIANTS.items():
        assert candidates(step_of(stem, "float16"), space, ["stem"]), name


@pytest.mark.parametrize(("arch_name", "more"), in_turns([{}, {"kept": True}, BYTES, FLOATS]))
def test_it_builds_within_its_limits(step_of, build_within_limits, arch_name, more):
    config = Attrs(tile_m=256, tile_n=64, warp_m=32)
    scale = "number" if "pixels" in more else ""
    step = step_of(Stem(unshifted=True, **more, scale=scale), "float16")
    usage = build_within_limits(FAMILY, step, config, load_arch(arch_name))
    assert usage["run"].shared_bytes == 0


@pytest.mark.parametrize(("arch_name", "channels"), in_turns([11, 16, 24]))
def test_all_channels_at_once_leave_registers(step_of, build_within_limits, arch_name, channels):
    """Up to the most channels of which a lane holds its whole patches, and beyond."""
    step = step_of(Stem(channels=channels, unshifted=True), "float16")
    config = Attrs(tile_m=64, tile_n=64, warp_m=16)
    build_within_limits(FAMILY, step, config, load_arch(arch_name))


def test_the_batch_is_not_part_of_the_source(step_of):
    sources = {
        FAMILY.source(FAMILY.parts(step_of(Stem(n=n), "float16")), CONFIG, load_arch("sm90"))
        for n in (1, 128)
    }
    assert len(sources) == 1


IMAGES = {
    f"{channels}-{n}": Stem(n, channels=channels, unshifted=True)
    for channels in (1, 3, 11, 14)
    for n in (1, 7, 128, 129)
}


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("n", [1, 7, 128, 129])
    @pytest.mark.parametrize("pixels", ["uint8", "float32"])
    def test_every_image_of_another_dtype(self, step_of, assert_legal_configs_right, pixels, n):
        stem = Stem(n, pixels=pixels, scale="number", offset=False)
        assert_legal_configs_right(FAMILY, step_of(stem, "float16"))

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
    @torch.no_grad()
    def test_a_wrapped_network_end_to_end(self, gpu_space, dtype):
        module = Wrapped().cuda()
        for parameter in module.parameters():
            parameter.normal_(std=parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3)
        x = torch.randint(256, (8, 3, 64, 64), device="cuda").to(dtype)
        plan = compose(
            optimize(module, x).pool().graph,
            gpu_space,
            network="wrapped",
            fusions=fusions_named("image_stem", "conv_epilogue"),
            preferences=[Preference("stem"), *FALLBACK],
        )
        (choice,) = [choice for choice in plan.choices if choice.candidate.family == "stem"]
        assert len(choice.nodes) >= 6
        model = optimize(module, x, plan=plan, fallback="error")
        for _ in range(2):
            for images in (x, 255 - x, x.flip(0)):
                exact = copy.deepcopy(model.reference).double()(images)
                size = exact.norm()
                theirs = (model.reference(images).double() - exact).norm() / size
                ours = (model(images).double() - exact).norm() / size
                assert ours <= 2 * theirs + 8 * torch.finfo(torch.float16).eps
            model.network.stem[1].weight.mul_(1.5)
            model.mean.mul_(-1)


class TestImages(Contract):
    family, steps, dtypes = FAMILY, IMAGES, ("float16",)
