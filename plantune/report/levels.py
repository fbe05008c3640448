"""A network at several levels of fusion, each a plan of its own, and what each level costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plantune.base.outcome import Rejected
from plantune.graph.fusions import Fusion, parse_item
from plantune.graph.graph import Graph
from plantune.measure.programs import PassCost
from plantune.plans.guess import COMPILED, framework_plan, hand_plan
from plantune.plans.plan import Plan
from plantune.plans.workload import Workload
from plantune.report.tables import table, us_text
from plantune.space.search_space import load_search_space

NORM = ("mul.scalar|mul_channel?", "add.scalar|add_channel?")
# What a convolution may take along, level by level.
PATHS: Mapping[str, tuple[str, ...]] = {
    "conv+bn": ("conv2d", *NORM),
    "conv+bn+relu": ("conv2d", *NORM, "relu?"),
    "conv+bn+add+relu": ("conv2d", *NORM, "add.tensor?", "relu?"),
}


@dataclass(frozen=True)
class Level:
    """How far ops are fused: a graph and a plan for it."""

    name: str
    graph: Graph
    plan: Plan


def levels(workload: Workload, plan: Plan) -> list[Level]:
    """The framework's calls with norms of their own, partitions with ever more in a step, `plan`.

    Between the two ends each step has the kernel that one would pick without measuring.
    """
    space, name = load_search_space(workload.arch), workload.network
    plain = workload.extracted(fold=False)  # before its norms move into weights
    found = [Level("none", plain, framework_plan(plain, space, network=name))]
    for level, path in PATHS.items():
        fusion = Fusion(level, tuple(parse_item(item, level) for item in path))
        fused = hand_plan(workload.graph, space, network=name, without=COMPILED, fusions=(fusion,))
        found.append(Level(level, workload.graph, fused))
    return [*found, Level("plan", workload.graph, plan)]


def level_row(level: Level, cost: PassCost | Rejected) -> dict[str, Any]:
    """A level's row for --json; times are None if it could not run."""
    row: dict[str, Any] = {"level": level.name, "cpu_us": None, "gpu_us": None, "kernels": None}
    if isinstance(cost, Rejected):
        return {**row, "runs": 0, "reason": cost.reason}
    gpu_us = None if cost.gpu is None else cost.gpu.median_us
    measured = {"cpu_us": cost.cpu.median_us, "gpu_us": gpu_us, "kernels": cost.kernels}
    return {**row, **measured, "runs": cost.cpu.samples}


def levels_table(rows: Sequence[Mapping[str, Any]], width: int | None = None) -> str:
    """The rows, with the time of each as a part of the first one's."""
    first = _time_us(rows[0])
    lines = []
    for row in rows:
        time_us = _time_us(row)
        part = "-" if first is None or time_us is None else f"{time_us / first:.3f}"
        kernels = "-" if row["kernels"] is None else str(row["kernels"])
        times = [us_text(row["cpu_us"]), us_text(row["gpu_us"])]
        lines.append([row["level"], *times, kernels, part, row.get("reason", "")])
    titles = ["fusion", "CPU time", "GPU time", "kernels", "of none", ""]
    return table(titles, lines, "lrrrrl", width)


def _time_us(row: Mapping[str, Any]) -> float | None:
    """The GPU's time if there is one."""
    found: float | None = row["gpu_us"] if row["gpu_us"] is not None else row["cpu_us"]
    return found
