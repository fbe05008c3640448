"""Which steps are worth a compiler's seconds, and what is said where it fails."""

from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.errors import BuildError
from plantune.kernels.families import inductor
from plantune.kernels.families.inductor import FAMILY
from plantune.space.arch import load_arch

CONFIG = {"layout": "nchw"}
pytestmark = pytest.mark.usefixtures("as_with_a_compiler")


def chain(b):
    return b("relu", b("add", b.x(2, 3, 4, 4), b.w(1)))


def test_a_chain_is_compiled(step_of, refusal):
    assert refusal(step_of(chain), "inductor", **CONFIG) is None


def test_one_op_is_left_to_the_framework(step_of, refusal):
    step = step_of(lambda b: b("relu", b.x(2, 3)))
    assert refusal(step, "inductor", **CONFIG) == "one op alone is the framework's already"


def test_what_only_moves_is_refused(step_of, refusal):
    step = step_of(lambda b: b("permute", b("reshape", b.x(2, 6), shape=(3, 4)), dims=(1, 0)))
    assert refusal(step, "inductor", **CONFIG) == "the step computes nothing"


def test_without_a_compiler(step_of, refusal, monkeypatch):
    monkeypatch.setattr(inductor, "cxx_compiler", lambda: None)
    assert "no C++ compiler was found" in refusal(step_of(chain), "inductor", **CONFIG)


def test_a_failure_to_compile_names_the_step(step_of, monkeypatch):
    def broken(*_):
        raise RuntimeError("the compiler crashed")

    monkeypatch.setattr(inductor, "_function", broken)
    with pytest.raises(BuildError, match="step 'add': the compiler crashed"):
        FAMILY.build(FAMILY.parts(step_of(chain)), Attrs(CONFIG), load_arch("cpu"))


def test_a_compilers_log_is_in_a_file(step_of, monkeypatch):
    log = (
        "CppCompileError: C++ compile error\n\nCommand:\ng++ k.cpp\n\nk.cpp:3: error: no such thing"
    )

    def broken(*_):
        raise RuntimeError(log)

    monkeypatch.setattr(inductor, "_function", broken)
    with pytest.raises(BuildError, match="step 'add': no such thing; ") as caught:
        FAMILY.build(FAMILY.parts(step_of(chain)), Attrs(CONFIG), load_arch("cpu"))
    assert "g++" not in str(caught.value)
    assert caught.value.log == log
