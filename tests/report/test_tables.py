from __future__ import annotations

import pytest

from plantune.base.canonical import Attrs
from plantune.kernels.family import Candidate
from plantune.report.tables import bytes_text, config_text, counted, table, us_text


def test_columns_are_aligned_and_lines_end_without_spaces() -> None:
    text = table(["way", "ms", ""], [["eager", "12.5", ""], ["plantune", "3", "x"]], "lrl")
    assert text == "way         ms\neager     12.5\nplantune     3  x"


ROWS = [
    ["layers.0.0.conv1/conv2d", "12.5 us", "gemm layout=nhwc prepack=true"],
    ["pool", "3 us", "framework"],
]


@pytest.mark.parametrize("width", [40, 50, 60, 61, 80])
def test_lines_fit_the_width_and_nothing_is_lost(width: int) -> None:
    wide = table(["step", "time", "candidate"], ROWS, "lrl")
    text = table(["step", "time", "candidate"], ROWS, "lrl", width)
    assert max(map(len, text.splitlines())) <= width
    assert sorted("".join(text.split())) == sorted("".join(wide.split()))
    assert "12.5 us" in text


def test_what_fits_is_left_as_it_is() -> None:
    wide = table(["step", "time", "candidate"], ROWS, "lrl")
    assert table(["step", "time", "candidate"], ROWS, "lrl", len(wide.splitlines()[1])) == wide


def test_words_are_broken_only_if_wrapping_is_not_enough() -> None:
    lines = table(["step", "time", "candidate"], ROWS, "lrl", 46).splitlines()
    assert lines[1] == "layers.0.0.conv1/conv2d  12.5 us  gemm"
    assert lines[2].split() == ["layout=nhwc"]
    assert max(map(len, table(["step", "time", "candidate"], ROWS, "lrl", 35).splitlines())) <= 35


def test_titles_of_numbers_are_wrapped_and_numbers_stay_whole() -> None:
    text = table(["queued call", "of best baseline"], [["0.123 to 0.125", "0.5"]], "rr", 10)
    assert text.splitlines() == [
        "   queued call   of best",
        "                baseline",
        "0.123 to 0.125       0.5",
    ]


def test_a_table_without_rows_is_its_head() -> None:
    assert table(["a", "b"], [], "ll") == "a  b"


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (None, "-"),
        (0.1234, "0.123 us"),
        (99.94, "99.9 us"),
        (123.4, "123 us"),
        (1234.5, "1.234 ms"),
        (2.5e7, "25 s"),
    ],
)
def test_times_have_the_digits_that_mean_something(us: float | None, text: str) -> None:
    assert us_text(us) == text


def test_sizes_counts_and_configs() -> None:
    assert [bytes_text(n) for n in (0, 1023, 2048, 3 << 20, 5 << 30)] == [
        "0 B",
        "1023 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
    assert (counted(1, "step"), counted(0, "step"), counted(2, "match", "matches")) == (
        "1 step",
        "0 steps",
        "2 matches",
    )
    assert (
        config_text(Candidate("gemm", Attrs(layout="nhwc", prepack=True)))
        == "gemm layout=nhwc prepack=true"
    )
