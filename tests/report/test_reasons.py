from __future__ import annotations

from plantune.base.outcome import STAGES, Rejected
from plantune.report.reasons import WHAT, counts_text, rejected_text


def test_every_stage_has_words() -> None:
    assert set(WHAT) == set(STAGES)


def test_a_reason_is_one_line_of_limited_length() -> None:
    rejected = Rejected("numerics", "7 instead\nof 8 " + "x" * 500)
    assert rejected_text(rejected, 20) == "wrong numbers: 7 instead of 8 xxxxx"
    assert "x" * 500 in rejected_text(rejected, None)


def test_reasons_are_counted() -> None:
    rejected = [Rejected("build", "a"), Rejected("noisy", "b"), Rejected("build", "c")]
    assert counts_text(rejected) == "2 cannot be built, 1 could not be timed"
    assert counts_text([]) == ""
    assert counts_text(rejected[:1]) == "cannot be built: a"
