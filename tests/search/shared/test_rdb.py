"""Databases of Optuna's storages: what is repeated, and what is said of their faults."""

from __future__ import annotations

from types import SimpleNamespace

import optuna
import pytest
import sqlalchemy

from plantune.errors import StorageLost
from plantune.search.results import Patience
from plantune.search.shared.rdb import Persistent, opened_shared, with_driver

from .postgres import PASSWORD


def test_a_database_that_is_gone_ends_the_search_with_a_message(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    said = []
    url = f"postgresql+psycopg://me:{PASSWORD}@127.0.0.1:1/none"

    def sleep(seconds):
        clock.now += 10 * seconds

    does = Persistent(url, 30.0, said.append, lambda: clock.now, sleep)
    with pytest.raises(StorageLost, match="has failed for 30 s") as caught:
        does(lambda: opened_shared(url, Patience(1)))
    assert len(said) == 1
    assert PASSWORD not in said[0] + str(caught.value)


def test_a_connection_that_broke_is_told_of_and_not_what_was_refused_after_it():
    broke = sqlalchemy.exc.OperationalError("SELECT 1", {}, OSError("the server is gone"))
    broke.__cause__ = broke.orig
    refused = sqlalchemy.exc.PendingRollbackError("Can't reconnect until ...")
    refused.__context__ = broke
    error = optuna.exceptions.StorageInternalError("An exception is raised")
    error.__cause__ = refused
    assert Persistent("sqlite://", 1.0, print).reason(error) == "the server is gone"


def test_drivers_follow_from_the_extra():
    assert with_driver("postgresql://h/d") == "postgresql+psycopg://h/d"
    assert with_driver("mysql://h/d") == "mysql+pymysql://h/d"
    assert with_driver("mariadb://h/d") == "mysql+pymysql://h/d"
    assert with_driver("mariadb+mysqldb://h/d") == "mysql+mysqldb://h/d"
    assert with_driver("postgresql+pg8000://h/d") == "postgresql+pg8000://h/d"
