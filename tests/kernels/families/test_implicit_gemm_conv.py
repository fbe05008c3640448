"""CUTLASS convolutions: what is legal where, what the kernels take, and that they are right."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.base.tolerances import TABLE, Tolerance
from plantune.devices.cuda.build import compile_cuda
from plantune.errors import WrongResult
from plantune.kernels.cutlass.launch import ConvOperands, ConvProblem, Report
from plantune.kernels.cutlass.main_loop import ELEMENTS, MainLoop
from plantune.kernels.families.implicit_gemm_conv import FAMILY
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates, estimate_us
from plantune.measure.numerics import check
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

SMALL = Attrs(
    math="mma", tile_m=64, tile_n=64, tile_k=32, warp_m=32, warp_n=32, stages=2, split_k=1,
    split_mode="serial", swizzle=1,
)  # fmt: skip
LARGE = {"tile_m": 128, "tile_n": 128, "warp_m": 64, "warp_n": 64}


def changed(**axes):
    return Attrs(dict(SMALL), **axes)


@dataclass(frozen=True)
class Conv:
    """A convolution with the parts of its epilogue."""

    x: tuple[int, int, int, int] = (2, 128, 8, 8)
    outputs: int = 128
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    parts: str = ""

    def __call__(self, b):
        w = b.w(self.outputs, self.x[1] // self.groups, *self.kernel)
        y = b("conv2d", b.x(*self.x), w, stride=self.stride, padding=self.padding,
              dilation=self.dilation, groups=self.groups)  # fmt: skip
        for part in self.parts.split():
            y = self.following(b, part, y)
        return y

    def following(self, b, part, y):
        if part in ("mul", "add"):
            return b(part, y, b.w(1))
        if part in ("mul_channel", "add_channel"):
            return b(part, y, b.w(self.outputs), axis=1)
        if part == "residual":
            return b("add", y, b.x(*b.graph.types[y].shape))
        return b(part, y)


FIXUP = "mul add relu add"
BATCH_NORM = "mul_channel add_channel residual relu"


# Legality.

REFUSED = {
    "no convolution": (lambda b: b("relu", b.x(2, 64, 4, 4)), "starts with relu"),
    "groups": (Conv(groups=2), "without groups"),
    "empty": (Conv((0, 128, 8, 8)), "nothing to compute"),
    "two outputs": (
        lambda b: (y := b("relu", Conv()(b)), b("add", y, b.w(1))),
        "is read outside of it",
    ),
    "an image of 4 GiB": (Conv((1, 8, 2**14, 2**14)), "do not fit into 32 bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_it_cannot_run_has_a_reason(step_of, name):
    emit, reason = REFUSED[name]
    assert reason in FAMILY.why_not_step(step_of(emit, "float16"))


def test_other_dtypes_are_refused(step_of):
    assert "not float64" in FAMILY.why_not_step(step_of(Conv(), "float64"))


@pytest.mark.parametrize(
    ("conv", "dtype", "axes", "arch", "reason"),
    [
        (Conv(), "float16", {"math": "simt"}, "sm90", "simt does not multiply float16"),
        (Conv(), "float32", {}, "sm90", "mma does not multiply float32"),
        (Conv(), "bfloat16", {}, "sm75", "sm75 has no matrix instructions for bf16"),
        (Conv(), "float32", {"math": "tf32"}, "sm75", "sm75 has no matrix instructions for tf32"),
        (Conv(), "float32", {"math": "tf32"}, "sm90", "which two stages do not use"),
        (Conv(), "float32", {"math": "simt", "tile_k": 8, "stages": 3}, "sm90", "by cp.async"),
        (Conv(), "float16", {"tile_k": 16}, "sm90", "does not fit mma; it takes 32 or 64"),
        (Conv(), "float16", {"tile_k": 64}, "sm70", "sm70 reads rows of 64 bytes"),
        (Conv(), "float16", {"stages": 3}, "sm75", "sm75 has no cp.async"),
        (Conv(), "float16", {"stages": 1}, "sm80", "at least two stages"),
        (Conv(outputs=13), "float16", {"stages": 3}, "sm80", "moves no single 16-bit channels"),
        (Conv((2, 27, 8, 8)), "bfloat16", {"stages": 4}, "sm90", "no single 16-bit channels"),
        (Conv(), "float16", {"warp_m": 48}, "sm80", "not a multiple of the warps' tiles"),
        (Conv(), "float16", {"warp_m": 64}, "sm80", "2 warps; a block has 4 or 8"),
        (
            Conv(), "float16", {**LARGE, "tile_m": 256, "tile_k": 64, "stages": 3}, "sm86",
            "it needs 147456 bytes of shared memory, a block has 101376",
        ),
        (
            Conv((2, 6, 8, 8)), "float32", {"math": "tf32", "stages": 3}, "sm80",
            "must be multiples of 4",
        ),
        (
            Conv(), "float16", {**LARGE, "tile_k": 64}, "sm80",
            "128 sums and 96 more values that a thread keeps would be spilled",
        ),
        (Conv((1, 128, 8, 8)), "float16", LARGE, "sm80", "half of a tile_m of 128 or more"),
        (Conv(outputs=64), "float16", LARGE, "sm80", "half of a tile_n of 128 or more"),
        (Conv((2, 32, 8, 8)), "float16", {"tile_k": 64}, "sm80", "half of a tile_k of 64 or more"),
        (Conv((2, 64, 8, 8)), "float16", {"split_k": 4}, "sm80", "64 have 2 tiles"),
        (Conv(), "float16", {"split_mode": "parallel"}, "sm80", "K is not split"),
        (Conv(), "float16", {"swizzle": 4}, "sm80", "only 2 columns of tiles"),
        (Conv(outputs=256), "float16", {"swizzle": 4}, "sm80", "all 8 tiles run at once"),
    ],
)  # fmt: skip
def test_an_illegal_config_has_a_reason(step_of, conv, dtype, axes, arch, reason):
    step = step_of(conv, dtype)
    assert reason in FAMILY.why_not_config(FAMILY.parts(step), changed(**axes), load_arch(arch))


@pytest.fixture
def precision():
    """Torch's setting, which a test may change."""
    place = torch.backends.cudnn.conv
    before = place.fp32_precision
    yield place
    place.fp32_precision = before


