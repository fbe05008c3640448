"""How squeeze-and-excite of several element types is read, and what is refused."""

from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import Step
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract_with_outputs
from plantune.graph.types import TensorType
from plantune.kernels.families.se_grad import FAMILY as GRADIENT
from plantune.kernels.families.se_tail import FAMILY as TAIL
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.guess import guessed_plan
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from ..conftest import Builder, step_of
from .mixed_squeeze import F32, Gradient, Tail

SIMT = Attrs(images=1, threads=256, math="simt")
HELD = Attrs(SIMT, hold="shared", blocks_per_sm=1)


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


def gradient(**parts: object) -> Step:
    return step_of(Gradient(**parts), "float16")


def test_each_operand_of_a_gradient_has_its_type() -> None:
    parts = GRADIENT.parts(gradient(stored=("narrow", F32)))
    source = GRADIENT.source(parts, HELD, load_arch("sm90"))
    types = source[source.index("plantune::SeGradMixed<") :]
    layer, parameter, total = types.removeprefix("plantune::SeGradMixed<").split(", ")[:3]
    assert (layer, parameter, total) == ("__half", "float", "float")
    assert "plantune::Types<__half, float, float, __half>, " in types  # two gradients, mask, image
    assert types.count("plantune::Types<__half, float, __half>") == 1  # what is stored
    assert "using T = float;" in source


def test_what_is_narrower_in_memory_than_it_was_made_is_made_anew() -> None:
    """From what eager does not round nothing is read that is."""
    narrow, wide = (
        GRADIENT.parts(gradient(residual=residual)) for residual in (("narrow",), (F32,))
    )
    assert narrow.stored[0]
    assert (narrow.known, wide.known) == ((), wide.stored[0])


def test_only_what_is_float_comes_through_its_slot() -> None:
    """Bytes are copied there as they are."""
    parts = GRADIENT.parts(gradient())
    source = GRADIENT.source(parts, HELD, load_arch("sm90"))
    (line,) = (line for line in source.splitlines() if "kSlotOf" in line)
    slots = line[line.index("{") + 1 : line.index("}")].split(", ")
    dtypes = [parts.dtype_of(name) for name in parts.first.images]
    assert len(slots) == 4
    assert all(slot == "-1" for slot, dtype in zip(slots, dtypes, strict=True) if dtype != F32)
    assert {slot for slot, dtype in zip(slots, dtypes, strict=True) if dtype == F32} - {"-1"}


def other_layers(b: Builder) -> tuple[str, ...]:
    """What the derivatives are functions of is float32, the weights are not."""
    g, x = b.x(2, 64, 4, 4, dtype=F32), b.x(2, 64, 4, 4, dtype=F32)
    dgate = b.cast(b("sum", b("mul", g, x), dims=(2, 3), keepdim=False))
    plain = {"transpose_a": False, "transpose_b": False}
    dy = b("sigmoid_grad", b.wide(dgate), b.x(2, 64, dtype=F32))
    dy = b("relu_grad", b("matmul", b.cast(dy), b.w(64, 4), **plain), b.x(2, 4))
    spread = b("reshape", b.wide(b("matmul", dy, b.w(4, 64), **plain)), shape=(2, 64, 1, 1))
    return b("add", g, spread)


def two_parameters(b: Builder) -> tuple[str, ...]:
    *left, weight, _, image = Gradient(sums=False, residual=())(b)
    source = b.graph.nodes[[node.name for node in b.graph.nodes].index(weight)].inputs[0]
    return (*left, source, image)


@pytest.mark.parametrize(
    ("emit", "reason"),
    [
        (other_layers, "both layers are of one type, got float16, float32"),
        (two_parameters, "the parameters' gradients are of several types"),
    ],
)
def test_what_gradients_refuse(emit, reason: str) -> None:
    assert reason in str(GRADIENT.why_not_step(step_of(emit, "float16")))


def test_autocast_leaves_a_launch_for_each_tail_and_its_gradient() -> None:
    batch = (TensorType((128, 3, 64, 64), F32, "nhwc"),)
    arguments = Arguments(batch, autocast=("cuda", torch.float16))
    graph = differentiate(extract_with_outputs(SEResNet9Fixup(), arguments)[0])
    plan = guessed_plan(graph, load_search_space("sm90"), network="se_resnet9")
    families = [choice.candidate.family for choice in plan.choices]
    assert (families.count("se_tail"), families.count("se_grad")) == (4, 4)
    assert "matmul" not in {
        graph.producers[name].op
        for choice in plan.choices
        for name in choice.nodes
        if choice.candidate.family == "framework"
    }
