"""What is secret in the URL of a storage is in nothing that a command writes."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import sqlalchemy
from click.testing import Result

from plantune.cli.console import hidden
from plantune.search import studies
from plantune.search.results import SearchOptions

from ..conftest import FakeWorker, Run, start

KEY = ("--batch", 1, "--budget", 30)
SECRETS = ("S3CRET", "H1DDEN")
URLS = [
    "postgresql://me:S3CRET@127.0.0.1:1/none",
    "postgresql://me:S3CRET@H1DDEN@127.0.0.1:1/none",
    "me:S3CRET@H1DDEN@127.0.0.1",
    "postgresql:me:S3CRET@127.0.0.1/none",
    "postgresql://127.0.0.1:1/none?options=-csearch_path=S3CRET%20-cx=H1DDEN",
    "postgresql://127.0.0.1:S3CRET/none",
    "postgresql://127.0.0.1:1/none?S3CRET=H1DDEN",
    "mysql://H1DDEN:S3CRET@127.0.0.1:1/none",
    "oracle://me:S3CRET@127.0.0.1/none",
    "redis://me:S3CRET@127.0.0.1/0",
    "x y://me:S3CRET@127.0.0.1",
    "sqlite:////no/such/folder/x.db?key=S3CRET",
    "sqlite://me:S3CRET@/x.db",
]


def assert_clean(*texts: str) -> None:
    for text in texts:
        assert not any(secret in text.upper() for secret in SECRETS), text


def written(result: Result) -> str:
    assert result.exit_code in (1, 2), result.stderr
    return result.stdout + result.stderr


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, worker: FakeWorker) -> None:
    monkeypatch.setattr("plantune.cli.storage.AGAIN_S", 0.0)


@pytest.mark.parametrize("form", ["--storage URL", "--status URL", "--storage=URL", "URL"])
@pytest.mark.parametrize("url", URLS)
def test_no_error_shows_it(run: Run, url: str, form: str) -> None:
    arguments = form.replace("URL", url).split(" ", 1)
    result = run("search", *KEY, *arguments, "--json")
    assert_clean(written(result))


@pytest.mark.parametrize("url", URLS)
def test_none_shows_it_of_the_variable(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTUNE_STORAGE", url)
    assert_clean(written(run("search", *KEY, "--json")))


def test_a_fault_shows_its_trace_without_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        try:
            raise ConnectionError("no user me with S3CRET")
        except ConnectionError as error:
            raise ZeroDivisionError("postgresql://me:S3CRET@h/d, for H1DDEN@h") from error

    monkeypatch.setattr("plantune.cli.status.show_status", fail)
    result = run("search", "--status", "postgresql://me:S3CRET@H1DDEN@h/d", "--json")
    assert result.exit_code == 1
    assert_clean(result.stdout, result.stderr)
    assert "ZeroDivisionError" in result.stderr
    assert "Traceback" in result.stderr
    assert "test_storage_secrets.py" in result.stderr


def test_nor_does_the_trace_of_a_thread(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_elsewhere(*_: object, **__: object) -> None:
        def fail() -> None:
            raise ConnectionError("no user me with S3CRET")

        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()

    monkeypatch.setattr("plantune.cli.status.show_status", fail_elsewhere)
    before = threading.excepthook
    result = run("search", "--status", "postgresql://me:S3CRET@h/d")
    assert threading.excepthook is before
    assert_clean(result.stderr)
    assert "ConnectionError" in result.stderr


def test_nor_does_the_warning_of_a_storage_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://me:S3CRET@H1DDEN@h/d"
    monkeypatch.setattr(studies, "opened", lambda storage: None)
    monkeypatch.setattr(studies.optuna, "get_all_study_names", lambda storage: [])
    kept = studies.Studies(url, 0)
    error = sqlalchemy.exc.OperationalError("SELECT", {}, Exception("no host H1DDEN@h, S3CRET"))
    with pytest.warns(UserWarning, match="trials stay in memory") as caught:
        kept._give_up(error)
    assert_clean(str(caught[0].message))


def test_nor_do_the_settings_of_a_search() -> None:
    assert_clean(repr(SearchOptions(storage="postgresql://me:S3CRET@h/d")))


def test_a_command_without_a_url_hides_nothing(run: Run) -> None:
    run("search", "--status", "postgresql://me:S3CRET@h/d")
    assert hidden("me, S3CRET") == "me, S3CRET"


def test_what_python_itself_prints_has_none() -> None:
    url = "postgresql://me:S3CRET@H1DDEN@127.0.0.1:1/none"
    with start("search", "--status", url, "--json") as process:
        output, errors = process.communicate()
    assert process.returncode in (1, 2)
    assert_clean(output.decode(), errors.decode())


def test_a_missing_driver_is_told_without_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "psycopg", missing)
    assert_clean(written(run("search", *KEY, "--storage", URLS[1])))
