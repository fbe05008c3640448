"""Where a search lets Optuna keep its trials: the place that was named, else beside the plans."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import click

from plantune.base.storage_urls import shown, without_secrets
from plantune.cli.console import note
from plantune.errors import InvalidDatabase
from plantune.plans.database.opening import dated
from plantune.plans.database.recognition import is_in_use, is_own, looked_into, why_no_database

# What Python and Optuna say where the driver of a database is not installed.
NO_DRIVER = ("No module named", "halted; None in sys.modules", "DB access module")
DRIVERS = "pip install 'plantune[storage]' brings the drivers of PostgreSQL and MySQL"
# Of the tables that Optuna makes, those that every release of it has.
OPTUNAS = {"studies", "trials", "version_info"}
# Searches that begin at once in an empty database make its tables beside each other, and all but
# one of them are refused.
TRIES, AGAIN_S = 5, 0.2


def storage_for(named: str | None, database: Path | None, seed: int) -> str | None:
    """The URL of a storage that opens, None if trials are kept in memory.

    Raises BadParameter if the named one does not open, and InvalidDatabase if it is a file of
    another program. The file beside the plan database is set aside if it is damaged and in
    plantune's cache folder: the database has every outcome, so nothing is lost for a search.
    """
    from plantune.search.shared.rdb import with_driver
    from plantune.search.studies import storage_url

    if named is not None:
        return _named(with_driver(named), seed)
    if database is None:
        return None
    path = _beside(database)
    url = storage_url(path)
    reason = why_not_optunas(path) or _why_not(url, seed)
    if reason is not None and is_own(database) and is_damaged(path):
        aside = dated(path, "damaged")
        os.rename(path, aside)
        note(f"warning: {path}: Optuna cannot use it: {reason}. It was moved to {aside.name}.")
        reason = _why_not(url, seed)
    if reason is None:
        return url
    note(f"warning: {url}: Optuna cannot use it, its trials are kept in memory: {reason}")
    return None


def _beside(database: Path) -> Path:
    """Beside a database that an option named, `optuna.db` may well be the user's."""
    name = "optuna.db" if is_own(database) else f"{database.stem}.optuna.db"
    return database.absolute().with_name(name)


def _named(url: str, seed: int) -> str:
    path = _file_of(url)
    fault = None if path is None else why_not_optunas(path)
    if fault is not None:
        raise InvalidDatabase(
            f"{path}: is not a storage of Optuna ({fault}) and was left as it is; "
            "give another --storage"
        )
    reason = _why_not(url, seed)
    if reason is not None:
        raise _bad(url, reason, "--storage")
    return url


def required_shareable(named: str, option: str) -> str:
    """The URL of a database that searches can share; raises BadParameter for any other."""
    import sqlalchemy

    from plantune.search.shared.rdb import NO_URL, is_shareable, with_driver

    url = with_driver(named)
    if not is_shareable(url):
        raise _bad(url, "give the URL of a PostgreSQL, a MySQL or an SQLite file", option)
    try:
        sqlalchemy.make_url(url).get_dialect().import_dbapi()
    except (ImportError, *NO_URL) as error:
        raise _bad(url, str(error), option) from error
    return url


def _bad(url: str, reason: str, option: str) -> click.BadParameter:
    """Nothing secret of the URL is shown, nor what a driver says of it."""
    if "://" not in url:
        reason = "a URL begins with postgresql://, mysql:// or sqlite:///"
    hint = f"; {DRIVERS}" if any(word in reason for word in NO_DRIVER) else ""
    text = f"{shown(url)!r}: {without_secrets(reason, url)}{hint}"
    return click.BadParameter(text, param_hint=f"'{option}'")


def _file_of(url: str) -> Path | None:
    """The file that SQLite would open for a URL, None if it is in memory or no SQLite's."""
    import sqlalchemy

    from plantune.search.shared.rdb import NO_URL

    try:
        parsed = sqlalchemy.make_url(url)
    except NO_URL:
        return None
    name = (parsed.database or "").removeprefix("file:").partition("?")[0]
    sqlite = parsed.get_backend_name() == "sqlite"
    return Path(name) if sqlite and name not in ("", ":memory:") else None


def why_not_optunas(path: Path) -> str | None:
    """Why a file is none in which Optuna may write, None if it is missing, empty or Optuna's.

    Nothing is written, and no lock is waited for.
    """
    fault = why_no_database(path)
    if fault is not None or not os.path.exists(path) or not os.path.getsize(path):
        return fault
    try:
        with looked_into(path) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        return None if is_in_use(path) else str(error)
    return None if not tables or tables >= OPTUNAS else "it is a database of another program"


def is_damaged(path: Path) -> bool:
    """Whether a file is not even a sound database of another program. One that another process
    holds is not judged.
    """
    if not path.is_file() or is_in_use(path):
        return False
    if why_no_database(path) is not None:
        return True
    try:
        with looked_into(path) as connection:
            return bool(connection.execute("PRAGMA quick_check").fetchone() != ("ok",))
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return True


def _why_not(url: str, seed: int) -> str | None:
    """Why Optuna cannot use a storage, None if it can."""
    from plantune.search.studies import Studies

    reason = None
    for number in range(TRIES):
        time.sleep(AGAIN_S if number else 0)
        try:
            Studies(url, seed)
        except Exception as error:  # Whatever Optuna, SQLAlchemy or a driver says of a place.
            reason = str(error).partition("\n")[0]
            if not _was_made_by_another(error):
                return reason
        else:
            return None
    return reason


def _was_made_by_another(error: Exception) -> bool:
    """Whether a database refused tables that another search made at the same time."""
    from sqlalchemy.exc import IntegrityError, ProgrammingError

    return isinstance(error, (IntegrityError, ProgrammingError)) or "already exists" in str(error)