@pytest.mark.parametrize(("allowed", "legal"), [("tf32", True), ("ieee", False)])
def test_tf32_is_offered_where_torch_allows_it(step_of, precision, allowed, legal):
    precision.fp32_precision = allowed
    step, config = step_of(Conv()), changed(math="tf32", stages=3)
    reason = FAMILY.why_not_config(FAMILY.parts(step), config, load_arch("sm80"))
    assert (reason is None) == legal, reason


def test_what_was_legal_before_the_setting_changed_is_not_remembered(step_of, precision):
    step, space = step_of(Conv()), load_search_space("sm80")

    def offered():
        found = candidates(step, space, [FAMILY.name])
        return {candidate.config["math"] for candidate in found}

    seen = []
    for precision.fp32_precision in ("tf32", "ieee", "tf32"):
        seen.append(offered())
    assert seen == [{"tf32", "simt"}, {"simt"}, {"tf32", "simt"}]


def test_products_one_by_one_take_any_number_of_channels(step_of):
    step = step_of(Conv((2, 3, 16, 16), outputs=17))
    assert FAMILY.why_not_step(step) is None
    assert (
        FAMILY.why_not_config(FAMILY.parts(step), changed(math="simt", tile_k=8), load_arch("sm70"))
        is None
    )


def test_each_arch_has_some_hundred_configs_for_a_step_at_most(step_of, cuda_arch):
    space = load_search_space(cuda_arch.name)
    for conv, least in ((Conv((128, 64, 16, 16), 64), 15), (Conv((128, 512, 2, 2), 512), 60)):
        step = step_of(conv, "float16")
        legal = [candidate.config for candidate in candidates(step, space, [FAMILY.name])]
        assert least <= len(legal) <= 500
        split = {(c["split_k"] > 1, c["split_mode"]) for c in legal}
        assert split >= ({(False, "serial")} if conv.outputs == 64 else {(True, "parallel")})


# Cost.


def test_a_guess_prefers_blocks_that_fill_the_chip(step_of):
    few, many = Conv((128, 512, 2, 2), 512), Conv((2048, 512, 2, 2), 512)
    small, large = changed(stages=3), changed(**LARGE, stages=3)
    split = changed(stages=3, split_k=4, split_mode="parallel")

    def us(conv, config):
        return estimate_us(step_of(conv, "float16"), Candidate(FAMILY.name, config))

    assert us(few, split) < us(few, small) < us(few, large)
    assert us(many, large) < us(many, small) < us(many, split)
    assert us(many, large) <= us(many, changed(**LARGE))


def test_a_guess_knows_the_price_of_the_arithmetic(step_of):
    step = step_of(Conv((256, 128, 16, 16)))
    tf32, simt = changed(math="tf32", stages=3), changed(math="simt", tile_k=8)
    products, singles = (estimate_us(step, Candidate(FAMILY.name, c)) for c in (tf32, simt))
    assert products < singles / 2


