"""The progress line: rewritten on a terminal, a few lines elsewhere."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from plantune import search
from plantune.report.progress import (
    EVERY_S,
    STAGES,
    ProgressLine,
    StatusLine,
    progress_text,
    waiting,
)
from plantune.search.budget import PREPARING
from plantune.search.results import Progress, StepsSum

BEST, FRAMEWORK = StepsSum(3000.0, 5), StepsSum(4000.0, 9)
EVENT = Progress("measuring", "stem: gemm", 3, 1, 1200, BEST, FRAMEWORK, 41.6, 2900.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_text_tells_all() -> None:
    assert progress_text(EVENT) == (
        "trying kernels, 42 s left: best so far 2.9 ms, eager about 4 ms, 4 of 1,200 kernels "
        "tried, now stem: gemm"
    )


def test_what_is_not_known_is_left_out() -> None:
    unknown = replace(EVENT, best=StepsSum(), framework=StepsSum(), whole_us=math.inf, detail="")
    begin, end = "trying kernels, 42 s left: ", "4 of 1,200 kernels tried"
    assert progress_text(unknown) == f"{begin}{end}"
    assert progress_text(replace(unknown, best=BEST)) == f"{begin}best so far about 3 ms, {end}"


def test_what_is_partly_estimated_is_said_to_be_unsure() -> None:
    text = progress_text(replace(EVENT, framework=StepsSum(4000.0, 9, 7)))
    assert "eager perhaps 4 ms, " in text


def test_when_no_time_is_left_it_does_not_promise_any() -> None:
    assert progress_text(replace(EVENT, seconds_left=0.0)).startswith("trying kernels, time is up:")


def test_each_phase_has_words_that_need_no_code() -> None:
    """Every stage that a search enters, wherever in the code."""
    folder = Path(search.__file__).parent
    code = "\n".join(path.read_text("utf-8") for path in folder.rglob("*.py"))
    entered = set(re.findall(r'\.enter\("([a-z ]+)"\)', code))
    assert {"measuring", "racing", "waiting for others"} <= entered
    assert entered | {PREPARING} <= set(STAGES)
    private = {"measuring", "ranking", "proving", "cover", "candidate", "worker"}
    assert not [text for text in STAGES.values() if private & set(text.split())]


def test_without_a_terminal_a_line_comes_with_a_phase_or_after_some_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    line = ProgressLine(stream, clock)
    for now, stage in (
        (0.0, "measuring"),
        (EVERY_S - 0.1, "measuring"),
        (EVERY_S, "measuring"),
        (EVERY_S + 0.1, "ranking"),
        (EVERY_S + 0.2, "ranking"),
    ):
        clock.now = now
        line(replace(EVENT, stage=stage))
    line.end()
    stages = [text.partition(",")[0] for text in stream.getvalue().splitlines()]
    assert stages == ["trying kernels", "trying kernels", "comparing whole plans"]
    assert "\r" not in stream.getvalue()


def test_on_a_terminal_one_line_is_written_over_and_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    line = ProgressLine(stream)
    line(EVENT)
    line(Progress("measuring", "", 3, 1, 9, StepsSum(), StepsSum(), 42.0))
    line.end()
    assert "\n" not in stream.getvalue()
    first, second, gone, last = stream.getvalue().split("\r")[1:]
    assert len(first) == len(second) == 59
    assert second.rstrip() == "trying kernels, 42 s left: 4 of 9 kernels tried"
    assert gone.strip() == last == ""


def test_a_closed_stream_stops_nothing() -> None:
    stream = io.StringIO()
    line = ProgressLine(stream)
    stream.close()
    line(EVENT)
    line.end()


def test_a_wait_is_told_at_once_and_taken_away() -> None:
    stream = Terminal()
    with waiting(stream, "racing with eager"):
        pass
    told, *rest = stream.getvalue().split("\r")[1:]
    assert told == "racing with eager, 0 s"
    assert "".join(rest).strip() == ""


def test_a_wait_in_a_log_is_one_line_at_first() -> None:
    stream = io.StringIO()
    with waiting(stream, "racing with eager"):
        pass
    assert stream.getvalue() == "racing with eager, 0 s\n"


def test_a_wait_ends_with_the_error_of_what_it_waits_for() -> None:
    stream = Terminal()
    with pytest.raises(ValueError, match="broken"), waiting(stream, "racing"):
        raise ValueError("broken")
    assert stream.getvalue().endswith("\r")


def test_the_first_status_is_shown_without_a_phase() -> None:
    stream = io.StringIO()
    StatusLine(stream).show("checking step 1 of 3")
    assert stream.getvalue() == "checking step 1 of 3\n"
