"""A cast of the user's code rounds, whatever reads it or stores it."""

from __future__ import annotations

from typing import Any

import pytest

from plantune.base.canonical import canonical
from plantune.graph.contraction import contracted
from plantune.graph.step import Step
from plantune.kernels.registry import family_named
from plantune.space.arch import load_arch

from ..conftest import Builder, Emit, step_of
from .conftest import legal
from .mixed import F32, IMAGE, WINDOW, convolved, scalar, softmax
from .mixed_squeeze import Tail


def rounded(b: Builder, x: str) -> str:
    """By the user's code, which then goes on in float32."""
    return b.wide(b.cast(x, own=True))


def summed(b: Builder) -> str:
    return b("sum_to", rounded(b, b("relu", b.x(*IMAGE, dtype=F32))), shape=(1,))


def pooled(b: Builder) -> str:
    attrs: dict[str, Any] = {"count_padding": True, "shape": IMAGE, **WINDOW}
    dx = b("avg_pool2d_grad", b.x(2, 16, 3, 3, dtype=F32), **attrs)
    return b("sum_to", rounded(b, b("add", dx, b.x(*IMAGE, dtype=F32))), shape=(1,))


ROUND: dict[str, Emit] = {
    "softmax": lambda b: softmax(b, rounded(b, b.x(5, 96, dtype=F32))),
    "pointwise_sum": summed,
    "pool_grad": pooled,
    "pointwise": lambda b: rounded(b, b("relu", b.x(*IMAGE, dtype=F32))),
}


@pytest.mark.parametrize("name", ROUND)
@pytest.mark.parametrize(
    ("dtype", "element"), [("float16", "__half"), ("bfloat16", "__nv_bfloat16")]
)
def test_what_reads_a_cast_reads_it_rounded(name: str, dtype: str, element: str) -> None:
    family = family_named(name)
    step = step_of(ROUND[name], dtype)
    parts = family.read(contracted(step))
    (config, *_) = [candidate.config for candidate in legal(family, step)]
    assert f"plantune::rounded<{element}>" in family.source(parts, config, load_arch("sm90"))


def left_beside(b: Builder) -> tuple[str, str]:
    y = b("relu", b("add", convolved(b), scalar(b)))
    return y, rounded(b, y)


def tail(b: Builder) -> tuple[str, ...]:
    *_, y = Tail(stored=(F32,), offset=False, saved=False)(b)
    return y, rounded(b, y)


def of_fewer_digits(b: Builder) -> str:
    """Torch casts what a softmax with a dtype is of."""
    given = canonical({"self": {"tensor": 0}, "dim": -1, "dtype": {"same": True}})
    return b("aten.softmax.int", b.x(5, 96, dtype=F32), arguments=given, dtype=b.dtype)


def test_a_softmax_in_fewer_digits_than_what_it_is_of_is_the_frameworks() -> None:
    step = step_of(of_fewer_digits, "float16")
    assert step.nodes[0].types[0].dtype == "float16"
    assert family_named("softmax").why_not_step(step) == "it rounds what it is of"


REFUSED: dict[str, Emit] = {
    "hopper_conv": left_beside,
    "implicit_gemm_conv": left_beside,
    "se_tail": tail,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_copy_that_is_rounded_and_stored_wide_is_no_copy(name: str) -> None:
    step: Step = step_of(REFUSED[name], "float16")
    assert contracted(step).nodes[-1].op == "cast"
    assert family_named(name).why_not_step(step)


def test_a_compiler_that_leaves_out_casts_gets_none_that_rounds() -> None:
    """Compiled by torch's inductor, what is stored of them is what it was before them."""
    inductor = family_named("inductor")
    assert inductor.why_not_step(step_of(ROUND["pointwise"], "bfloat16")) == (
        "it leaves out casts of the user's code"
    )
    assert inductor.why_not_step(step_of(left_beside, "bfloat16"))
    assert inductor.why_not_step(step_of(lambda b: b.cast(convolved(b)), "bfloat16")) is None
