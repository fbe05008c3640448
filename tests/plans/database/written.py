"""The calls whose plans are in data/of_0_1, and what wrote the files there.

`python tests/plans/database/written.py FOLDER` writes such files by the code of today. Those that
are there stay as they are: later code opens them and finds the plans in them.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plantune import optimize
from plantune.base.canonical import Attrs
from plantune.base.outcome import Measured, Outcome, Rejected
from plantune.devices.machine import Environment
from plantune.graph.graph import Graph
from plantune.kernels.family import Candidate
from plantune.plans.checked_plan import check_plan
from plantune.plans.database.exports import export_plans
from plantune.plans.database.plan_database import PlanDatabase
from plantune.plans.guess import COMPILED, framework_plan, guessed_plan, hand_plan
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem
from plantune.plans.step_times import StepTimes
from plantune.plans.workload import Workload
from plantune.runtime.captured.program_pool import ProgramPool
from plantune.space.search_space import load_search_space

CPU = Environment("cpu", "A CPU", "0" * 16, 2, "2.13.0", "0.1.0", "g++", "Linux x86_64")
OF_GPU = {"sm_count": 132, "memory_mib": 143_771, "l2_kib": 51_200, "mig": "no"}
OF_GPU |= {"driver": "580.1", "cuda": "13.0", "cudnn": "9.15", "cutlass": "4.2.1"}
GPU = replace(CPU, arch="sm90", device="A GPU", threads=0, compiler="NVRTC", gpu=Attrs(OF_GPU))


class Net(nn.Module):
    """A convolution with its norm, a pool, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.hidden, self.out = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.out(torch.relu(self.hidden(y)))


@dataclass(frozen=True)
class Entry:
    """One call of the network; `autocast` is the dtype under which it is made, if any."""

    mode: str
    arch: str = "cpu"
    dtype: str = "float32"
    autocast: torch.dtype | None = None
    batch: int = 2

    @property
    def environment(self) -> Environment:
        return CPU if self.arch == "cpu" else replace(GPU, arch=self.arch)

    def module(self) -> nn.Module:
        return Net().train(self.mode == "train")

    def images(self) -> Tensor:
        return torch.ones(self.batch, 8, 6, 6)

    def called(self, **options: Any) -> ProgramPool:
        """What runs such a call on a CPU, after the first one of a user."""
        tuned = optimize(self.module(), self.images(), mode=self.mode, **options)
        cast = nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast)
        with torch.set_grad_enabled(self.mode == "train"), cast:
            tuned(self.images())
        return tuned.pools()[-1]  # the expected call has one already, if a plan is given

    @cached_property
    def sought(self) -> tuple[Graph, Problem]:
        """The layers of the call, and what its plan solves."""
        if self.arch == "cpu":
            graph = self.called().graph
            return graph, Problem.of(graph, self.arch, "Net")
        given = {"mode": self.mode, "dtype": self.dtype, "arch": self.arch, "batch": self.batch}
        inputs = (f"{self.batch}x8x6x6",)
        work = Workload(f"{Path(__file__).resolve()}:Net", inputs=inputs, **given)
        return work.graph, work.problem


