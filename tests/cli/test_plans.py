"""plans list, show, diff, rm."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from plantune.base.canonical import Attrs
from plantune.devices.machine import cpu_environment
from plantune.plans.database.plan_file import read_plan_file
from plantune.plans.plan import Plan

from .conftest import Run, changed, object_of


def test_without_plans_the_list_says_what_to_do(run: Run) -> None:
    result = run("plans", "list")
    assert result.exit_code == 0
    assert "plantune search" in result.stdout


def test_the_list_has_the_newest_complete_plan(
    run: Run, store: Callable[..., int], plan: Plan, fused_plan: Plan
) -> None:
    store(plan)
    newest = store(fused_plan)
    store(plan, partial=True)
    listed = object_of(run("plans", "list", "--json"))["plans"]
    assert [item["id"] for item in listed] == [newest]
    assert listed[0]["evidence"]["ratio"] == 0.5
    assert listed[0]["match"] == "exact"
    every = object_of(run("plans", "list", "--all", "--json"))["plans"]
    assert [item["status"] for item in every] == ["partial", "complete", "complete"]
    assert object_of(run("plans", "list", "--model", "resnet18", "--json"))["plans"] == []


def test_text_goes_to_stdout_and_has_no_escapes_without_a_terminal(
    run: Run, store: Callable[..., int], plan: Plan
) -> None:
    store(plan)
    result = run("plans", "list")
    assert result.stderr == ""
    assert "se_resnet9_fixup" in result.stdout
    assert "\x1b" not in result.stdout
    assert "se_resnet9_fixup   " not in run("plans", "list", "--json").stdout


def test_a_plan_is_shown_whole(run: Run, store: Callable[..., int], plan: Plan) -> None:
    there = replace(cpu_environment(), threads=99)
    id = store(plan, there)
    result = run("plans", "show", id, "--json")
    data = object_of(result)
    assert Plan.loads(__import__("json").dumps(data["plan"])) == plan
    assert data["environment"] == there.to_json()
    assert data["match"] == "compatible"
    assert "threads: 99 there" in run("plans", "show", id).stdout


def test_an_unknown_id_is_not_a_plan(run: Run) -> None:
    for command in (["show", "7"], ["rm", "7"], ["diff", "7", "8"], ["export", "7"]):
        result = run("plans", *command)
        assert result.exit_code == 3
        assert "7" in result.stderr


def test_a_diff_tells_steps_and_evidence(
    run: Run, store: Callable[..., int], plan: Plan, fused_plan: Plan
) -> None:
    first, second = store(plan), store(changed(fused_plan, evidence=plan.evidence))
    data = object_of(run("plans", "diff", first, second, "--json"))
    assert data["evidence"] == {}
    assert data["header"] == {}
    fused = {tuple(step["nodes"]) for step in data["only_second"]}
    assert fused == {c.nodes for c in fused_plan.choices} - {c.nodes for c in plan.choices}
    assert "no difference" in run("plans", "diff", first, first).stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_plan_goes_out_as_json(
    run: Run, store: Callable[..., int], plan: Plan, options: tuple[str, ...]
) -> None:
    assert Plan.loads(run("plans", "export", store(plan), *options).stdout) == plan


def test_a_plan_goes_into_a_file_that_plan_takes(
    run: Run, store: Callable[..., int], plan: Plan, fused_plan: Plan, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    result = run("plans", "export", store(plan), file, "--json")
    assert object_of(result) == {"file": str(file), "plan_id": 1}
    assert read_plan_file(file) == plan
    assert run("plans", "export", store(fused_plan), file).exit_code == 0
    assert read_plan_file(file) == fused_plan
    file.write_text("dear all")
    assert run("plans", "export", 1, file).exit_code == 4
    assert file.read_text() == "dear all"


def test_plans_are_removed_all_or_none(run: Run, store: Callable[..., int], plan: Plan) -> None:
    ids = [store(plan), store(plan), store(plan)]
    assert run("plans", "rm", ids[0], 99).exit_code == 3
    assert run("plans", "rm", ids[0], ids[1], ids[1]).exit_code == 0
    left = object_of(run("plans", "list", "--all", "--json"))["plans"]
    assert [item["id"] for item in left] == [ids[2]]


def test_another_database_can_be_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "odd näme #1?.db"
    assert object_of(run("plans", "list", "--db", path, "--json"))["database"] == str(path)


def test_a_database_of_a_later_release_is_refused(
    run: Run, store: Callable[..., int], plan: Plan, cache: Path
) -> None:
    store(plan)
    with closing(sqlite3.connect(cache / "plans.db")) as connection:
        connection.execute("UPDATE meta SET value = '99'")
        connection.commit()
    result = run("plans", "list", "--json")
    assert result.exit_code == 4
    assert object_of(result)["error"]["type"] == "NewerSchema"


def test_a_damaged_database_is_set_aside_with_a_warning(run: Run, cache: Path) -> None:
    cache.mkdir()
    (cache / "plans.db").write_bytes(b"no database at all " * 100)
    result = run("plans", "list")
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ")
    assert "was moved to" in result.stderr
    assert len(list(cache.glob("plans.db.damaged-*"))) == 1


def test_a_ratio_names_its_route_and_whether_a_compiler_was_met(
    run: Run, store: Callable[..., int], plan: Plan
) -> None:
    known = {**plan.evidence, "rivals": "eager"}
    met = {**known, "rivals": "eager,compile-default", "baseline": "compile-default"}
    ids = [
        store(changed(plan, evidence=Attrs(evidence))) for evidence in (plan.evidence, known, met)
    ]
    result = run("plans", "list", "--all")
    cells = {line.split()[0]: line.split()[7:9] for line in result.stdout.splitlines()}
    assert [cells[str(id)] for id in ids] == [
        ["0.500", "eager?"],
        ["0.500", "eager*"],
        ["0.500", "compile-default"],
    ]
    assert "* never raced against torch.compile" in result.stdout
    for id, words in zip(ids, ("is not known", "never raced", ""), strict=True):
        for command in (["plans", "show"], ["explain"]):
            assert words in run(*command, id).stdout
            assert "0.500 of" in run(*command, id).stdout
    listed = object_of(run("plans", "list", "--all", "--json"))["plans"]
    assert [item["met_compiled"] for item in listed] == [True, False, None]
