"""search --storage, --status: what a user sees of shared searches, and never a password."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy

from plantune.search.results import Patience
from plantune.search.shared.rdb import is_shareable

from .conftest import FakeWorker, Run, object_of

PASSWORD = "s3cr3t-pw"
KEY = ("--arch", "cpu", "--batch", 1, "--budget", 30, "--no-shipped")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shared.db"


def test_a_search_shares_what_it_finds_and_its_status_tells(
    run: Run, worker: FakeWorker, url: str
) -> None:
    first = object_of(run("search", *KEY, "--storage", url, "--heartbeat", 1, "--json"))
    assert first["raced"]
    assert not first["elsewhere"]
    (seen,) = object_of(run("search", "--status", url, "--json"))["searches"]
    assert seen["state"] == "done"
    assert seen["measured"] == first["measured"]
    (member,) = seen["members"]
    assert member["state"] == "ended"
    # As every release writes it.
    assert {*member} == {"host", "pid", "state", "measured", "told"}
    text = run("search", "--status", url).stdout
    assert f"{first['measured']} measured" in text
    assert "done" in text


def test_a_database_that_stays_full_ends_a_search_with_what_it_has(
    run: Run, worker: FakeWorker, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patience, "gone_s", 0.0)
    real, told = optuna.storages.RDBStorage.set_trial_user_attr, []

    def fills(self: Any, trial_id: int, key: str, value: Any) -> None:
        told.append(key)
        if sum(key.startswith("outcome") for key in told) > 3:
            raise sqlalchemy.exc.OperationalError("INSERT", {}, OSError("No space left on device"))
        real(self, trial_id, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.storages.RDBStorage, "set_trial_user_attr", fills)
        result = run("search", *KEY, "--storage", url, "--json")
    assert result.exit_code == 1
    message = object_of(result)["error"]["message"]
    assert "has failed for 0 s: " in message
    assert "No space left on device" in message
    assert "What was measured is kept" in message
    assert "the best plan so far is kept as partial" in result.stderr
    assert [p["status"] for p in object_of(run("plans", "list", "--all", "--json"))["plans"]] == [
        "partial"
    ]
    # The next one goes on from there, and nobody is waited for.
    again = object_of(run("search", *KEY, "--storage", url, "--json"))
    assert again["raced"]


def test_a_storage_that_nobody_shared_is_empty(run: Run, url: str) -> None:
    assert object_of(run("search", "--status", url, "--json"))["searches"] == []
    assert "no search was shared there" in run("search", "--status", url).stdout


def test_a_status_is_of_the_variables_storage_unless_one_is_named(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no password is in the list of processes."""
    assert run("search", "--status").exit_code == 2
    monkeypatch.setenv("PLANTUNE_STORAGE", url)
    for arguments in (("--status", "--json"), ("--json", "--status")):
        assert object_of(run("search", *arguments))["searches"] == []


@pytest.mark.parametrize("option", ["--storage", "--status"])
def test_no_password_is_shown_where_no_database_answers(run: Run, option: str) -> None:
    pytest.importorskip("psycopg")
    url = f"postgresql://me:{PASSWORD}@127.0.0.1:1/none"
    result = run("search", *KEY, option, url)
    assert result.exit_code in (1, 2)
    assert "postgresql+psycopg://127.0.0.1/none" in result.stderr
    assert PASSWORD not in result.output + result.stderr


@pytest.mark.parametrize("option", ["--storage", "--status"])
def test_a_missing_driver_is_named_with_what_brings_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    result = run("search", *KEY, option, f"postgresql://me:{PASSWORD}@h/d")
    assert result.exit_code == 2
    assert "pip install 'plantune[storage]'" in result.stderr
    assert PASSWORD not in result.stderr


@pytest.mark.parametrize("url", ["redis://h/0", "sqlite://", "nothing", f"x://me:{PASSWORD}@h"])
def test_only_a_database_that_several_can_use_has_a_status(run: Run, url: str) -> None:
    result = run("search", "--status", url)
    assert result.exit_code == 2
    assert PASSWORD not in result.stderr
    assert not is_shareable(url)
