"""A search that is killed with SIGKILL at any moment loses the trials in flight, no more."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlite_utils import Database

from ..conftest import start

pytestmark = pytest.mark.usefixtures("copied_processes")

# With so many trials the next kills come at any time, not after a new trial only.
ENOUGH = 40


def trials(path: Path) -> set[tuple[str, str]]:
    """Step and candidate of every trial in the database."""
    if not path.exists():
        return set()
    database = Database(path)
    try:
        if "trials" not in database.table_names():
            return set()
        return {(row["step"], row["candidate"]) for row in database["trials"].rows}
    finally:
        database.close()


def workers_of(pid: int) -> list[int]:
    """Processes that this one started, by what Linux says of each."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def killed_search(
    eventually: Callable[..., object],
    path: Path,
    after_s: float,
    more_than: int,
    network: list[object],
) -> list[int]:
    """Starts a search, waits for a new trial and `after_s`, then kills it without warning.

    Returns the workers that it had then: none before the first one started.
    """
    process = start("search", *network, "--batch", 1, "--db", path, "--json")

    def has_measured() -> bool:
        assert process.poll() is None, process.communicate()[1].decode()
        return len(trials(path)) > more_than

    eventually(has_measured, "nothing was measured")
    time.sleep(after_s)
    workers = workers_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return workers


# So many want a network with more candidates.
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_and_resumed_it_goes_on_where_it_was(
    tmp_path: Path,
    small_network: list[object],
    kills: int,
    eventually: Callable[..., object],
    is_gone: Callable[[int], bool],
) -> None:
    draw = random.Random(kills)
    network = small_network if kills == 2 else ["--budget", 300]
    path = tmp_path / "plans.db"
    before: set[tuple[str, str]] = set()
    workers = 0
    for _ in range(kills):
        after_s, more_than = draw.uniform(0, 3), min(len(before), ENOUGH)
        theirs = killed_search(eventually, path, after_s, more_than, network)
        eventually(lambda theirs=theirs: all(map(is_gone, theirs)), "a worker outlived its parent")
        workers += len(theirs)
        after = trials(path)
        assert before <= after
        before = after
    assert workers >= kills / 3
    assert len(before) >= min(kills, 3)
