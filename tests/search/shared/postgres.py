"""A PostgreSQL of one's own, in a folder of its own: started, restarted, stopped.

It refuses to run as root, where it runs as another user. `PLANTUNE_TEST_POSTGRES` names a folder
with the server's programs, else it is the system's. Without any, tests that need it are skipped and
say so, unless `PLANTUNE_TEST_NEEDS` has the word postgres, as in CI where there is a server: then
they fail.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

PASSWORD = "s3cr3t-pw"
START_S = 60.0
SERVER = "no PostgreSQL server here: install one (apt install postgresql)"
DRIVER = "no driver of PostgreSQL here: pip install 'plantune[storage]'"


def programs() -> Path | None:
    """The folder with `initdb` and `postgres`."""
    named = os.environ.get("PLANTUNE_TEST_POSTGRES")
    found = shutil.which("postgres")
    places = [Path(named)] if named else []
    places += [Path(found).parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").exists()), None)


def require() -> Path:
    place = programs()
    if place is not None and importlib.util.find_spec("psycopg") is not None:
        return place
    missing = SERVER if place is None else DRIVER
    if "postgres" in os.environ.get("PLANTUNE_TEST_NEEDS", ""):
        pytest.fail(missing)
    pytest.skip(missing)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(word) for word in text.split()]
    return []


class Postgres:
    """A server on a port of its own, whose disk may be full."""

    def __init__(self, folder: Path | None = None, *, durable: bool = False) -> None:
        self._durable = durable
        self._programs = require()
        self._user = self._account()
        self.folder = folder or Path(tempfile.mkdtemp(prefix="plantune-postgres-"))
        self._data = self.folder / "data"
        if self._user is not None:
            account = pwd.getpwnam(self._user)
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = self.folder / "password"
        words.write_text(PASSWORD)
        words.chmod(0o644)
        options = ["-U", "plantune", "-A", "scram-sha-256", "--pwfile", str(words), "--no-sync"]
        self._run("initdb", "-D", str(self._data), *options)
        self._server: subprocess.Popen[bytes] | None = None
        self.start()

    @staticmethod
    def _account() -> str | None:
        """As whom the server runs, None as this user."""
        if os.geteuid() != 0:
            return None
        names = {entry.pw_name for entry in pwd.getpwall()}
        return next(name for name in ("postgres", "nobody") if name in names)

    @property
    def url(self) -> str:
        return f"postgresql://plantune:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "on" if self._durable else "off",
            "max_connections": "200",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [str(self._programs / "postgres"), "-D", str(self._data), *options]
        # Of one that is gone; a full disk leaves it empty, and the server would not start.
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        log = open(self.folder / "log", "ab")  # noqa: SIM115 - the server's
        with log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log, **self._as())
        self._await()

    def _await(self) -> None:
        end = time.monotonic() + START_S
        place = self._data / "postmaster.pid"
        while not place.exists() or ["", *place.read_text().split()][-1] != "ready":
            assert time.monotonic() < end, (self.folder / "log").read_text()
            assert self._server is not None
            assert self._server.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        """At once, as when a host goes down: it recovers when it starts again."""
        assert self._server is not None
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait(START_S)

    def restart(self) -> None:
        self.stop()
        self.start()

    def fill(self) -> None:
        """From now on no file of the server grows, as on a full disk."""
        self._limit("0")

    def empty(self) -> None:
        """There is room again; a server that gave up, or does so yet, is started anew."""
        assert self._server is not None
        self._limit("unlimited")
        end = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < end, (self.folder / "log").read_text()
            if self._server.poll() is not None:
                self.start()
            time.sleep(0.05)

    def _answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.url, connect_timeout=10).close()
            return True
        return False

    def _limit(self, size: str) -> None:
        """For the server first, so that those that it starts meanwhile have it, then for them."""
        assert self._server is not None
        self._limit_one(self._server.pid, size)
        for pid in _children(self._server.pid):
            self._limit_one(pid, size)

    def _limit_one(self, pid: int, size: str) -> None:
        command = ["prlimit", "--pid", str(pid), f"--fsize={size}:"]
        done = subprocess.run(command, capture_output=True, check=False, **self._as())
        assert done.returncode == 0 or not Path(f"/proc/{pid}").exists(), done.stderr

    def close(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _as(self) -> dict[str, object]:
        if self._user is None:
            return {"start_new_session": True}
        account = pwd.getpwnam(self._user)
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        return {**user, "start_new_session": True, "cwd": "/"}

    def _run(self, program: str, *options: str) -> None:
        command = [str(self._programs / program), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, **self._as())
        assert done.returncode == 0, done.stderr
