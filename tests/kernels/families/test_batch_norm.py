"""Batch norms in training and their gradients: which steps, which configs, that they are right."""

from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.kernels.families import batch_norm, batch_norm_grad
from plantune.kernels.family import Candidate
from plantune.kernels.registry import resolve, why_not
from plantune.measure.trial import NUMBERS, Trial
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import BUILT, in_turns
from .norms import assert_refused

NORM, GRAD = batch_norm.FAMILY, batch_norm_grad.FAMILY


def norm(shape, then=(), kept=(1, 2, 3, 4), momentum=0.1):
    """`kept` are the places of outputs that leave beside what the step makes."""

    def emit(b):
        channels = (b.w(shape[1]), b.w(shape[1]), b.x(shape[1]), b.x(shape[1]))
        outputs = b.all("batch_norm", b.x(*shape), *channels, eps=1e-5, momentum=momentum)
        y = outputs[0]
        for op in then:
            y = b(op, y, b.x(*shape)) if op == "add" else b(op, y)
        return (y, *(outputs[place] for place in kept))

    return emit


def grad(shape, wanted=3):
    def emit(b):
        x, c = (b.x(*shape), b.x(*shape)), shape[1]
        statistics = (b.statistics(c), b.statistics(c))
        return b.all("batch_norm_grad", *x, b.w(c), *statistics)[:wanted]

    return emit


def masked_grad(shape, ops=("add", "relu_grad"), kept=()):
    """With what makes dy; `kept` are the places of those on the way that leave."""

    def emit(b):
        dy, on_the_way = b.x(*shape), []
        for op in ops:
            dy = b(op, dy, b.x(*shape))
            on_the_way.append(dy)
        c = shape[1]
        others = (b.x(*shape), b.w(c), b.statistics(c), b.statistics(c))
        made = b.all("batch_norm_grad", dy, *others)
        return (*(on_the_way[place] for place in kept), *made)

    return emit


def again_grad(shape, ops=("gelu_grad",), other=False):
    """The norm's result is made again for an activation's gradient, or the result of an `other`."""

    def emit(b):
        c = shape[1]
        x, weight, bias = b.x(*shape), b.w(c), b.w(c)
        mean, invstd = b.statistics(c), b.statistics(c)
        dy = b.x(*shape)
        result = b("batch_norm_again", x, weight, bias, mean, b.statistics(c) if other else invstd)
        for op in ops:
            dy = b(op, dy, b.x(*shape) if op == "add" else result)
        return b.all("batch_norm_grad", dy, x, weight, mean, invstd)

    return emit


def mixed(b):
    """Images in 16 bits and weights in float32, as autocast has them."""
    x = b.x(4, 16, 5, 5, dtype="float16")
    weights = [b.x(16, dtype="float32") for _ in range(4)]
    return b.all("batch_norm", x, *weights, eps=1e-5, momentum=0.1)


def mixed_grad(b):
    images = [b.x(4, 16, 5, 5, dtype="float16") for _ in range(2)]
    weights = [b.x(16, dtype="float32") for _ in range(3)]
    return b.all("batch_norm_grad", *images, *weights)


NORMS = {
    "images": norm((5, 64, 7, 9)),
    "residual and relu": norm((4, 32, 9, 5), then=("add", "relu")),
    "odd channels": norm((3, 6, 5, 5), then=("silu",)),
    "three channels": norm((2, 3, 5, 7), momentum=0.7),
    "rows": norm((33, 48), then=("relu",)),
    "two values": norm((1, 8, 1, 2)),
    "one pixel": norm((130, 64, 1, 1), then=("relu",), kept=(1, 2)),
    "large": norm((3, 16, 70, 90), then=("add", "relu")),
    "y alone": norm((2, 16, 4, 4), kept=()),
    "float32 weights": mixed,
}
GRADS = {
    "images": grad((5, 64, 7, 9)),
    "odd channels": grad((3, 6, 5, 5)),
    "three channels": grad((2, 3, 5, 7)),
    "rows": grad((33, 48)),
    "one pixel": grad((130, 64, 1, 1)),
    "large": grad((3, 16, 70, 90)),
    "dx alone": grad((2, 16, 4, 4), wanted=1),
    "float32 weights": mixed_grad,
    "of a ReLU": masked_grad((5, 32, 7, 9), ("relu_grad",)),
    "of a sum and a ReLU": masked_grad((4, 16, 17, 9), kept=(1,)),
    "of a sum": masked_grad((4, 6, 5, 5), ("add",), kept=(0,)),
    "of a GELU": again_grad((5, 32, 7, 9)),
    "of a sum and a SiLU": again_grad((4, 6, 17, 9), ("add", "silu_grad")),
    "of a GELU, large": again_grad((3, 16, 70, 90)),
    "of a GELU of rows": again_grad((130, 48)),
    "all of it leaves": masked_grad((4, 16, 5, 5), ("add", "silu_grad"), kept=(0, 1)),
}
STEPS = {
    **{("norm", name): (NORM, emit) for name, emit in NORMS.items()},
    **{("grad", name): (GRAD, emit) for name, emit in GRADS.items()},
}


