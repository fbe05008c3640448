"""Convolutions of odd channels in 16 bits by CUTLASS: legal everywhere, but never guessed."""

from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.kernels.families.implicit_gemm_conv import FAMILY
from plantune.kernels.registry import candidates
from plantune.plans.guess import hand_plan
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import epilogue, in_turns, legal
from .cutlass_configs import MMA

FIXUP = ("offset", "relu")
BATCH_NORM = ("mul_channel", "add_channel", "residual", "relu")
DILATED = {"padding": (2, 2), "dilation": (2, 2)}


def conv(x, w, *parts, **geometry):
    """A convolution with its epilogue."""
    return lambda b: epilogue(b, b.conv(b.x(*x), b.w(*w), **geometry), parts, w[0])


STEPS = {
    "odd in": conv((2, 27, 9, 9), (24, 27, 3, 3), "add_channel", "relu", padding=(1, 1)),
    "odd out": conv((3, 64, 7, 5), (37, 64, 3, 3), *FIXUP, stride=(2, 2), padding=(1, 1)),
    "both odd, 1x1": conv((2, 139, 8, 8), (171, 139, 1, 1), *BATCH_NORM),
    "1x1 of stride 2": conv((2, 27, 9, 9), (75, 27, 1, 1), "mul_channel", stride=(2, 2)),
    "one channel": conv((1, 1, 6, 7), (1, 1, 3, 3), "residual", padding=(1, 1)),
    "one pixel": conv((1, 129, 1, 1), (65, 129, 1, 1), "add_channel", "relu"),
    "dilation": conv((2, 33, 9, 9), (19, 33, 3, 3), "silu", **DILATED),
    "many tiles": conv((40, 65, 9, 9), (129, 65, 3, 3), *BATCH_NORM, padding=(1, 1)),
}
WIDE = STEPS["many tiles"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", STEPS)
def test_they_have_candidates(step_of, name, dtype):
    found = candidates(step_of(STEPS[name], dtype), load_search_space("sm90"), [FAMILY.name])
    assert {candidate.config["stages"] for candidate in found} == {2}


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_deeper_pipelines_have_a_reason(step_of, dtype, stages):
    parts = FAMILY.parts(step_of(STEPS["odd out"], dtype))
    reason = FAMILY.why_not_config(parts, Attrs(MMA, stages=stages), load_arch("sm90"))
    assert "cp.async moves no single 16-bit channels" in reason


@pytest.mark.parametrize(("channels", "family"), [(27, "framework"), (26, FAMILY.name)])
def test_a_plan_by_hand_leaves_them_to_the_framework(graph_of, channels, family):
    """How long they take is not known before a search has measured it."""
    emit = conv((2, channels, 9, 9), (24, channels, 3, 3), "add_channel", "relu", padding=(1, 1))
    space = load_search_space("sm80")
    plan = hand_plan(graph_of(emit, "float16"), space, network="x", without=["grouped_conv"])
    assert plan.choices[0].candidate.family == family


def main_loops(step, arch):
    """A config of each."""
    parts = FAMILY.parts(step)
    return {parts.loop(found.config): found.config for found in legal(FAMILY, step, arch)}


@pytest.mark.parametrize(("arch", "dtype"), in_turns(["float16", "bfloat16"]))
def test_a_main_loop_builds_within_the_limits(step_of, build_within_limits, arch, dtype):
    step = step_of(WIDE, dtype)
    found = [*main_loops(step, arch).values()]
    assert found or (arch, dtype) == ("sm75", "bfloat16")
    for config in found[-1:]:
        build_within_limits(FAMILY, step, config, load_arch(arch))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), in_turns(["float16", "bfloat16"]))
def test_every_main_loop_builds_within_the_limits(step_of, build_within_limits, arch, dtype):
    step = step_of(WIDE, dtype)
    loops = main_loops(step, arch)
    assert len(loops) >= 3 or dtype == "bfloat16"
    for config in loops.values():
        build_within_limits(FAMILY, step, config, load_arch(arch))


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("name", STEPS)
    def test_they_are_right(self, step_of, assert_legal_configs_right, name, dtype):
        splits = [(1, "serial"), *((k, mode) for k in (2, 4) for mode in ("serial", "parallel"))]
        configs = [Attrs(MMA, split_k=k, split_mode=mode) for k, mode in splits]
        assert_legal_configs_right(FAMILY, step_of(STEPS[name], dtype), configs)

    def test_every_main_loop(self, step_of, assert_legal_configs_right, gpu_space):
        once = [c for c in FAMILY.configs(gpu_space) if c["split_k"] == c["swizzle"] == 1]
        assert_legal_configs_right(FAMILY, step_of(WIDE, "float16"), once)
