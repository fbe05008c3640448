"""Gradients of float32 weights by products of planes: what they refuse, that they build and run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.devices.cuda.flags import flags
from plantune.kernels.families.hopper_float_wgrad import FAMILY
from plantune.kernels.family import Candidate
from plantune.kernels.registry import resolve, why_not
from plantune.measure.trial import NANS, Trial
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import LAYERS
from .test_hopper_wgrad import layer
from .weight_gradients import Gradient

ARCH = load_arch("sm90")
SPACE = load_search_space("sm90")
MATHS = ("planes", "tf32")


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    """Rounding to tf32 is allowed."""
    with flags(torch.backends.cudnn.conv, fp32_precision="tf32"):
        yield


def config(tile_m=64, tile_n=64, tile_k=64, order="pixels", stages=2, blocks=132, layout="nchw"):
    return {
        **{"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k, "order": order},
        **{"stages": stages, "blocks": blocks, "layout": layout},
    }


def refusal(step, chosen, math="planes"):
    candidate = Candidate("hopper_float_wgrad", Attrs(math=math, **chosen))
    return why_not(step, candidate, SPACE)


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("n", [7, 128, 2048])
@pytest.mark.parametrize("index", range(len(LAYERS)))
def test_each_layer_has_configs(step_of, index, n, math):
    parts = FAMILY.parts(step_of(layer(index, n), "float32"))
    configs = [c for c in FAMILY.configs(SPACE) if c["math"] == math]
    legal = [c for c in configs if FAMILY.why_not_config(parts, c, ARCH) is None]
    assert 4 <= len(legal) <= 400
    assert 2 < min(FAMILY.estimate_us(parts, c, ARCH) for c in legal) < 1000


def test_it_runs_float32_alone(step_of):
    assert "multiplies float32, got float16" in refusal(step_of(Gradient(), "float16"), config())


def test_it_asks_whether_products_may_be_rounded(step_of):
    step = step_of(Gradient(64, size=(16, 16)), "float32")
    with flags(torch.backends.cudnn.conv, fp32_precision="ieee"):
        assert "in ieee, not in tf32" in refusal(step, config(), "tf32")
        assert refusal(step, config()) is None


@pytest.mark.parametrize(
    ("emit", "refused", "reason"),
    [
        (layer(2), config(tile_m=128), "4 warpgroups"),
        (layer(2), config(tile_n=128), "sums of each thread"),
        (layer(1, 2048), config(), "bytes of shared memory"),
    ],
)
def test_illegal_configs_have_reasons(step_of, emit, refused, reason):
    assert reason in refusal(step_of(emit, "float32"), refused)


BUILT = {
    "pixels": (layer(0, 2048), config()),
    "images": (layer(6, 2048), config(order="images", layout="nhwc")),
    "stride 2": (layer(1, 2048), config(tile_k=32)),
    "1x1": (Gradient(128, 256, kernel=1, o=128), config(128, 128)),
}


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("name", BUILT)
def test_it_builds_without_spilling(step_of, build_within_limits, name, math):
    emit, chosen = BUILT[name]
    step = step_of(emit, "float32")
    assert refusal(step, chosen, math) is None
    build_within_limits(FAMILY, step, Attrs(math=math, **chosen), ARCH)


IMAGES = {"order": "images"}
RUN = {
    **{f"layer {i}": (layer(i, 7), config(tile_k=32, blocks=1)) for i in range(len(LAYERS))},
    **{
        f"layer {i}, images": (layer(i, 129), config(**IMAGES, blocks=1))
        for i in range(4, len(LAYERS))
        if i != 5
    },
    "one image": (Gradient(1, size=(16, 16)), config(blocks=1)),
    "many parts": (Gradient(129, size=(16, 16)), config(layout="nhwc")),
    "one stage": (Gradient(129, size=(16, 16)), config(stages=1, blocks=33)),
    "many images": (Gradient(700, 64, (4, 4), 128), config(**IMAGES, blocks=33)),
    "places in parts": (
        Gradient(33, 64, (5, 7)),
        config(**IMAGES, tile_k=32, stages=1, blocks=1),
    ),
    "ragged": (Gradient(3, 72, (14, 9), 40), config(blocks=1)),
    "ragged, stride 2": (Gradient(5, 72, (13, 9), 136, stride=2), config(tile_k=32, blocks=16)),
    "few channels": (Gradient(3, 8, (9, 9), 16), config(layout="nhwc", blocks=1)),
    "no padding": (Gradient(3, 64, (9, 7), padding=0), config(blocks=1)),
    "2x2": (Gradient(3, 64, (8, 8), kernel=2, padding=0, stride=2), config(tile_k=32, blocks=1)),
    "much padding": (Gradient(3, 64, (9, 7), padding=2), config(blocks=1)),
    "1x1": (Gradient(7, 96, (9, 9), 72, kernel=1), config(blocks=16)),
    "1x1, wide": (Gradient(7, 256, (8, 8), 192, kernel=1), config(128, 128, blocks=4)),
    "1x1, stride 2": (
        Gradient(9, 64, (9, 9), 128, kernel=1, stride=2),
        config(128, tile_k=32, blocks=4),
    ),
    "one pixel": (Gradient(1, 8, (1, 1), 8, kernel=1), config(tile_k=32, blocks=1, stages=1)),
}


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("name", RUN)
def test_what_is_to_run_is_legal(step_of, name, math):
    emit, chosen = RUN[name]
    assert refusal(step_of(emit, "float32"), chosen, math) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUN)
def test_three_planes_are_as_right_as_float32(step_of, assert_right, name):
    emit, chosen = RUN[name]
    candidate = Candidate("hopper_float_wgrad", Attrs(math="planes", **chosen))
    with flags(torch.backends.cudnn.conv, fp32_precision="ieee"):
        assert_right(step_of(emit, "float32"), candidate, SPACE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUN)
def test_two_planes_have_more_digits_than_tf32(step_of, name):
    """cuDNN has kernels that do not round for some of these sizes, so its error is no bound."""
    emit, chosen = RUN[name]
    step = step_of(emit, "float32")
    candidate = Candidate("hopper_float_wgrad", Attrs(math="tf32", **chosen))
    data = {name: torch.randn(type_.shape, device="cuda") for name, type_ in step.inputs}
    trial = Trial(resolve(step, candidate), ARCH)
    trial.put_data(data)
    ((made, _),) = step.outputs
    exact = step.evaluate({name: x.double() for name, x in data.items()}, torch.float64)[made]
    assert (trial.run("run", NANS)[made] - exact).norm() <= 1e-4 * exact.norm()


def test_a_guess_leaves_it_until_it_was_timed(step_of):
    parts = FAMILY.parts(step_of(layer(0), "float32"))
    assert not any(FAMILY.can_be_guessed(parts, c) for c in FAMILY.configs(SPACE)[:8])