def config(columns=1, threads=256, slices=1, launches=1):
    return Attrs(columns=columns, threads=threads, slices=slices, launches=launches)


CONFIGS = (
    config(),
    config(2, 512, 8),
    config(4, 256, 2),
    config(8, 512, 1),
    config(1, 256, 4, 2),
    config(2, 512, 128, 2),
    config(4, 256, 16, 2),
)


def legal(family, step, arch="sm90"):
    space = load_search_space(arch)
    made = (Candidate(family.name, config) for config in family.configs(space))
    return [candidate for candidate in made if why_not(step, candidate, space) is None]


@pytest.mark.parametrize("which", STEPS, ids=" ".join)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_it_runs_every_step(step_of, which, dtype):
    family, emit = STEPS[which]
    step = step_of(emit, dtype)
    assert legal(family, step)
    images = {name for name, type_ in (*step.inputs, *step.outputs) if len(type_.shape) == 4}
    layouts = family.layouts(family.parts(step), config())
    assert layouts == dict.fromkeys(images, "nhwc")


def test_steps_that_it_cannot_run_are_refused_with_the_reason(step_of):
    reasons = {
        norm((4, 8, 3)): "only images and matrices",
        lambda b: b("relu", b.x(2, 8)): "not with a batch_norm",
        lambda b: norm((4, 8, 3, 3))(b)[1]: "read alone",
        lambda b: (y := norm((4, 8, 3, 3))(b)[0], b("relu", y)): "outside",
    }
    for emit, reason in reasons.items():
        assert reason in NORM.why_not_step(step_of(emit, "float16"))
    for emit, reason in {
        lambda b: b("relu", b.x(2, 8)): "the step ends with relu",
        masked_grad((4, 8, 3, 3), ("add", "add", "add")): "3 images at most",
        grad((4, 8, 3)): "only images and matrices",
        lambda b: grad((4, 8, 3, 3))(b)[1]: "not asked for",
        again_grad((4, 8, 3, 3), other=True): "another norm's result",
    }.items():
        assert reason in GRAD.why_not_step(step_of(emit, "float16"))


def test_configs_that_do_not_fit_are_refused_with_the_reason(step_of):
    step = step_of(norm((4, 24, 5, 5)), "float16")
    parts = NORM.parts(step)
    reasons = {
        config(2): "2 columns do not divide 3 vectors",
        config(1, 32, 16): "8 blocks at most",
        config(1, 32, 1, 2): "one slice needs one launch",
        config(1, 512, 4): "nothing to do",
        config(1, 32, 2): None,
    }
    assert_refused(NORM, parts, reasons)
    assert_refused(NORM, parts, {config(1, 32, 2): "no clusters"}, "sm80")


@pytest.mark.parametrize(("arch_name", "launches"), in_turns([1, 2]))
def test_it_builds_within_its_limits(step_of, build_within_limits, arch_name, launches):
    arch = load_arch(arch_name)
    slices = 4 if launches == 2 or "clusters" in arch.cuda.features else 1
    shape = (16, 64, 16, 16)
    steps = (
        (NORM, norm(shape, ("add", "relu"))),
        (GRAD, grad(shape)),
        (GRAD, masked_grad(shape, kept=(0, 1))),
        (GRAD, again_grad(shape, ("add", "gelu_grad"))),
    )
    # The arch that is measured builds all, the others two of them in turn: test_every_arch builds a
    # norm and a gradient for each.
    first = BUILT.index(arch_name) // 2 % 2
    for family, emit in steps if arch_name == "sm90" else steps[first::2]:
        step = step_of(emit, "float16")
        threads = max(each["threads"] for each in family.configs(load_search_space(arch_name)))
        usage = build_within_limits(family, step, config(2, threads, slices, launches), arch)
        assert set(usage) >= ({"run", "collect"} if launches == 2 else {"run"})


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize("which", STEPS, ids=" ".join)
    def test_it_is_right(self, step_of, assert_legal_configs_right, which, dtype):
        family, emit = STEPS[which]
        assert_legal_configs_right(family, step_of(emit, dtype), CONFIGS)

    @pytest.mark.parametrize("launches", [1, 2])
    def test_numbers_far_from_zero_lose_no_digits(self, step_of, gpu_space, launches):
        step = step_of(norm((16, 16, 30, 30)), "float32")
        slices = 4 if launches == 2 else 1
        candidate = Candidate("batch_norm", config(1, 256, slices, launches))
        trial = Trial(resolve(step, candidate), gpu_space.arch)
        x = torch.randn(16, 16, 30, 30, device="cuda") + 1e4
        ones, zeros = (torch.full((16,), value, device="cuda") for value in (1.0, 0.0))
        trial.put_constants({"w0": ones, "w1": zeros})
        trial.put_data({"x0": zeros, "x1": ones, "x2": x})
        got = trial.run("run", NUMBERS)
        exact = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
        # Half of the distance between floats near the mean is 5e-4.
        assert (got["batch_norm"] - exact).abs().max() < 5e-3
        assert (got["batch_norm:2"] - 1).abs().max() < 0.05
