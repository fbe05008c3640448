"""What a search says of the machine before it begins."""

from __future__ import annotations

import pytest

from plantune.cli.quiet import wait_for_quiet
from plantune.measure.machine_state import Machine, State


class Looked(Machine):
    """Is in these states, the last one for ever."""

    def __init__(self, *others: float) -> None:
        super().__init__()
        self.left = list(others)

    def look(self) -> State:
        return State(2, others=self.left.pop(0) if len(self.left) > 1 else self.left[0])


@pytest.mark.parametrize(("budget_s", "looks"), [(5.0, 1), (60.0, 10), (3600.0, 16)])
def test_a_busy_machine_is_waited_for_a_little_and_told(
    capsys: pytest.CaptureFixture[str], budget_s: float, looks: int
) -> None:
    slept: list[float] = []
    wait_for_quiet(budget_s, Looked(1.9), slept.append)
    assert len(slept) == looks
    told = capsys.readouterr().err
    assert "the machine is busy" in told
    assert "other processes took 1.9 of 2 cores" in told


def test_a_machine_that_becomes_quiet_does_not_matter(capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []
    wait_for_quiet(60.0, Looked(1.9, 1.9, 0.0), slept.append)
    assert len(slept) == 3
    assert capsys.readouterr().err == ""
