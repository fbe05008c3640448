"""Convolutions of float32 by warpgroup products: what they refuse, that they build and run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.devices.cuda.flags import flags
from plantune.kernels.families.hopper_float_conv import FAMILY
from plantune.kernels.family import Candidate
from plantune.kernels.registry import resolve, why_not
from plantune.measure.trial import NANS, Trial
from plantune.space.arch import load_arch
from plantune.space.search_space import SearchSpace, load_search_space

from .conftest import LAYERS
from .test_hopper_conv import PARTS, Conv, layer

ARCH = load_arch("sm90")
MATHS = ("planes", "tf32")


def with_planes(family):
    """The search space, with products of planes, which sm90.toml does not offer yet."""
    space = load_search_space("sm90")
    axes = {**space.families[family], "math": MATHS}
    return SearchSpace(space.arch, {**space.families, family: axes})


SPACE = with_planes("hopper_float_conv")


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    """Rounding to tf32 is allowed."""
    with flags(torch.backends.cudnn.conv, fp32_precision="tf32"):
        yield


def config(tile_m, tile_n, stages=3, split_k=1, reuse=False, blocks_per_sm=1, math="planes"):
    return Attrs(
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        split_k=split_k,
        reuse=reuse,
        blocks_per_sm=blocks_per_sm,
        math=math,
    )


def refusal(step, candidate_config):
    return why_not(step, Candidate("hopper_float_conv", candidate_config), SPACE)


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("index", range(len(LAYERS)))
def test_each_layer_has_configs(step_of, index, math):
    parts = FAMILY.parts(step_of(layer(index, parts=PARTS), "float32"))
    legal = [
        c
        for c in FAMILY.configs(SPACE)
        if c["math"] == math and FAMILY.why_not_config(parts, c, ARCH) is None
    ]
    assert 10 <= len(legal) <= 400
    assert all(2 < FAMILY.estimate_us(parts, c, ARCH) < 1000 for c in legal)


def test_it_runs_float32_alone(step_of):
    assert "multiplies float32, got float16" in refusal(step_of(Conv(), "float16"), config(64, 64))


def test_it_asks_whether_products_may_be_rounded(step_of):
    step = step_of(Conv(), "float32")
    with flags(torch.backends.cudnn.conv, fp32_precision="ieee"):
        assert "in ieee, not in tf32" in refusal(step, config(64, 64, math="tf32"))
        assert refusal(step, config(64, 64)) is None


def test_a_product_of_matrices_asks_for_its_own_precision(step_of):
    step = step_of(lambda b: b.linear(b.x(64, 256), b.w(64, 256)), "float32")
    with flags(torch.backends.cuda.matmul, fp32_precision="ieee"):
        assert "in ieee, not in tf32" in refusal(step, config(64, 64, math="tf32"))


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (config(64, 256), "registers do not fit an SM"),
        (config(256, 64, 4), "bytes of shared memory"),
        (config(128, 128, math="tf32", stages=6), "bytes of shared memory"),
    ],
)
def test_illegal_configs_have_reasons(step_of, refused, reason):
    assert reason in refusal(step_of(layer(6), "float32"), refused)


BUILT = {
    "planes": (layer(0, parts=PARTS), config(128, 64, 3, reuse=True)),
    "planes, two blocks": (layer(4, parts=PARTS), config(64, 128, 3, split_k=2)),
    "planes, three blocks": (layer(2), config(64, 64, 1, blocks_per_sm=2)),
    "tf32": (layer(0, parts=PARTS), config(128, 64, 3, reuse=True, math="tf32")),
    "tf32, wide": (layer(6), config(64, 256, 3, math="tf32")),
}


@pytest.mark.parametrize("name", BUILT)
def test_it_builds_without_spilling(step_of, build_within_limits, name):
    emit, chosen = BUILT[name]
    step = step_of(emit, "float32")
    used = build_within_limits(FAMILY, step, chosen, ARCH)["run"]
    parts = FAMILY.parts(step)
    design = FAMILY.design(parts, chosen)
    of_warp = -(-used.registers * 32 // 256) * 256
    assert of_warp * design.threads // 32 * chosen["blocks_per_sm"] <= ARCH.cuda.registers_per_sm


RUN = {
    **{f"layer {i}": (layer(i, n=3, parts=PARTS), config(64, 64)) for i in range(len(LAYERS))},
    "reuse": (Conv(3, 128, (16, 16), 128), config(128, 64, 3, reuse=True)),
    "reuse, ragged": (Conv(3, 72, (14, 9), 40), config(64, 64, 3, reuse=True)),
    "two blocks": (layer(4, n=7, parts=PARTS), config(64, 128, 3, split_k=2)),
    "eight blocks": (layer(6, n=7, parts=PARTS), config(128, 64, 3, split_k=8)),
    "1x1": (Conv(3, 96, (9, 9), 72, kernel=1), config(64, 64, 3)),
    "one pixel": (Conv(1, 64, (1, 1), 64), config(64, 64, 3)),
    "few channels": (Conv(1, 8, (5, 5), 8), config(64, 64, 3)),
    "stride 2": (Conv(3, 64, (9, 7), 64, stride=2), config(64, 64)),
    "wide": (Conv(2, 64, (8, 8), 128, parts=PARTS[:4]), config(128, 128, 3)),
    "added to its input": (Conv(parts=("bias", "input", "relu")), config(64, 64)),
    "no epilogue": (Conv(2, 64, (8, 8), 64, parts=()), config(64, 64)),
    "staying": (Conv(130, 64, (16, 16), 64, parts=PARTS[:4]), config(128, 64)),
    "staying, reuse": (Conv(270, 64, (8, 8), 128, parts=PARTS), config(64, 64, 3, reuse=True)),
}


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("name", RUN)
def test_what_is_to_run_is_legal(step_of, name, math):
    emit, chosen = RUN[name]
    assert refusal(step_of(emit, "float32"), Attrs({**chosen, "math": math})) is None


@pytest.mark.gpu
@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("name", RUN)
def test_it_is_right(step_of, assert_right, name, math):
    emit, chosen = RUN[name]
    candidate = Candidate("hopper_float_conv", Attrs({**chosen, "math": math}))
    assert_right(step_of(emit, "float32"), candidate, SPACE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["layer 0", "1x1", "staying"])
def test_planes_are_as_right_as_float32(step_of, assert_right, name):
    emit, chosen = RUN[name]
    with flags(torch.backends.cudnn.conv, fp32_precision="ieee"):
        assert_right(step_of(emit, "float32"), Candidate("hopper_float_conv", chosen), SPACE)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_an_infinity_stays_one(step_of, value):
    emit, chosen = RUN["no epilogue"]
    step = step_of(emit, "float32")
    trial = Trial(resolve(step, Candidate("hopper_float_conv", chosen)), ARCH)
    data = {name: torch.randn(type_.shape, device="cuda") for name, type_ in step.inputs}
    data[step.nodes[0].inputs[0]][0, 0, 3, 3] = value
    trial.put_data(data)
    ((made, _),) = step.outputs
    exact = step.evaluate({name: x.double() for name, x in data.items()}, torch.float64)[made]
    found = trial.run("run", NANS)[made].double()
    assert exact.isinf().any()
    assert torch.equal(found.isinf() * found.sign(), exact.isinf() * exact.sign())
    assert not found.isnan().any()
