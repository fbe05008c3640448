"""Searches for the training plans that plantune ships, and writes them beside those that are there.

    python tools/training_plans.py --db work.db [--budget 120] [--file plans/sm90.db] [--only 1 3]

On the GPU of `--arch`, with nothing beside. Each search begins from what --db has: the same command
goes on where an earlier one ended. FILE is written again after each search that raced its plan, if
all its plans of other problems are kept as they were. A JSON line tells each search.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plantune.plans.database.exports import read_export
from plantune.plans.database.rows import StoredPlan
from plantune.plans.workload import Workload

NETWORK = "se_resnet9_fixup"
BUDGET_S = 120.0
TOLD = (
    *("workload", "complete", "raced", "measured", "rejected", "candidates", "phases_s"),
    *("evidence", "families", "seconds"),
)
Rows = Iterable[StoredPlan]


def workloads(arch: str, dtype: str) -> tuple[Workload, ...]:
    """What is trained: an agent's images and depth, and ResNet-50 on small images."""
    return (
        Workload(NETWORK, 2048, 3, "train", dtype, arch),
        Workload("resnet50", 128, 3, "train", dtype, arch, image_size=32),
        Workload(NETWORK, 8192, 11, "train", dtype, arch),
    )


def plantune(*arguments: object) -> str:
    """What a command wrote; raises CalledProcessError."""
    command = [sys.executable, "-m", "plantune", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def options(workload: Workload) -> list[object]:
    """As `plantune search` takes a workload."""
    given: list[object] = ["--model", workload.network, "--arch", workload.arch]
    given += ["--batch", workload.batch, "--in-channels", workload.in_channels]
    given += ["--mode", workload.mode, "--dtype", workload.dtype]
    return given + (["--image-size", workload.image_size] if workload.image_size else [])


def changed(before: Rows, after: Rows, problem: str) -> list[str]:
    """The plans of other problems that are missing or not the same any more."""
    found = {_place(row): row.plan for row in after}
    others = (row for row in before if row.plan.problem.graph != problem)
    return [str(row.plan.problem) for row in others if found.get(_place(row)) != row.plan]


def _place(row: StoredPlan) -> tuple[str, str]:
    return row.plan.problem.graph, row.environment.key


def search(workload: Workload, file: Path, database: Path, budget_s: float) -> dict[str, Any]:
    """Searches, and writes the file again if its other plans are kept."""
    place = ("--db", database)
    answer = plantune("search", *options(workload), *place, "--budget", budget_s, "--json")
    found = json.loads(answer)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        written = Path(folder) / file.name
        plantune("export", written, *place, "--arch", workload.arch)
        lost = changed(read_export(file), read_export(written), workload.problem.graph)
        if not lost and found["raced"]:
            written.replace(file)
    return {**{name: found[name] for name in TOLD}, "lost": lost}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--file", type=Path, default=Path("plans/sm90.db"))
    parser.add_argument("--arch", default="sm90")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for each search")
    parser.add_argument("--only", type=int, nargs="+", default=[1, 2, 3])
    asked = parser.parse_args(given)
    plantune("import", asked.file, "--db", asked.db)
    known = workloads(asked.arch, asked.dtype)
    good = True
    for number in asked.only:
        row = search(known[number - 1], asked.file, asked.db, asked.budget)
        print(json.dumps(row), flush=True)
        good &= row["raced"] and not row["lost"]
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
