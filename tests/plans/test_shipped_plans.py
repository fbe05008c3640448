"""The plans that plantune ships: they are whole, fit today's networks and kernels, and say whether
they were measured.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from plantune.base.canonical import digest
from plantune.base.paths import data_folder
from plantune.devices.machine import cpu_environment
from plantune.graph import Graph, Step
from plantune.kernels.family import Arch, Candidate
from plantune.kernels.registry import family_named
from plantune.plans import raced_routes
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.exports import read_export
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.database.rows import StoredPlan
from plantune.plans.problem import Problem
from plantune.plans.standing import Standing
from plantune.plans.workload import Workload
from plantune.search.contenders.known import known_plans
from plantune.search.sought import Sought
from plantune.space.search_space import load_search_space

FILES = sorted(data_folder("plans").glob("*.db"))
PREDICTED = ("sm70", "sm75", "sm80", "sm86", "sm89")
MEASURED = "sm90"
MOST_STEPS = 32
CPU_BATCHES = (1, 4, 8, 32)
NETWORK, CHANNELS, BATCHES = "se_resnet9_fixup", (3, 11), (128, 512, 1024)
# What is trained: network, images, channels and edge; as tools/training_plans.py searches for it.
TRAINED = (
    (NETWORK, 2048, 3, None),
    ("resnet50", 128, 3, 32),
    (NETWORK, 8192, 11, None),
)
SIZE_MAX_BYTES = 300_000
GOLDEN = Path(__file__).parent / "golden_shipped.json"


@cache
def plans_in(path: Path) -> tuple[StoredPlan, ...]:
    return read_export(path)


@cache
def graph(batch: int, channels: int, arch: str) -> Graph:
    return Workload(NETWORK, batch, channels, "infer", "float16", arch).graph


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_is_small_and_of_its_arch(path: Path) -> None:
    assert path.stat().st_size < SIZE_MAX_BYTES
    assert {stored.plan.problem.arch for stored in plans_in(path)} == {path.stem}


@pytest.mark.parametrize("arch", PREDICTED)
def test_predicted_plans_are_there_and_marked(arch: str) -> None:
    stored = plans_in(data_folder("plans") / f"{arch}.db")
    wanted = {graph(batch, channels, arch).digest for channels in CHANNELS for batch in BATCHES}
    assert wanted <= {
        item.plan.problem.graph for item in stored if item.plan.problem.dtype == "float16"
    }
    for item in stored:
        assert item.plan.origin == "predicted"
        assert item.environment.device.startswith(f"predicted for {arch}")
        assert item.plan.evidence["predicted_ms"] > 0
        assert "median_ms" not in item.plan.evidence


@pytest.mark.usefixtures("as_with_a_compiler")
def test_plans_for_cpus_are_there_and_fit_todays_networks() -> None:
    stored = plans_in(data_folder("plans") / "cpu.db")
    problems = (Workload(NETWORK, batch) for batch in CPU_BATCHES)
    graphs = {problem.graph.digest: problem.graph for problem in problems}
    assert {item.plan.problem.graph for item in stored} == set(graphs)
    for item in stored:
        assert (item.plan.origin, item.plan.route) == ("measured", "program")
        assert item.plan.evidence["ratio"] < 1 or raced_routes.LOST_TO in item.plan.evidence
        graph = graphs[item.plan.problem.graph]
        assert item.plan.problem.call == graph.inputs
        check_plan(item.plan, graph, load_search_space("cpu"))


def test_a_search_on_a_cpu_begins_from_what_is_shipped_for_the_nearest_batch() -> None:
    """Also where there is no compiler: what needs one is left to the framework."""
    graph, space = Workload(NETWORK, 8).graph, load_search_space("cpu")
    problem = Problem.of(graph, "cpu", NETWORK)
    with PlanDatabase.in_memory() as database:
        found = known_plans(Sought(graph, problem), cpu_environment(), database)
        own = known_plans(Sought(graph, problem), cpu_environment(), database, shipped=False)
    assert found
    for plan in found:
        check_plan(plan, graph, space)
        assert (plan.problem.batch, plan.route) == (8, "program")
    machines = {stored.environment.device_digest for stored in plans_in(FILES[0])}
    assert own == [] or cpu_environment().device_digest in machines


def test_measured_plans_are_there_with_what_was_measured() -> None:
    stored = plans_in(data_folder("plans") / f"{MEASURED}.db")
    wanted = {graph(batch, channels, MEASURED).digest for channels in CHANNELS for batch in BATCHES}
    assert wanted <= {
        item.plan.problem.graph for item in stored if item.plan.problem.dtype == "float16"
    }
    for item in stored:
        assert item.plan.origin == "measured"
        assert item.environment.device == "NVIDIA H200"
        assert 0 < item.plan.evidence["ratio"] < 1


@pytest.mark.parametrize(("network", "batch", "channels", "size"), TRAINED)
def test_training_plans_run_their_own_program_and_name_their_rivals(
    network: str, batch: int, channels: int, size: int | None
) -> None:
    """A search has no time to compile both passes: where none was met, the plan says so."""
    workload = Workload(network, batch, channels, "train", "float16", MEASURED, image_size=size)
    stored = plans_in(data_folder("plans") / f"{MEASURED}.db")
    (plan,) = (item.plan for item in stored if item.plan.problem.graph == workload.graph.digest)
    assert (plan.problem.mode, plan.route) == ("train", "program")
    assert plan.evidence["ratio_high"] < 1
    met = raced_routes.RacedRoutes.of(plan.evidence)
    assert {"eager", "cuda-graph"} < set(met.names)
    assert (
        met.compiled or raced_routes.NO_COMPILED in Standing.of(plan.route, plan.evidence).details()
    )


@pytest.mark.parametrize("arch", [*PREDICTED, MEASURED])
def test_plans_fit_todays_networks_and_kernels(arch: str) -> None:
    space = load_search_space(arch)
    for item in plans_in(data_folder("plans") / f"{arch}.db"):
        problem = item.plan.problem
        graph = Workload.of(problem).graph
        assert (problem.graph, problem.call) == (graph.digest, graph.inputs)
        in_a_pass = check_plan(item.plan, graph, space).of_pass
        assert problem.mode == "train" or len(in_a_pass) <= MOST_STEPS


@pytest.mark.parametrize("arch", [path.stem for path in FILES])
def test_no_change_of_the_code_moves_them_unseen(arch: str) -> None:
    """What is compiled for each plan is what was; where that changes on purpose, or another plan is
    shipped, the file follows: `python -m tests.plans.test_shipped_plans` writes it.
    """
    assert rendered_plans(arch) == json.loads(GOLDEN.read_text("utf-8"))[arch]


def rendered_plans(arch: str) -> dict[str, str]:
    """A digest of all sources of each plan, by the digest of the plan."""
    found, space = {}, load_search_space(arch)
    for item in plans_in(data_folder("plans") / f"{arch}.db"):
        steps = check_plan(item.plan, Workload.of(item.plan.problem).graph, space).steps
        sources = [source_of(each.step, each.candidate, space.arch) for each in steps]
        found[item.plan.digest[:16]] = digest(sources)[:16]
    return found


def source_of(step: Step, candidate: Candidate, arch: Arch) -> str | None:
    family = family_named(candidate.family)
    source: str | None = family.source(family.parts(step), candidate.config, arch)
    return source


if __name__ == "__main__":
    golden = {path.stem: rendered_plans(path.stem) for path in FILES}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", "utf-8")
