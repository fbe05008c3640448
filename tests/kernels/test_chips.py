"""Guesses for the chips of other archs: datasheets beside the chip that was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.cuda.build import Binary, Usage
from plantune.errors import BuildError, InvalidSearchSpace
from plantune.kernels.chips import measured_chip, slowdown
from plantune.kernels.cuda.cuda_family import block_shared_bytes, why_not_fits, why_not_portable
from plantune.kernels.family import Candidate
from plantune.kernels.registry import all_families, candidates, estimate_us
from plantune.space.arch import ARCH_NAMES, load_arch, parse_arch
from plantune.space.rules import parse_space_file
from plantune.space.search_space import load_search_space

CUDA_ARCHS = [name for name in ARCH_NAMES if name != "cpu"]


def block(builder):
    x, w = builder.x(128, 64, 16, 16), builder.w(64, 64, 3, 3)
    return builder("relu", builder.conv(x, w, padding=(1, 1)))


def one_conv(builder):
    return builder.conv(builder.x(128, 64, 16, 16), builder.w(64, 64, 3, 3), padding=(1, 1))


@pytest.mark.parametrize("name", CUDA_ARCHS)
def test_every_cuda_arch_has_a_chip(name):
    chip = load_arch(name).chip
    assert chip is not None
    assert chip.fp16_tflops > chip.fp32_tflops
    assert 30 <= chip.multiprocessors <= 200


def test_the_cpu_has_none():
    assert load_arch("cpu").chip is None
    assert slowdown(1e9, 1e6, ("float32",), load_arch("cpu")) == 1.0


def test_slowdown_follows_what_limits_a_kernel():
    v100, here = load_arch("sm70"), measured_chip()
    assert v100.chip is not None
    products = slowdown(1e15, 0, ("float16",), v100)
    assert products == pytest.approx(here.fp16_tflops / v100.chip.fp16_tflops)
    singles = slowdown(1e15, 0, ("float32",), v100)
    assert singles == pytest.approx(here.fp32_tflops / v100.chip.fp32_tflops)
    memory = slowdown(0, 1e9, ("float16",), v100)
    assert memory == pytest.approx(here.memory_gb_per_s / v100.chip.memory_gb_per_s)
    assert slowdown(1e9, 1e6, ("float16",), load_arch("sm90")) == 1.0
    assert slowdown(0, 0, ("float16",), v100) == 1.0


def test_a_guess_for_the_measured_chip_is_the_guess(step_of):
    step, space = step_of(block, "float16"), load_search_space("sm90")
    for candidate in candidates(step, space):
        if candidate.family not in ("framework", "view"):  # they run on CPUs, too
            there = estimate_us(step, candidate, space.arch)
            assert there == pytest.approx(estimate_us(step, candidate)), candidate


@pytest.mark.parametrize("family", ["implicit_gemm_conv", "framework"])
def test_slower_chips_have_longer_guesses(step_of, family):
    step = step_of(one_conv, "float16")
    best = {}
    for name in ("sm75", "sm70", "sm80", "sm90"):
        space = load_search_space(name)
        found = [c for c in candidates(step, space) if c.family == family]
        best[name] = min(estimate_us(step, c, space.arch) for c in found)
    assert sorted(best, key=best.__getitem__, reverse=True) == ["sm75", "sm70", "sm80", "sm90"]
    # 2.4 GFLOP at the tensor cores' peak of each chip, and a launch.
    assert 8 < best["sm70"] - 2.4e9 / 125e6 < 100
    assert 1 < best["sm90"] - 2.4e9 / 989e6 < 20


def test_the_framework_takes_the_times_that_were_measured(step_of):
    """cuDNN took 13.7 us for this convolution on one H200, 2026-11-20."""
    candidate = Candidate("framework", Attrs(layout="nhwc"))
    guess = estimate_us(step_of(one_conv, "float16"), candidate, load_arch("sm90"))
    assert 7 < guess < 27
    on_cpu = estimate_us(step_of(one_conv, "float32"), candidate, load_arch("cpu"))
    assert on_cpu == estimate_us(step_of(one_conv, "float32"), candidate)


def test_a_view_is_free(step_of):
    step = step_of(lambda b: b("reshape", b.x(2, 8), shape=(16,)), "float16")
    assert 0 < estimate_us(step, Candidate("view", Attrs()), load_arch("sm80")) < 0.1


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("multiprocessors = 108", "multiprocessors = 0"),
        ("fp16_tflops = 312", "fp16_tflops = nan"),
        ("fp32_tflops = 19.5", "fp32_tflops = true"),
        ("memory_gb_per_s = 2039", ""),
        ('name = "A100 SXM 80GB"', 'name = "{evil}"'),
    ],
)
def test_a_broken_chip_is_refused(line, wrong):
    path = Path(__file__).parents[2] / "search_spaces" / "sm80.toml"
    text = path.read_text(encoding="utf-8")
    assert line in text
    with pytest.raises(InvalidSearchSpace, match=r"\[chip\]"):
        parse_arch(parse_space_file(text.replace(line, wrong), path))


def usage_log(registers: int = 32, shared: int = 0) -> Binary:
    text = "Compiling entry function 'run' for 'sm'\n"
    return Binary("key", b"", text + f"Used {registers} registers, {shared} bytes smem\n")


def test_a_block_that_does_not_fit_is_told():
    turing = load_arch("sm75")
    assert why_not_fits(usage_log(64), turing, 1024) is None
    assert "69120 registers" in str(why_not_fits(usage_log(66), turing, 960))
    assert why_not_fits(usage_log(32, 1024), turing, 64, 63 << 10) is None
    reason = why_not_fits(usage_log(32, 1024), turing, 64, 64 << 10)
    assert reason == "a block takes 66560 bytes of shared memory, sm75 has no more than 65536"


def test_what_blackwell_keeps_of_a_block_is_not_the_kernels():
    used = Usage(32, 1024 + 64, 0, 0)
    assert block_shared_bytes(used, load_arch("sm100")) == 64
    assert block_shared_bytes(used, load_arch("sm90")) == 1024 + 64


def test_what_is_tied_to_a_chip_is_not_portable(step_of):
    assert why_not_portable(load_arch("sm80")) is None
    assert why_not_portable(load_arch("sm90")) == (
        "what is compiled for sm_90a runs on no other chip"
    )
    family = all_families()["pool"]
    step = step_of(lambda b: b("mean", b.x(2, 8, 4, 4), dims=(2, 3), keepdim=False), "float16")
    config = Attrs(layout="nhwc", threads=128)
    with pytest.raises(BuildError, match="sm_90a"):
        family.build_portable(family.parts(step), config, load_arch("sm90"))
    portable = family.build_portable(family.parts(step), config, load_arch("sm70"))
    assert b".target sm_70" in portable.image
    assert portable.image.endswith(b"\0")  # the driver reads it as a text
    assert b"ELF" in family.build(family.parts(step), config, load_arch("sm70")).image[:4]
    assert replace(load_arch("sm80"), chip=None).chip is None
