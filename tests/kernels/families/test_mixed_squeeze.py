"""How squeeze-and-excite of several element types is read, and what is refused."""

from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.graph.step import Step
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract_with_outputs
from plantune.graph.types import TensorType
from plantune.kernels.families.se_tail import FAMILY as TAIL
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.guess import guessed_plan
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from ..conftest import Builder, step_of
from .mixed_squeeze import F32, Tail

SIMT = Attrs(images=1, threads=256, math="simt")


def tail(**parts: object) -> Step:
    return step_of(Tail(**parts), "float16")


def test_each_operand_has_the_type_that_it_has_in_memory() -> None:
    step = tail(pooled="narrow", residual="narrow")
    source = TAIL.source(TAIL.parts(step), SIMT, load_arch("sm90"))
    for word, element in {
        "Image": "__half",
        "Residual": "__half",
        "Weight": "__half",
        "Number": "float",
        "Y": "float",
        "Unshifted": "float",
        "Pooled": "__half",
        "Also": "__half",
        "Hidden": "__half",
        "Means": "plantune::Types<__half, float>",
        "Gates": "plantune::Types<__half, float>",
    }.items():
        assert f"using {word} = {element};" in source
    assert "kAlso = true" in source


def test_a_thread_takes_whole_words_of_the_largest_element() -> None:
    assert TAIL.parts(tail()).width == 4
    narrow = tail(residual="narrow", stored=("narrow",), saved=False)
    assert TAIL.parts(narrow).mixed
    assert TAIL.parts(narrow).width == 8


def test_only_a_pool_has_results_beside_what_is_declared() -> None:
    plain, pooled = (TAIL.parts(tail(pooled=pooled)) for pooled in ("", F32))
    config = Attrs(SIMT, images=2)
    assert TAIL.shared_bytes(plain, config, load_arch("sm90")) == 0
    assert TAIL.shared_bytes(pooled, config, load_arch("sm90")) == 2 * 64 * 4 * 4 * 4
    large = TAIL.parts(tail(shape=(2, 512, 16, 16), pooled=F32))
    assert "bytes of shared memory, a block has" in str(
        TAIL.why_not_config(large, SIMT, load_arch("sm90"))
    )


def test_tensor_cores_need_weights_of_few_digits() -> None:
    wide, narrow = (TAIL.parts(tail(weights=weights)) for weights in (F32, ""))
    config, arch = Attrs(images=2, threads=256, math="mma"), load_arch("sm90")
    assert "need 16-bit values" in str(TAIL.why_not_config(wide, config, arch))
    assert TAIL.why_not_config(narrow, config, arch) is None


def two_weights(b: Builder) -> str:
    x = b.wide(b.x(2, 64, 4, 4))
    mean = b.cast(b("mean", x, dims=(2, 3), keepdim=False))
    hidden = b.wide(b("relu", b.linear(mean, b.w(4, 64))))
    return b("sigmoid", b.linear(hidden, b.w(64, 4, dtype=F32)))


def rounded_mean(b: Builder) -> str:
    mean = b("mean", b.x(2, 64, 4, 4, dtype=F32), dims=(2, 3), keepdim=False)
    hidden = b("relu", b.linear(b.cast(mean, own=True), b.w(4, 64)))
    return b("sigmoid", b.linear(hidden, b.w(64, 4)))


def hidden_twice(b: Builder) -> tuple[str, ...]:
    mean = b.cast(b("mean", b.x(2, 64, 4, 4, dtype=F32), dims=(2, 3), keepdim=False))
    hidden = b("relu", b.linear(mean, b.w(4, 64)))
    return hidden, b.wide(hidden), b("sigmoid", b.linear(hidden, b.w(64, 4)))


def brought_offset(b: Builder) -> str:
    x = b.wide(b.x(2, 64, 4, 4))
    mean = b.cast(b("mean", x, dims=(2, 3), keepdim=False))
    hidden = b("relu", b.linear(mean, b.w(4, 64)))
    gate = b("sigmoid", b.linear(hidden, b.w(64, 4)))
    y = b("mul", x, b.wide(b("reshape", gate, shape=(2, 64, 1, 1))))
    return b("add", y, b.wide(b.x(1)))


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (two_weights, "both weights are of one type, got float16, float32"),
        (rounded_mean, "is followed by cast, not by matmul"),
        (hidden_twice, "is a copy that no kernel stores"),
        (brought_offset, "is of float16, not of float32"),
    ],
)
def test_what_tails_refuse(emit, reason: str) -> None:
    assert reason in str(TAIL.why_not_step(step_of(emit, "float16")))


def test_autocast_leaves_a_launch_for_each_tail() -> None:
    """Those of four blocks."""
    batch = (TensorType((128, 3, 64, 64), F32, "nhwc"),)
    arguments = Arguments(batch, autocast=("cuda", torch.float16))
    graph = extract_with_outputs(SEResNet9Fixup().eval(), arguments)[0]
    space = load_search_space("sm90")
    plan = guessed_plan(graph, space, network="se_resnet9")
    tails = [choice for choice in plan.choices if choice.candidate.family == "se_tail"]
    assert len(tails) == 4
