"""What is kept of a failure."""

from __future__ import annotations

from plantune.errors import BuildError
from plantune.measure.limits import REASON_LENGTH, rejection


def test_the_head_of_a_long_log_is_kept():
    """F1: the first error is the one that says what is wrong."""
    first = "NVRTC 13.0 --gpu-architecture=sm_90a\nkernel.cu(3): error: expected a ';'\n"
    found = rejection(BuildError(first + "note: candidate template ignored\n" * 10_000))
    assert found.stage == "build"
    assert found.reason.startswith(first)
    assert len(found.reason) == REASON_LENGTH