ENTRIES = {
    "inference": Entry("infer"),
    "another batch": Entry("infer", batch=5),
    "training": Entry("train"),
    "inference under autocast": Entry("infer", autocast=torch.bfloat16),
    "training under autocast": Entry("train", autocast=torch.bfloat16),
    "a GPU": Entry("infer", "sm90", "float16"),
    "training on a GPU": Entry("train", "sm90", "float16"),
    "tf32": Entry("infer", "sm90", "float32"),
    "training in tf32": Entry("train", "sm90", "float32"),
    "predicted": Entry("infer", "sm80", "float16"),
}
RACED = {
    **{"rivals": "eager,torchscript-traced,compile-default", "median_ms": 0.05, "low_ms": 0.04},
    **{"high_ms": 0.06, "baseline": "eager", "baseline_ms": 0.1, "ratio": 0.5, "ratio_low": 0.4},
    **{"ratio_high": 0.6, "eager_ratio": 0.5, "eager_ratio_low": 0.4, "eager_ratio_high": 0.6},
    **{"deterministic": 1, "search_s": 60.0, "machine": "quiet"},
}
LOST = {
    **{"rivals": "eager,compile-default", "median_ms": 0.1, "low_ms": 0.09, "high_ms": 0.12},
    **{"baseline": "compile-default", "baseline_ms": 0.08, "ratio": 1.25, "ratio_low": 1.2},
    **{"ratio_high": 1.3, "unbeaten": "eager", "unbeaten_ratio": 0.98, "unbeaten_ratio_low": 0.95},
    **{"unbeaten_ratio_high": 1.02, "lost_to": "compile-default", "loss": 1.25},
}
PREDICTED = {"predicted_ms": 0.02, "built": 4, "rejected": 1, "numerics": "not checked"}
STAGES = ("build", "memory", "crash", "timeout", "numerics", "roofline", "noisy")


def plan_of(name: str, entry: Entry) -> Plan:
    """As a search, a race or a prediction would have kept it."""
    graph, problem = entry.sought
    space = load_search_space(entry.arch)
    plan = hand_plan(graph, space, network=problem.network, without=COMPILED)
    plan = replace(plan, problem=problem, origin="measured", evidence=Attrs(RACED))
    if name == "predicted":
        return replace(plan, origin="predicted", evidence=Attrs(PREDICTED))
    if name == "another batch":
        lost = {"runner": "eager", "frozen_runner": "torchscript"}
        return replace(plan, evidence=Attrs(LOST), **lost)
    times = StepTimes(3.5, 2.25, (Candidate("framework", Attrs(layout="nchw")), 4.75))
    choices = tuple(replace(choice, times=times) for choice in plan.choices)
    return replace(plan, choices=choices, branches=entry.arch != "cpu" and entry.mode == "train")


def trials_of(entry: Entry) -> list[tuple[str, Candidate, Outcome]]:
    """One step with a time, and candidates of another that were rejected, at each stage."""
    graph, _ = entry.sought
    space = load_search_space(entry.arch)
    plan = hand_plan(graph, space, network="Net", without=COMPILED)
    first, other, *_ = check_plan(plan, graph, space).partition
    timed = Measured(3.5, 3.25, 4.0, 20, 1e-7, 1e-6, True)
    chosen = plan.choices[0].candidate
    found: list[tuple[str, Candidate, Outcome]] = [(first.signature, chosen, timed)]
    for number, stage in enumerate(STAGES):
        candidate = Candidate("gemm", Attrs(layout="nhwc", number=number))
        found.append(
            (other.signature, candidate, Rejected(stage, f"a reason to reject at {stage}"))
        )
    return found


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, dict[str, Any]] = {}
    with PlanDatabase.open(folder / "user.db") as database:
        for name, entry in ENTRIES.items():
            plan, graph = plan_of(name, entry), entry.sought[0]
            id = database.put_plan(plan, entry.environment)
            index[name] = {"id": id, "plan": plan.digest, "graph": graph.digest}
            (folder / f"{name.replace(' ', '_')}.json").write_text(plan.dumps() + "\n", "utf-8")
        graph, problem = ENTRIES["inference"].sought
        partial = framework_plan(graph, load_search_space("cpu"), network=problem.network)
        database.put_plan(partial, CPU, partial=True)
        for name in ("inference", "training under autocast", "tf32"):
            for trial in trials_of(ENTRIES[name]):
                database.put_trial(*trial[:2], ENTRIES[name].environment, trial[2])
        graph, problem = ENTRIES["a GPU"].sought
        for name, make in (("a_guess", guessed_plan), ("the_frameworks", framework_plan)):
            unsearched = make(graph, load_search_space("sm90"), network=problem.network)
            (folder / f"{name}.json").write_text(unsearched.dumps() + "\n", "utf-8")
        for arch in ("cpu", "sm80", "sm90"):
            export_plans(database, folder / f"{arch}.db", arch)
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
