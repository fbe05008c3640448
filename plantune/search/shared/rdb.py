"""The databases of Optuna's storages: how they are opened, and their faults."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import optuna
import sqlalchemy

from plantune.base.storage_urls import shown, without_secrets
from plantune.errors import StorageLost
from plantune.search.results import Patience

T = TypeVar("T")
_opening = threading.Lock()
# What is raised for a text that is no URL; the second one for a port that is no number.
NO_URL = (sqlalchemy.exc.ArgumentError, ValueError)
FAULTS = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError)
# What `plantune[storage]` installs, where a URL names no driver.
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
# A search that is stopped in the middle of a transaction, or whose host is gone, would hold the
# study's lock, so the server drops silent transactions. MySQL can only drop idle connections, which
# Optuna tests before it uses them again.
LIMITS = {
    "postgresql": "SET idle_in_transaction_session_timeout = '{s}s'",
    "mysql": "SET SESSION wait_timeout = {s}, innodb_lock_wait_timeout = {s}",
}
AGAIN_S = 0.2


def with_driver(url: str) -> str:
    """The URL with the driver that plantune's extra installs, if it names none. MariaDB is named
    MySQL: Optuna writes its statements for MySQL by that name alone.
    """
    name, separator, rest = url.partition("://")
    dialect, plus, driver = name.partition("+")
    name = f"mysql{plus}{driver}" if dialect == "mariadb" else name
    return f"{DRIVERS.get(name, name)}{separator}{rest}"


def is_shareable(url: str) -> bool:
    """Whether several processes can use what is at a URL at once."""
    try:
        parsed = sqlalchemy.make_url(url)
    except NO_URL:
        return False
    if parsed.get_backend_name() == "sqlite":
        return parsed.database not in (None, "", ":memory:")
    return parsed.get_backend_name() in DRIVERS


def opened_shared(url: str, patience: Patience) -> optuna.storages.BaseStorage:
    """Optuna's storage at a URL, which knows for how long a search was silent."""
    # What it warns of, a statement that failed, is repeated here.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    engine: dict[str, Any] = {}
    if url.startswith("sqlite"):
        engine = {"poolclass": sqlalchemy.pool.NullPool}
    with _opening, warnings.catch_warnings():  # whose filters are those of all threads
        warnings.simplefilter("ignore")  # Optuna calls heartbeats experimental
        # Two that make the tables at once disturb each other: without a pool nothing stays open.
        optuna.storages.RDBStorage(url, {**engine, "poolclass": sqlalchemy.pool.NullPool})
        storage = optuna.storages.RDBStorage(
            url,
            engine,
            skip_compatibility_check=True,
            skip_table_creation=True,
            heartbeat_interval=patience.heartbeat_s,
            grace_period=patience.silent_s,
        )
    limits = LIMITS.get(storage.engine.name, "").format(s=patience.silent_s)
    if limits:
        sqlalchemy.event.listen(storage.engine, "connect", lambda made, _: _execute(made, limits))
        storage.engine.dispose()  # it was connected without them
    return optuna.storages.get_storage(storage)


def _execute(connection: Any, statement: str) -> None:
    cursor = connection.cursor()
    cursor.execute(statement)
    cursor.close()
    connection.commit()


def close_shared(storage: optuna.storages.BaseStorage) -> None:
    """Closes the connections that `opened_shared` made: Optuna never does."""
    backend: Any = getattr(storage, "_backend", storage)
    backend.scoped_session.remove()
    backend.engine.dispose()


def _deeper(error: BaseException) -> BaseException | None:
    if isinstance(error, sqlalchemy.exc.PendingRollbackError):
        return error.__context__
    return error.__cause__


class Persistent:
    """Repeats what a database refuses, until it was gone for too long: a restart loses nothing.

    Repeated work may already have been done, so callers pass only what is safe to do twice.
    """

    def __init__(
        self,
        url: str,
        gone_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url = url
        self._gone_s = gone_s
        self._say = say
        self._clock = clock
        self._sleep = sleep

    def __call__(self, work: Callable[[], T]) -> T:
        """Raises StorageLost."""
        since, first = 0.0, ""
        while True:
            try:
                return work()
            except FAULTS as error:
                why = self.reason(error)
                if not first:
                    since, first = self._clock(), why
                    self._say(f"{shown(self._url)}: {why}; waiting up to {self._gone_s:.0f} s")
                if self._clock() - since > self._gone_s:
                    last = "" if why == first else f"; at last: {why}"
                    raise StorageLost(
                        f"{shown(self._url)}: has failed for {self._gone_s:.0f} s: {first}{last}. "
                        "What was measured is kept: once the database works, search again"
                    ) from None
                self._sleep(AGAIN_S)

    def reason(self, error: BaseException) -> str:
        """What a driver says, in a line: Optuna's own words are of commits in general, and it asks
        once more where a connection broke, which SQLAlchemy refuses.
        """
        while (deeper := _deeper(error)) is not None:
            error = deeper
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return without_secrets(lines[0], self._url)
