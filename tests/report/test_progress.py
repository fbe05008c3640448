"""The progress line: rewritten on a terminal, a few lines elsewhere."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest

from plantune.report.progress import EVERY_S, ProgressLine, StatusLine, progress_text, waiting
from plantune.search.results import Progress

EVENT = Progress("measuring", "stem: gemm", 3, 1, 3000.0, 4000.0, 41.6)


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
        "measuring: 3 measured, 1 rejected, best about 3 ms, framework 4 ms (0.75), 42 s left"
        " - stem: gemm"
    )


def test_what_is_not_known_is_left_out() -> None:
    text = progress_text(replace(EVENT, best_us=math.inf, detail=""))
    assert text == "measuring: 3 measured, 1 rejected, 42 s left"
    without = progress_text(replace(EVENT, framework_us=math.inf, detail=""))
    assert without == "measuring: 3 measured, 1 rejected, best about 3 ms, 42 s left"


def test_without_a_terminal_a_line_comes_with_a_phase_or_after_some_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    line = ProgressLine(stream, clock)
    for now, phase in (
        (0.0, "measuring"),
        (EVERY_S - 0.1, "measuring"),
        (EVERY_S, "measuring"),
        (EVERY_S + 0.1, "ranking"),
        (EVERY_S + 0.2, "ranking"),
    ):
        clock.now = now
        line(replace(EVENT, phase=phase))
    line.end()
    phases = [text.partition(":")[0] for text in stream.getvalue().splitlines()]
    assert phases == ["measuring", "measuring", "ranking"]
    assert "\r" not in stream.getvalue()


def test_on_a_terminal_one_line_is_written_over_and_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    line = ProgressLine(stream)
    line(EVENT)
    line(replace(EVENT, best_us=math.inf, detail=""))
    line.end()
    assert "\n" not in stream.getvalue()
    first, second, gone, last = stream.getvalue().split("\r")[1:]
    assert len(first) == len(second) == 59
    assert second.rstrip() == "measuring: 3 measured, 1 rejected, 42 s left"
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