def test_a_guess_for_another_chip_goes_by_its_datasheet(step_of, cuda_arch):
    step = step_of(Conv((256, 128, 16, 16)), "float16")
    candidate = Candidate(FAMILY.name, SMALL)
    here, there = estimate_us(step, candidate), estimate_us(step, candidate, cuda_arch)
    assert there == here if cuda_arch.name == "sm90" else there >= here * 0.7


# Builds.

# Main loops beside those of float16 that test_every_arch builds for each arch; sizes, splits and
# epilogues share them.
BUILDS = [
    ("sm70", "float16", changed(**LARGE)),
    ("sm75", "float32", changed(math="simt", tile_k=8, **{**LARGE, "warp_m": 32})),
    ("sm80", "bfloat16", changed(tile_k=64, stages=3)),
    ("sm80", "float32", changed(math="tf32", stages=4, tile_m=128, warp_m=64)),
    ("sm90", "bfloat16", changed(**LARGE, stages=4)),
    ("sm120", "float32", changed(math="simt", tile_k=8)),
]


@pytest.mark.parametrize(("arch_name", "dtype", "config"), BUILDS)
def test_it_builds_within_the_limits(step_of, build_within_limits, arch_name, dtype, config):
    arch, step = load_arch(arch_name), step_of(Conv((2, 128, 16, 16)), dtype)
    assert FAMILY.why_not_config(FAMILY.parts(step), config, arch) is None
    usage = build_within_limits(FAMILY, step, config, arch)
    assert set(usage) == {"run", "reduce", "run_unaligned", "make_params", "clear"}
    # All shared memory is the launch's.
    assert usage["run"].shared_bytes == usage["reduce"].shared_bytes == 0


def test_sizes_splits_and_epilogues_share_a_binary(step_of):
    arch = load_arch("sm90")
    plain = FAMILY.source(FAMILY.parts(step_of(Conv(), "float16")), SMALL, arch)
    other = step_of(Conv((9, 64, 7, 7), 256, (1, 1), parts=FIXUP), "float16")
    split = changed(split_k=2, split_mode="parallel", swizzle=4)
    assert FAMILY.source(FAMILY.parts(other), split, arch) == plain
    assert FAMILY.source(FAMILY.parts(other), changed(stages=3), arch) != plain


def test_a_huge_filter_takes_the_other_iterators(step_of):
    step = step_of(Conv((1, 64, 40, 40), 64, (33, 33)), "float16")
    source = FAMILY.source(FAMILY.parts(step), SMALL, load_arch("sm80"))
    assert "kAnalytic" in source
    assert FAMILY.build(FAMILY.parts(step), SMALL, load_arch("sm80")).usage["run"].spill_bytes == 0


@pytest.mark.parametrize(("channels", "access"), [(64, 8), (116, 4), (58, 2), (6, 2), (27, 1)])
def test_channels_that_make_no_whole_vectors_are_moved_by_fewer(
    step_of, build_within_limits, channels, access
):
    step = step_of(Conv((2, channels, 9, 9), 24, parts="add_channel relu"), "float16")
    assert FAMILY.parts(step).access(SMALL) == access
    arch = load_arch("sm80")
    assert FAMILY.why_not_config(FAMILY.parts(step), SMALL, arch) is None
    assert f", {access}, half_t, half_t>;" in FAMILY.source(FAMILY.parts(step), SMALL, arch)
    if access == 2:
        build_within_limits(FAMILY, step, SMALL, arch)


# What the host passes by value, and the kernel reads.
LAYOUTS = """#include "cuda/implicit_gemm_conv.h"
using namespace cutlass;
static_assert(sizeof(plantune::ConvProblem) == {problem}, "");
static_assert(sizeof(plantune::ConvOperands) == {operands}, "");
"""
MAIN_LOOP = """using Conv{i} = plantune::ImplicitGemmConv<
    {arguments}, conv::IteratorAlgorithm::kOptimized, plantune::Value, {access}, {element},
    {element}>;
static_assert(sizeof(Conv{i}::SharedStorage) == {shared_bytes}, "");
static_assert(Conv{i}::kThreads == {threads}, "");
static_assert(sizeof(Conv{i}::Report) == {report}, "");
"""


