"""A kernel family of another package: found by its entry point, tried, explained, part of plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plantune.devices.machine import cpu_environment
from plantune.kernels.registry import candidates, family_named, installed_families
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.guess import Preference, compose
from plantune.plans.plan import Plan
from plantune.plans.workload import Workload
from plantune.runtime.program.program import Program
from plantune.space.search_space import SearchSpace, load_search_space

pytestmark = pytest.mark.usefixtures("copied_processes")

TOY = """
import torch

from plantune.base.canonical import Attrs
from plantune.kernels.family import Binding, KernelFamily, Parts
from plantune.kernels.legality import refuse


class Toy(KernelFamily[Parts]):
    name = "toy"
    arch_kinds = frozenset(("cpu",))

    def read(self, step):
        refuse({"it knows relu alone": step.ops != ("relu",)})
        return Parts(step)

    def configs(self, space):
        return (Attrs(unroll=1), Attrs(unroll=2))

    def bind(self, parts, config, frame):
        (x, _), (y, _) = parts.step.inputs[0], parts.step.outputs[0]
        return Binding(lambda stream: torch.clamp_min_(frame.values[y].copy_(frame.values[x]), 0))


FAMILY = Toy()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the package is installed, on the path of modules."""
    (tmp_path / "toy_kernels.py").write_text(TOY)
    installed(tmp_path, "toy = toy_kernels:FAMILY")
    monkeypatch.syspath_prepend(tmp_path)
    installed_families.cache_clear()
    yield tmp_path
    installed_families.cache_clear()
    sys.modules.pop("toy_kernels", None)


def installed(folder: Path, entry: str) -> None:
    info = folder / "toy_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[plantune.families]\n{entry}\n")


@pytest.fixture
def problem() -> Workload:
    return Workload("se_resnet9_fixup", 1)


@pytest.fixture
def space() -> SearchSpace:
    return load_search_space("cpu")


@pytest.fixture
def plan(folder: Path, problem: Workload, space: SearchSpace) -> Plan:
    """With the toy for every relu that stands alone."""
    preferences = (Preference("toy", {"unroll": 2}),)
    return compose(problem.graph, space, network=problem.network, preferences=preferences)


def plantune(folder: Path, *arguments: str) -> dict[str, object]:
    """The JSON of a command in a process of its own."""
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "plantune", *arguments, "--json", "--db", str(folder / "plans.db")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_its_configs_are_candidates(plan: Plan, problem: Workload, space: SearchSpace) -> None:
    from plantune.graph.partition import one_by_one

    steps = {step.ops: step for step in one_by_one(problem.graph)}
    toys = [c.config["unroll"] for c in candidates(steps["relu",], space) if c.family == "toy"]
    assert toys == [1, 2]
    assert not [c for c in candidates(steps["conv2d",], space) if c.family == "toy"]
    assert family_named("toy").why_not_step(steps["conv2d",]) == "it knows relu alone"


def test_a_plan_runs_it(plan: Plan, problem: Workload, space: SearchSpace) -> None:
    assert sum(choice.candidate.family == "toy" for choice in plan.choices) > 3
    default = compose(problem.graph, space, network=problem.network)
    outputs = []
    x = torch.rand(1, 3, 64, 64)
    for each in (plan, default):
        program = Program(check_plan(each, problem.graph, space))
        torch.manual_seed(0)
        program.refresh({n: torch.rand(t.shape) / 100 for n, t in problem.graph.parameters})
        outputs.append(program.forward(x)[0].clone())
    torch.testing.assert_close(*outputs)


def test_other_processes_find_it_explain_its_plan_and_would_try_it(
    folder: Path, plan: Plan
) -> None:
    with PlanDatabase.open(folder / "plans.db") as database:
        database.put_plan(plan, cpu_environment())
    explained = json.dumps(plantune(folder, "explain", "--batch", "1"))
    assert '"family": "toy"' in explained
    families = plantune(folder, "search", "--batch", "1", "--dry-run")["families"]
    assert isinstance(families, dict)
    assert families["toy"] > 0


def test_a_package_that_is_broken_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "toy = no_such_module:FAMILY")
    monkeypatch.syspath_prepend(tmp_path)
    installed_families.cache_clear()
    with pytest.warns(UserWarning, match="toy-kernels: its kernel family 'no_such_module:FAMILY'"):
        assert "toy" not in installed_families()
    installed_families.cache_clear()
