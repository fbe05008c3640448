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

from plantune.base.outcome import Outcome
from plantune.errors import StorageLost
from plantune.plans.planner.candidates import Key
from plantune.search.results import Patience
from plantune.search.shared.board_rows import TRIAL, rows_of
from plantune.search.shared.rdb import Persistent, close_shared, opened_shared, with_driver

from .postgres import PASSWORD, Postgres
from .shared_search import outcome_of

ROOT = Path(__file__).resolve().parents[3]
SEARCHES = ("a", "b", "c")
# Longer than a search may be silent, see shared_search.py.
STOPPED_S = 3.5
# How many outcomes more a search may know from one fault to the next.
ROOM = 12
NO_END = 1 << 30

pytestmark = pytest.mark.usefixtures("copied_processes")


class Searches:
    """Processes with a search each, which may be killed and started again."""

    def __init__(self, url: str, folder: Path, count: int) -> None:
        self.folder = folder
        self.let(ROOM)
        # A copy has no command line of its own, and imports nothing anew.
        command = [
            sys.executable,
            "-m",
            "tests.search.shared.shared_search",
            url,
            str(folder),
            str(count),
        ]
        self._log = open(folder / "log", "w+b")  # noqa: SIM115 - closed by `close`
        self._nursery = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        self.pids: dict[str, int] = {}
        self.joined: set[str] = set()
        self.plans: dict[str, str] = {}
        self.failed: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._nursery.stdout is not None
        for line in self._nursery.stdout:
            what, name, rest = line.rstrip("\n").split(" ", 2)
            if what == "started":
                self.pids[name] = int(rest)
            elif what == "joined":
                self.joined.add(name)
            elif what == "done":
                self.plans[name] = rest
            else:
                self.failed.append(name)

    def start(self, name: str) -> None:
        assert self._nursery.stdin is not None
        self.joined.discard(name)
        self._nursery.stdin.write(name + "\n")
        self._nursery.stdin.flush()

    def signal(self, name: str, number: int) -> None:
        os.kill(self.pids[name], number)

    def let(self, outcomes: int) -> None:
        """How many outcomes each may know."""
        (self.folder / "new").write_text(str(outcomes))
        (self.folder / "new").rename(self.folder / "room")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def close(self) -> None:
        os.killpg(self._nursery.pid, signal.SIGKILL)
        self._nursery.communicate()
        self._log.close()


class Study:
    """What searches have in the database, read as one of them does."""

    def __init__(self, url: str) -> None:
        self._do = Persistent(url, 60.0, lambda text: None)
        self._storage = self._do(lambda: opened_shared(url, Patience(1)))

    def outcomes(self) -> tuple[Counter[Key], dict[Key, Outcome]]:
        """How often each candidate counts, and as what."""
        does, storage = self._do, self._storage
        id = max((s._study_id for s in does(storage.get_all_studies)), default=None)
        if id is None:
            return Counter(), {}
        rows = [r for r in rows_of(does(lambda: storage.get_all_trials(id))) if r.role == TRIAL]
        found = [each for row in rows for each in row.reported]
        return Counter(key for key, _ in found), dict(found)

    def close(self) -> None:
        close_shared(self._storage)


class Faults:
    """What happens to searches and their database."""

    def __init__(self, server: Postgres, searches: Searches, draw: random.Random) -> None:
        self._server, self._searches, self._draw = server, searches, draw

    def kill(self) -> None:
        """A search, which somebody starts again."""
        name = self._draw.choice(SEARCHES)
        self._searches.signal(name, signal.SIGKILL)
        self._searches.start(name)

    def stop(self) -> None:
        """A search, for longer than it may be silent."""
        name = self._draw.choice(SEARCHES)
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


@pytest.fixture
def server():
    """A server of its own: others must not meet its faults."""
    made = Postgres()
    yield made
    made.close()


# Of each kind once, in the order that the seed draws, or any.
@pytest.mark.parametrize(
    ("faults", "seed"), [(4, 0), pytest.param(50, 50, marks=pytest.mark.slow)], ids=("4", "50")
)
def test_only_trials_in_flight_are_lost(server, tmp_path, faults, seed, eventually):
    draw, url = random.Random(seed), with_driver(server.url)
    count = 2 * ROOM * (faults + 1)  # each may be ahead of what it has seen
    searches, study = Searches(url, tmp_path, count), Study(url)

    def wait_for(holds):
        eventually(lambda: searches.failed or holds(), "searches go on")
        assert not searches.failed, searches.log

    def more_than(before):
        time.sleep(0.1)  # else reading takes the searches' cores
        return len(study.outcomes()[1]) > before

    try:
        for name in SEARCHES:
            searches.start(name)
        wait_for(lambda: searches.joined == set(SEARCHES))
        happen = Faults(server, searches, draw)
        kinds = [happen.kill, happen.stop, happen.restart, happen.full]
        drawn = draw.sample(kinds, 4) if faults == 4 else draw.choices(kinds, k=faults)
        known: dict[Key, Outcome] = {}
        for fault in drawn:
            before = len(known)
            wait_for(lambda before=before: more_than(before))
            time.sleep(draw.uniform(0.0, 0.3))
            fault()
            counted, now = study.outcomes()
            assert known.items() <= now.items(), "what was found is still there"
            assert set(counted.values()) <= {1}, "nothing counts twice"
            known = now
            searches.let(len(known) + ROOM)
        assert len(known) + ROOM < count
        # One that joined after the others had their plan would begin the next search.
        wait_for(lambda: searches.joined == set(SEARCHES))
        searches.let(NO_END)
        wait_for(lambda: set(searches.plans) == set(SEARCHES))
        counted, found = study.outcomes()
    finally:
        searches.close()
        study.close()
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

        with pytest.raises(StorageLost, match="has failed for 30 s"):
            does(write)
    finally:
        server.empty()
        close_shared(storage)
