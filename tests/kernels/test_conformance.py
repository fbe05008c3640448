"""Every family that the registry finds, on every step of one table that it says it can run.

A new family is tested without a change here; a new op needs a line in `SINGLES` of table.py.
"""

from __future__ import annotations

import pytest

from plantune.graph.ops import OPS
from plantune.kernels.family import Candidate, KernelFamily
from plantune.kernels.registry import all_families, candidates, family_named
from plantune.measure.numerics import check
from plantune.space.search_space import load_search_space

from .table import ALL_PARTS, SOME_PARTS, all_steps

SPACE = load_search_space("cpu")
STEPS = all_steps()
# A family that compiles takes seconds a step: of the table it is tested on these in every run, and
# on whatever shares their source.
COMPILED = (
    f"3x3 one image, {ALL_PARTS} float32",
    f"1x1, {SOME_PARTS} float32",
    "linear relu float32",
    "squeeze and excite float32",
    "masked_dgrad float32",
)
# Inductor compiles each graph for some 4 s. Its other cases are slow tests, and all but one of so
# many have a mark of their own: continuous integration leaves them out.
INDUCTOR = (f"3x3 one image, {ALL_PARTS} float32", "squeeze and excite float32")
SHARE = 6
Case = tuple[str, Candidate]


def compiles(family: KernelFamily) -> bool:
    return type(family).build is not KernelFamily.build


def source_of(name: str, candidate: Candidate) -> tuple[str, str]:
    family, step = family_named(candidate.family), STEPS[name]
    return family.name, family.source(
        family.parts(step), candidate.config, SPACE.arch
    ) or step.signature


def cases() -> list[object]:
    """A parameter for each step and candidate, with its marks."""
    legal = [(name, c) for name, step in STEPS.items() for c in candidates(step, SPACE)]
    slow = must_compile(legal)
    graphs = [case for case in slow if case[1].family == "inductor"]
    marked = {"slow": slow, "graphs": set(graphs) - set(graphs[::SHARE])}
    return [
        pytest.param(
            name,
            candidate,
            id=f"{name} | {candidate.family} {dict(candidate.config)}",
            marks=[
                getattr(pytest.mark, mark)
                for mark, those in marked.items()
                if (name, candidate) in those
            ],
        )
        for name, candidate in legal
    ]


def must_compile(legal: list[Case]) -> dict[Case, None]:
    """Those of these, in their order, that compile what no case of every run does."""
    compiled = [case for case in legal if compiles(family_named(case[1].family))]
    sources = {case: source_of(*case) for case in compiled}
    done = {sources[name, c] for name, c in compiled if name in of_every_run(c)}
    return dict.fromkeys(case for case in compiled if sources[case] not in done)


def of_every_run(candidate: Candidate) -> tuple[str, ...]:
    return INDUCTOR if candidate.family == "inductor" else COMPILED


@pytest.mark.parametrize(("name", "candidate"), cases())
def test_a_candidate_is_right(name: str, candidate: Candidate) -> None:
    """A check has data of its own for each of its runs."""
    report = check(STEPS[name], candidate, SPACE)
    assert report.deterministic
    assert report.error <= report.bound


def test_every_op_stands_in_the_table_alone() -> None:
    alone = {step.ops[0] for step in STEPS.values() if len(step.nodes) == 1}
    assert alone == set(OPS)


def test_every_family_of_the_cpu_runs_some_step_of_the_table() -> None:
    ran = {c.family for step in STEPS.values() for c in candidates(step, SPACE)}
    assert ran == {
        name for name, family in all_families().items() if family.why_not_arch(SPACE.arch) is None
    }


def test_the_framework_runs_every_step_in_every_layout() -> None:
    for step in STEPS.values():
        configs = [c.config["layout"] for c in candidates(step, SPACE) if c.family == "framework"]
        assert configs == ["nchw", "nhwc"]
