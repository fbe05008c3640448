"""tools/training_plans.py: searches one after the other, and no other plan of the file is lost."""

from __future__ import annotations

import json
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from plantune.base.canonical import Attrs
from plantune.base.paths import data_folder
from plantune.plans.database.exports import export_plans, import_plans, read_export
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.guess import framework_plan
from plantune.plans.workload import Workload
from plantune.space.search_space import load_search_space

from ..conftest import ROOT

EVIDENCE = Attrs({"ratio": 0.5, "ratio_low": 0.4, "ratio_high": 0.6, "median_ms": 1.0})


@pytest.fixture
def tool():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "training_plans.py")))


@pytest.fixture
def file(tmp_path):
    return Path(shutil.copy(data_folder("plans") / "cpu.db", tmp_path / "cpu.db"))


@pytest.fixture
def commands(tool, tmp_path):
    """Plays `plantune`: a search finds the framework's plan of a small network."""
    workload = Workload("se_resnet9_fixup", 1, 3, "train", "float32", "cpu", image_size=16)
    asked, raced = [], [True]

    def found(opened, environment):
        plan = framework_plan(workload.graph, load_search_space("cpu"), network=workload.network)
        opened.put_plan(replace(plan, origin="measured", evidence=EVIDENCE), environment)
        return json.dumps({**dict.fromkeys(tool.TOLD), "raced": raced[0]})

    def plantune(command, *arguments):
        asked.append((command, *map(str, arguments)))
        with PlanDatabase.open(tmp_path / "work.db") as opened:
            if command == "import":
                import_plans(arguments[0], opened)
            elif command == "search":
                return found(opened, opened.plans()[0].environment)
            else:
                export_plans(opened, arguments[0], "cpu")
        return ""

    tool.main.__globals__.update(plantune=plantune, workloads=lambda arch, dtype: [workload])
    return SimpleNamespace(asked=asked, raced=raced)


def run(tool, tmp_path, file):
    return tool.main(["--db", str(tmp_path / "work.db"), "--file", str(file), "--only", "1"])


def test_the_plan_that_was_found_is_added(tool, commands, tmp_path, file, capsys):
    before = {row.plan for row in read_export(file)}
    assert run(tool, tmp_path, file) == 0
    after = {row.plan for row in read_export(file)}
    assert before < after
    assert len(after - before) == 1
    assert json.loads(capsys.readouterr().out)["lost"] == []
    assert [command for command, *_ in commands.asked] == ["import", "search", "export"]
    (searched,) = (each for each in commands.asked if each[0] == "search")
    assert "--mode train --dtype float32 --image-size 16" in " ".join(searched)


def test_without_a_race_nothing_is_written(tool, commands, tmp_path, file):
    commands.raced[0] = False
    before = file.read_bytes()
    assert run(tool, tmp_path, file) == 1
    assert file.read_bytes() == before


def test_a_plan_that_is_gone_or_another_one_is_told(tool, file):
    rows = read_export(file)
    first = rows[0]
    second = next(row for row in rows if row.plan.problem.graph != first.plan.problem.graph)
    rest = [row for row in rows if row not in (first, second)]
    other = replace(second, plan=replace(second.plan, branches=not second.plan.branches))
    assert tool.changed(rows, rows, "none") == []
    assert tool.changed(rows, [first, other, *rest], "none") == [str(second.plan.problem)]
    assert tool.changed(rows, rest, first.plan.problem.graph) == [str(second.plan.problem)]


def test_the_three_problems_are_those_of_the_reference_networks(tool):
    found = [(w.network, w.batch, w.in_channels, w.image_size) for w in tool.workloads("sm90", "f")]
    assert found == [
        ("se_resnet9_fixup", 2048, 3, None),
        ("resnet50", 128, 3, 32),
        ("se_resnet9_fixup", 8192, 11, None),
    ]
