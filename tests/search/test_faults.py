"""Searches that share a study survive what happens to processes and databases: only trials in
flight are lost, nothing counts twice, and all that live end with the same plan.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from optuna.study import StudyDirection

from plantune.errors import StorageLost
from plantune.outcome import Outcome
from plantune.search.board_rows import TRIAL, rows_of
from plantune.search.candidates import Key
from plantune.search.rdb import Persistent, close_shared, opened_shared, with_driver
from plantune.search.results import Patience

from .postgres import PASSWORD, Postgres
from .shared_search import outcome_of

ROOT = Path(__file__).resolve().parents[2]
SEARCHES = ("a", "b", "c")
# Longer than a search may be silent, see shared_search.py.
STOPPED_S = 4.5


class Searches:
    """Processes with a search each, which may be killed and started again."""

    def __init__(self, url: str, folder: Path, count: int, pace_s: float) -> None:
        self.url, self.folder = url, folder
        script = Path(__file__).with_name("shared_search.py")
        command = [sys.executable, str(script), url, str(folder), str(count), str(pace_s)]
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._log = open(folder / "log", "w+b")  # noqa: SIM115 - closed by `close`
        self._nursery = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.pids: dict[str, int] = {}
        self.plans: dict[str, str] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._nursery.stdout is not None
        for line in self._nursery.stdout:
            what, name, rest = line.rstrip("\n").split(" ", 2)
            (self.pids if what == "started" else self.plans)[name] = (
                int(rest) if what == "started" else rest
            )

    def start(self, name: str) -> None:
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(name + "\n")
        self._nursery.stdin.flush()

    def signal(self, name: str, number: int) -> None:
        os.kill(self.pids[name], number)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def close(self) -> None:
        os.killpg(self._nursery.pid, signal.SIGKILL)
        self._nursery.communicate()
        self._log.close()


def outcomes(url: str) -> tuple[Counter[Key], dict[Key, Outcome]]:
    """How often each candidate counts in the study, and as what."""
    does = Persistent(url, 60.0, lambda text: None)
    storage = does(lambda: opened_shared(url, Patience(1)))
    try:
        id = max((s._study_id for s in does(storage.get_all_studies)), default=None)
        if id is None:
            return Counter(), {}
        rows = [r for r in rows_of(does(lambda: storage.get_all_trials(id))) if r.role == TRIAL]
        found = [told for row in rows for told in row.told]
        return Counter(key for key, _ in found), dict(found)
    finally:
        close_shared(storage)


class Faults:
    """What happens to searches and their database."""

    def __init__(self, server: Postgres, searches: Searches, draw: random.Random) -> None:
        self._server, self._searches, self._draw = server, searches, draw

    def kill(self) -> None:
        """A search, which somebody starts again."""
        name = self._living()
        self._searches.signal(name, signal.SIGKILL)
        del self._searches.pids[name]
        self._searches.start(name)

    def stop(self) -> None:
        """A search, for longer than it may be silent."""
        name = self._living()
        self._searches.signal(name, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        self._searches.signal(name, signal.SIGCONT)

    def restart(self) -> None:
        """The database, as when its host goes down."""
        self._server.restart()

    def full(self) -> None:
        """Nothing can be written for a while: to each file of the server, nor to a new one."""
        self._server.fill()
        time.sleep(self._draw.uniform(0.2, 1.0))
        self._server.empty()

    def _living(self) -> str:
        return self._draw.choice([n for n in self._searches.pids if n not in self._searches.plans])


@pytest.fixture
def server():
    """A server of its own: others must not meet its faults."""
    made = Postgres()
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize(("faults", "count", "pace_s"), [(4, 64, 0.1), (50, 1200, 0.1)])
def test_only_trials_in_flight_are_lost(server, tmp_path, faults, count, pace_s, eventually):
    draw, url = random.Random(faults), with_driver(server.url)
    searches = Searches(url, tmp_path, count, pace_s)
    try:
        for name in SEARCHES:
            searches.start(name)
        eventually(lambda: len(searches.pids) == len(SEARCHES), "three searches began")
        happen = Faults(server, searches, draw)
        kinds = [happen.kill, happen.stop, happen.restart, happen.full]
        known: dict[Key, Outcome] = {}
        for number in range(faults):
            before = len(known)
            eventually(lambda before=before: len(outcomes(url)[1]) > before, searches.log)
            kinds[number % 4 if faults < 8 else draw.randrange(4)]()
            counted, now = outcomes(url)
            assert known.items() <= now.items(), "what was found is still there"
            assert set(counted.values()) <= {1}, "nothing counts twice"
            known = now
        eventually(lambda: set(searches.plans) == set(SEARCHES), searches.log)
    finally:
        searches.close()
    counted, found = outcomes(url)
    assert set(counted.values()) == {1}
    assert len(found) == count
    assert all(outcome == outcome_of(key) for key, outcome in found.items())
    assert len(set(searches.plans.values())) == 1
    assert PASSWORD not in searches.log


def test_a_disk_that_stays_full_ends_a_search_with_a_message(server):
    """Nothing is waited for: the clock is the test's."""
    now = [0.0]
    does = Persistent(with_driver(server.url), 30.0, lambda text: None, lambda: now[0])
    storage = does(lambda: opened_shared(with_driver(server.url), Patience(1)))
    server.fill()
    try:

        def write() -> None:
            now[0] += 10.0
            for number in range(1000):
                storage.create_new_study([StudyDirection.MINIMIZE], f"{number} {'x' * 200}")

        with pytest.raises(StorageLost, match="is gone for 30 s"):
            does(write)
    finally:
        server.empty()
        close_shared(storage)
