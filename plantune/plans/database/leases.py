"""Leases: one search for a key at a time, even if a holder dies without giving its lease back."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from plantune.devices.host import process_fields
from plantune.errors import Busy, DatabaseUnavailable
from plantune.plans.database.opening import now_text
from plantune.plans.database.rows import select

Writing = Callable[[], AbstractContextManager[Database]]
# An owner on another host counts as dead when its heartbeat has not changed for this long.
SILENCE_S = 120.0


class Lease:
    """The right to search for a key. Give it back by `release` or as a context manager.

    `beat` changes the heartbeat: owners on other hosts judge by it whether this one lives.
    """

    def __init__(self, key: str, writing: Writing) -> None:
        self.key = key
        self._writing = writing
        self._token = secrets.token_hex(8)

    def acquire(self, silent: str | None = None) -> None:
        """Raises Busy if a living owner has it; `silent` is a heartbeat that stood still."""
        with self._writing() as db:
            owner = _owner(db, self.key)
            if owner is not None and _is_alive(owner, silent):
                raise _busy(self.key, owner)
            db.table("leases").insert(self._row(), replace=True)

    def beat(self) -> None:
        """Raises Busy if another search has taken the lease over."""
        with self._writing() as db:
            owner = _owner(db, self.key)
            if owner is not None and owner["token"] != self._token:
                raise _busy(self.key, owner)
            db.table("leases").insert(self._row(), replace=True)

    def release(self) -> None:
        with self._writing() as db:
            db.table("leases").delete_where("key = ? and token = ?", [self.key, self._token])

    def _row(self) -> dict[str, str]:
        here = {"host": _host(), "boot": _boot(), "heartbeat": now_text()}
        process = {"pid": str(os.getpid()), "process_start": _process_start(os.getpid()) or ""}
        return {"key": self.key, "token": self._token, **process, **here}

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(DatabaseUnavailable):  # when the process has ended, the lease is free
            self.release()


def wait_for_lease(lease: Lease, timeout_s: float, poll_s: float) -> None:
    """Acquires it, or raises Busy when `timeout_s` have passed."""
    deadline = time.monotonic() + timeout_s
    heartbeat, since = None, time.monotonic()
    while True:
        silent = heartbeat if time.monotonic() - since > SILENCE_S else None
        try:
            return lease.acquire(silent)
        except Busy as busy:
            if time.monotonic() >= deadline:
                raise
            if busy.heartbeat != heartbeat:
                heartbeat, since = busy.heartbeat, time.monotonic()
        time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))


def _owner(db: Database, key: str) -> dict[str, Any] | None:
    return next(iter(select(db.conn, "leases", {"key": key})), None)


def _busy(key: str, owner: dict[str, Any]) -> Busy:
    return Busy(
        f"a search for {key} runs already: process {owner['pid']} on {owner['host']}, "
        f"seen at {owner['heartbeat']}; wait for it or end it",
        pid=int(owner["pid"]),
        host=str(owner["host"]),
        heartbeat=str(owner["heartbeat"]),
    )


def _is_alive(owner: dict[str, Any], silent: str | None) -> bool:
    """Whether the owner still runs; a malformed row belongs to no owner."""
    if not str(owner["pid"]).isdecimal():
        return False
    if owner["host"] != _host():
        return silent is None or str(owner["heartbeat"]) != silent
    started = _process_start(int(owner["pid"]))
    return bool(owner["boot"] == _boot() and owner["process_start"] == started)


@cache
def _host() -> str:
    """The name of the host, and which processes can be seen from here: containers differ."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _process_start(pid: int) -> str | None:
    """When a process started, which tells it from a later one of the same number."""
    fields = process_fields(pid)
    return None if fields[:1] in ([], ["Z"]) else fields[19]
