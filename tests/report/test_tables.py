from __future__ import annotations

import pytest

from plantune.report.tables import bytes_text, config_text, counted, table, us_text


def test_columns_are_aligned_and_lines_end_without_spaces() -> None:
    text = table(["way", "ms", ""], [["eager", "12.5", ""], ["plantune", "3", "x"]], "lrl")
    assert text == "way         ms\neager     12.5\nplantune     3  x"


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
        config_text("gemm", {"layout": "nhwc", "prepack": True}) == "gemm layout=nhwc prepack=true"
    )
