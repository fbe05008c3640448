"""A real search by the command line, short as it is, and one that is stopped half-way."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from plantune.plans.database.plan_database import PlanDatabase
from plantune.search.session import key_of

from .conftest import Run, object_of, start

pytestmark = pytest.mark.usefixtures("copied_processes")


def started(eventually: Callable[..., object], path: Path, network: list[object]) -> Popen[bytes]:
    """A search that has measured something."""
    process = start("search", *network, "--batch", 1, "--db", path, "--json")

    def has_measured() -> bool:
        assert process.poll() is None, process.communicate()[1].decode()
        return path.exists() and _trials(path) > 0

    eventually(has_measured, "nothing was measured")
    return process


def _trials(path: Path) -> int:
    from sqlite_utils import Database

    database = Database(path)
    count = database["trials"].count if "trials" in database.table_names() else 0
    database.close()
    return int(count)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_stopped_search_saves_a_partial_plan(
    tmp_path: Path,
    small_network: list[object],
    number: signal.Signals,
    eventually: Callable[..., object],
) -> None:
    path = tmp_path / "plans.db"
    process = started(eventually, path, small_network)
    process.send_signal(number)
    output, errors = process.communicate()
    assert process.returncode == 7, errors
    assert b"Traceback" not in errors
    assert json.loads(output)["complete"] is False
    with PlanDatabase.open(path) as database:
        (stored,) = database.plans()
    assert stored.status == "partial"
    # Nobody holds the lease any more.
    with PlanDatabase.open(path) as database:
        database.acquire_lease(key_of(stored.plan.problem)).release()


@pytest.mark.slow
def test_search_then_bench_explain_verify_and_profile(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plans.db"
    common = ["--batch", 1, "--db", path, "--json"]
    found = object_of(run("search", "--budget", 20, *common))
    assert found["complete"] is True
    bench = object_of(run("bench", "--budget", 2, "--peers", "eager", *common))
    assert bench["ratio"] > 0
    assert any(step["measured"] for step in object_of(run("explain", *common))["steps"])
    assert object_of(run("verify", "--budget", 1, *common))["ratio"]["ratio"] > 0
    assert object_of(run("profile", *common))["framework_us"] > 0
    assert object_of(run("search", "--dry-run", *common))["known"] >= found["measured"]
