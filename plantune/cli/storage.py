"""Where a search lets Optuna keep its trials: the place that was named, else beside the plans."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import click

from plantune.cli.console import say
from plantune.plan_db.opening import dated


def storage_for(named: str | None, database: Path | None, seed: int) -> str | None:
    """The URL of a storage that opens, None where trials are kept in memory.

    Raises BadParameter where the named one does not open. The file beside the plan database is set
    aside where it is damaged: the database has every outcome, so nothing is lost for a search.
    """
    from plantune.search.proposals import storage_url

    if named is not None:
        reason = _why_not(named, seed)
        if reason is not None:
            raise click.BadParameter(f"{named!r}: {reason}", param_hint="'--storage'")
        return named
    if database is None:
        return None
    path = database.absolute().with_name("optuna.db")
    url = storage_url(path)
    reason = _why_not(url, seed)
    if reason is not None and is_damaged(path):
        aside = dated(path, "damaged")
        os.rename(path, aside)
        say(f"warning: {path}: Optuna cannot use it: {reason}. It was moved to {aside.name}.")
        reason = _why_not(url, seed)
    if reason is None:
        return url
    say(f"warning: {url}: Optuna cannot use it, its trials are kept in memory: {reason}")
    return None


def is_damaged(path: Path) -> bool:
    """Whether a file is no sound database; one that is locked or cannot be read is not judged."""
    try:
        with closing(sqlite3.connect(path.as_uri() + "?mode=ro", uri=True)) as connection:
            return bool(connection.execute("PRAGMA quick_check").fetchone() != ("ok",))
    except sqlite3.OperationalError:
        return False
    except sqlite3.DatabaseError:
        return True


def _why_not(url: str, seed: int) -> str | None:
    """Why Optuna cannot use a storage, None where it can."""
    from plantune.search.proposals import Ledger

    try:
        Ledger(url, seed)
    except Exception as error:  # Whatever Optuna, SQLAlchemy or a driver says of a place.
        return str(error).partition("\n")[0]
    return None
