"""export and import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.plan import Plan

from .conftest import Run, object_of


def test_a_plan_goes_out_and_comes_in_again(
    run: Run, store: Callable[..., int], plan: Plan, tmp_path: Path
) -> None:
    store(plan)
    file, other = tmp_path / "shared" / "cpu.db", tmp_path / "other.db"
    out = run("export", file, "--json")
    assert out.exit_code == 0
    assert object_of(out)["plans"][0]["network"] == plan.problem.network
    result = run("import", file, "--db", other, "--json")
    assert result.exit_code == 0
    assert len(object_of(result)["plans"]) == 1
    with PlanDatabase.open(other) as database:
        assert [item.plan for item in database.plans()] == [plan]


def test_the_arch_follows_from_the_name_of_the_file(
    run: Run, store: Callable[..., int], plan: Plan, tmp_path: Path
) -> None:
    store(plan)
    assert run("export", tmp_path / "sm90.db").exit_code == 3
    assert run("export", tmp_path / "sm90.db", "--arch", "cpu").exit_code == 0
    assert run("export", tmp_path / "x.db", "--model", "resnet18").exit_code == 3


def test_another_file_is_not_written_over(
    run: Run, store: Callable[..., int], plan: Plan, tmp_path: Path
) -> None:
    store(plan)
    (tmp_path / "letter.txt").write_text("dear all")
    result = run("export", tmp_path / "letter.txt")
    assert result.exit_code == 4
    assert "was not overwritten" in result.stderr
    assert (tmp_path / "letter.txt").read_text() == "dear all"


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0" + b"\1" * 4096, b"x" * 2000])
def test_what_is_not_an_export_is_refused_with_4_and_leaves_nothing(
    run: Run, tmp_path: Path, cache: Path, content: bytes
) -> None:
    (tmp_path / "bad.db").write_bytes(content)
    result = run("import", tmp_path / "bad.db", "--json")
    assert result.exit_code == 4
    assert str(tmp_path / "bad.db") in object_of(result)["error"]["message"]
    assert not cache.exists()
    assert run("import", tmp_path / "bad.db", "--db", tmp_path / "new.db").exit_code == 4
    assert [path.name for path in tmp_path.iterdir()] == ["bad.db"]


def test_a_link_is_refused_with_4_and_a_missing_file_is_wrong_usage(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "link.db").symlink_to("/etc/passwd")
    assert run("import", tmp_path / "link.db").exit_code == 4
    assert run("import", tmp_path / "nowhere.db").exit_code == 2


def test_import_into_a_database_that_cannot_be_written_fails(
    run: Run, store: Callable[..., int], plan: Plan, tmp_path: Path
) -> None:
    store(plan)
    run("export", tmp_path / "cpu.db")
    (tmp_path / "file").write_text("")
    result = run("import", tmp_path / "cpu.db", "--db", tmp_path / "file" / "plans.db")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