@pytest.mark.parametrize("arch_name", ["sm70", "sm75", "sm80"])
def test_shared_memory_is_known_before_the_build(arch_name):
    """Many main loops, none of which is compiled as far as to machine code."""
    arch, space = load_arch(arch_name), load_search_space(arch_name)
    accesses = {dtype: (0,) if dtype == "float32" else (0, 1, 2, 4) for dtype in ELEMENTS}
    loops = {
        MainLoop.of(c, dtype, access)
        for c in FAMILY.configs(space)
        for dtype in ELEMENTS
        for access in accesses[dtype]
    }
    legal = sorted((loop for loop in loops if loop.why_not(arch) is None), key=str)
    sizes = {"problem": ConvProblem, "operands": ConvOperands}
    source = LAYOUTS.format(**{name: ctypes_bytes(type_) for name, type_ in sizes.items()})
    for i, loop in enumerate(random.Random(0).sample(legal, min(len(legal), 24))):
        source += MAIN_LOOP.format(
            i=i,
            arguments=loop.arguments(arch),
            element=ELEMENTS[loop.dtype],
            access=loop.access or loop.vector,
            shared_bytes=loop.shared_bytes(arch),
            threads=loop.threads,
            report=ctypes_bytes(Report),
        )
    compile_cuda(source, arch)


def ctypes_bytes(type_):
    return len(bytes(type_()))


# Numbers.

AWKWARD = {
    "smaller than a tile": Conv((1, 64, 5, 7), 40),
    "one image": Conv((1, 256, 4, 4), 256, parts=FIXUP),
    "stride 2": Conv((3, 40, 9, 9), 72, stride=(2, 2), parts=FIXUP),
    "1x1": Conv((2, 128, 7, 5), 64, (1, 1), padding=(0, 0), parts=BATCH_NORM),
    "1x1 of stride 2": Conv((2, 64, 8, 8), 64, (1, 1), (2, 2), (0, 0), parts="add_channel"),
    "7x7": Conv((1, 16, 20, 20), 24, (7, 7), (2, 2), (3, 3), parts="add_channel relu"),
    "5x3": Conv((2, 24, 9, 12), 48, (5, 3), (2, 1), (1, 2), parts="residual"),
    "dilation": Conv((2, 32, 6, 6), 32, padding=(2, 2), dilation=(2, 2), parts="relu add"),
    "many tiles": Conv((40, 128, 8, 8), 256, parts=BATCH_NORM),
    "channels by fours": Conv((2, 116, 7, 7), 116, (1, 1), padding=(0, 0), parts=BATCH_NORM),
    "channels by twos": Conv((2, 58, 9, 9), 24, parts="add_channel relu"),
}


# What one rounding to tf32 changes, and a bound that PyTorch's error is over where it rounds so.
TF32_ROUNDING, FLOAT32_BOUND = 2**-11, 1e-5


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.fixture
    def checked(self, monkeypatch):
        """`check`, of tf32 against its own rounding where PyTorch's result has none.

        PyTorch allows tf32, but cuDNN chooses float32 for some shapes (here for 1x1 of stride 2 on
        an H200, cuDNN 9.19). A search rejects tf32 there, whose error is more than twice
        PyTorch's; the kernel is right all the same, by the bound that tf32 allows.
        """

        def run(step, candidate, space):
            try:
                return check(step, candidate, space)
            except WrongResult as error:
                if candidate.config["math"] != "tf32" or error.bound > FLOAT32_BOUND:
                    raise
            with monkeypatch.context() as patch:
                patch.setitem(TABLE["step"], "float32", Tolerance(TF32_ROUNDING, "tf32 rounds"))
                return check(step, candidate, space)

        return run

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("name", AWKWARD)
    def test_16_bit_types(self, step_of, assert_legal_configs_right, name, dtype):
        splits = [(1, "serial"), *((k, mode) for k in (2, 4) for mode in ("serial", "parallel"))]
        configs = [changed(split_k=k, split_mode=mode) for k, mode in splits]
        configs += [changed(**LARGE, stages=3), changed(swizzle=4)]
        assert_legal_configs_right(FAMILY, step_of(AWKWARD[name], dtype), configs)

    @pytest.mark.parametrize("name", AWKWARD)
    def test_float32(self, step_of, assert_legal_configs_right, name):
        configs = [changed(math="tf32", stages=3), changed(math="tf32", stages=4, split_k=2)]
        configs += [changed(math="simt", tile_k=8, split_k=k) for k in (1, 2)]
        assert_legal_configs_right(FAMILY, step_of(AWKWARD[name], "float32"), configs)

    def test_a_first_convolution_of_three_channels(self, step_of, assert_legal_configs_right):
        stem = Conv((2, 3, 33, 31), 64, (7, 7), (2, 2), (3, 3), parts="add_channel relu")
        assert_legal_configs_right(FAMILY, step_of(stem), [changed(math="simt", tile_k=8)])

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ELEMENTS)
    def test_every_main_loop(self, step_of, assert_legal_configs_right, gpu_space, dtype):
        once = [c for c in FAMILY.configs(gpu_space) if c["split_k"] == c["swizzle"] == 1]
        assert_legal_configs_right(FAMILY, step_of(AWKWARD["many tiles"], dtype), once)
