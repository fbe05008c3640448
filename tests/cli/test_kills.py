"""F16: a search that is killed with SIGKILL at any moment loses the trials in flight, no more."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from sqlite_utils import Database

from .conftest import start

DEADLINE_S = 240.0
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


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "Z"


def killed_search(path: Path, after_s: float, more_than: int) -> int:
    """Starts a search, waits for a new trial and `after_s`, then kills it without warning.

    Returns how many workers it had then: none before the first one started.
    """
    process = start("search", "--batch", 1, "--budget", 300, "--db", path, "--json")
    deadline = time.monotonic() + DEADLINE_S
    while len(trials(path)) <= more_than:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline, "nothing was measured"
        time.sleep(0.1)
    time.sleep(after_s)
    workers = workers_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 5
    while not all(map(is_gone, workers)):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    return len(workers)


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_and_resumed_it_goes_on_where_it_was(tmp_path: Path, kills: int) -> None:
    draw = random.Random(kills)
    path = tmp_path / "plans.db"
    before: set[tuple[str, str]] = set()
    workers = 0
    for _ in range(kills):
        workers += killed_search(path, draw.uniform(0, 3), min(len(before), ENOUGH))
        after = trials(path)
        assert before <= after
        before = after
    assert workers >= kills / 3
    assert len(before) >= min(kills, 3)
