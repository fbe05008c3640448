"""What is kept of a failure."""

from __future__ import annotations

import pickle

from plantune.base.build_log import build_error
from plantune.errors import BuildError, WrongResult
from plantune.measure.limits import rejection

LOG = "kernel.cu(3): error: expected a ';'\n  y[0] = 1\n" + "note: template ignored\n" * 10_000


def test_the_first_error_of_a_long_log_is_kept():
    """It says what is wrong; neither source code nor a path of this machine is in the row."""
    found = rejection(build_error("NVRTC 13.0 did not compile a kernel for sm90", LOG))
    assert found.stage == "build"
    assert found.reason == "NVRTC 13.0 did not compile a kernel for sm90: expected a ';'"


def test_of_a_family_that_hands_a_whole_log_over_the_first_line_is_kept():
    assert rejection(BuildError("my compiler refused\n" + LOG)).reason == "my compiler refused"


def test_the_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(WrongResult("what, where, got", 0.5, 0.1)))
    assert (str(error), error.error, error.bound) == ("what, where, got", 0.5, 0.1)
