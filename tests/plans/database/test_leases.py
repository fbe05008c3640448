"""One search for a key at a time; who died holds nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from plantune.errors import Busy, DatabaseLocked
from plantune.plans.database import leases
from plantune.plans.database.plan_database import PlanDatabase

HOLD = """
database = PlanDatabase.open(path)
lease = database.acquire_lease("key")
print("held", flush=True)
sys.stdin.readline()
"""
Start = Callable[..., "subprocess.Popen[str]"]


def test_a_second_search_for_a_key_hears_who_holds_it(database: PlanDatabase) -> None:
    database.acquire_lease("key")
    with pytest.raises(Busy, match="a search for key runs already: process") as caught:
        database.acquire_lease("key")
    assert caught.value.host
    assert caught.value.pid > 0


def test_searches_for_different_keys_do_not_meet(database: PlanDatabase) -> None:
    with database.acquire_lease("key"), database.acquire_lease("another"):
        pass


def test_a_lease_is_free_after_its_end_whatever_ended_it(database: PlanDatabase) -> None:
    with pytest.raises(RuntimeError, match="the search failed"), database.acquire_lease("key"):
        raise RuntimeError("the search failed")
    database.acquire_lease("key").release()
    database.acquire_lease("key")


def test_releasing_gives_back_nothing_that_others_hold(database: PlanDatabase) -> None:
    old = database.acquire_lease("key")
    old.release()
    database.acquire_lease("key")
    old.release()
    with pytest.raises(Busy):
        database.acquire_lease("key")
    with pytest.raises(Busy):
        old.beat()


def test_a_living_process_keeps_its_lease_and_a_killed_one_loses_it(
    database: PlanDatabase, start: Start
) -> None:
    owner = start(HOLD, database.path)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    with pytest.raises(Busy) as caught:
        database.acquire_lease("key")
    assert caught.value.pid == owner.pid
    owner.kill()
    # Not waited for: a process that was killed but not yet buried holds nothing either.
    with database.wait_for_lease("key", 300, poll_s=0.01) as lease:
        lease.beat()


@pytest.mark.parametrize("column", ["process_start", "boot"])
def test_another_process_with_the_same_number_is_not_the_owner(
    database: PlanDatabase, column: str
) -> None:
    lease = database.acquire_lease("key")
    database._db.table("leases").update("key", {column: "1"})
    database.acquire_lease("key")
    with pytest.raises(Busy):
        lease.beat()


@pytest.mark.parametrize("pid", ["", "-1", "none", None])
def test_a_lease_without_sense_belongs_to_no_one(database: PlanDatabase, pid: str | None) -> None:
    database.acquire_lease("key")
    database._db.table("leases").update("key", {"pid": pid})
    database.acquire_lease("key")


class Clock:
    """One that moves when somebody sleeps; `wake` is what happens meanwhile."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.wake: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.wake()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    return clock


def test_waiting_ends_with_the_lease_or_in_time(database: PlanDatabase, clock: Clock) -> None:
    lease = database.acquire_lease("key")
    with pytest.raises(Busy):
        database.wait_for_lease("key", 5, poll_s=1)
    assert clock.now_s == 5
    clock.wake = lease.release
    database.wait_for_lease("key", 5, poll_s=1).release()
    assert clock.now_s == 6


def test_an_owner_on_another_host_is_judged_by_its_heartbeat(
    database: PlanDatabase, clock: Clock
) -> None:
    owner = database.acquire_lease("key")
    database._db.table("leases").update("key", {"host": "another", "boot": "another"})

    def owner_beats() -> None:
        row = {"host": "another", "heartbeat": f"{clock.now_s}"}
        database._db.table("leases").update("key", row)

    clock.wake = owner_beats
    with pytest.raises(Busy):
        database.wait_for_lease("key", 3 * leases.SILENCE_S, poll_s=leases.SILENCE_S / 4)
    assert clock.now_s == 3 * leases.SILENCE_S
    clock.wake = lambda: None
    database.wait_for_lease("key", 3 * leases.SILENCE_S, poll_s=leases.SILENCE_S / 4)
    assert leases.SILENCE_S < clock.now_s - 3 * leases.SILENCE_S < 2 * leases.SILENCE_S
    with pytest.raises(Busy):
        owner.beat()


def test_a_database_that_fails_at_the_end_does_not_hide_the_result(
    database: PlanDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = database.acquire_lease("key")

    def fail() -> None:
        raise DatabaseLocked("by another process")

    monkeypatch.setattr(lease, "release", fail)
    with lease:
        pass
