"""Every value of a plan from elsewhere, checked before it can reach a template, a path or SQL."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

from plantune.devices.machine import Environment
from plantune.errors import InvalidPlan
from plantune.graph.types import DTYPES, TensorType
from plantune.kernels.family import Candidate
from plantune.kernels.registry import is_family
from plantune.plans.database.rows import EVIDENCE, StoredPlan
from plantune.plans.plan import Plan
from plantune.plans.problem import Problem
from plantune.plans.workload import BATCH_MAX
from plantune.plans.written_words import PREDICTED
from plantune.space.arch import ARCH_NAMES
from plantune.space.search_space import load_search_space

ARGUMENTS_MAX, RANK_MAX = 1000, 16
NAME_LENGTH, TEXT_LENGTH, NODE_LENGTH = 100, 300, 500
_DIGEST = re.compile(r"[0-9a-f]{64}")
# As extraction and differentiation call them: layers.0.conv1/conv2d, d(stem.2/relu)/add_2.
_NODE = re.compile(r"[A-Za-z0-9_(][A-Za-z0-9_.,:()/+-]*")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)")


def check_stored_plan(stored: StoredPlan) -> None:
    """Raises InvalidPlan, which names the place, for a value that plantune would not write."""
    _check_problem(stored.plan.problem)
    _check_choices(stored.plan)
    for key, value in stored.plan.evidence.items():
        _require(_is_name(key), "evidence", key, "names of values")
        _require(_is_plain(value), f"evidence.{key}", value, "a number or a short printable text")
    _check_prediction(stored.plan)
    _check_environment(stored.environment, stored.plan.problem.arch)
    _require(_matches(_TIME, stored.created_at), "created_at", stored.created_at, "a time in UTC")


def _check_prediction(plan: Plan) -> None:
    """Nothing predicted may look as if it was measured."""
    measured = [key for key in plan.evidence if key in EVIDENCE]
    measured += ["times" for choice in plan.choices if choice.times is not None]
    if plan.origin == PREDICTED:
        _require(not measured, "evidence", measured, "no times, for nothing was measured")


def _check_problem(problem: Problem) -> None:
    _require(problem.arch in ARCH_NAMES, "arch", problem.arch, f"one of {', '.join(ARCH_NAMES)}")
    _require(problem.dtype in DTYPES, "dtype", problem.dtype, f"one of {', '.join(DTYPES)}")
    _require(_is_name(problem.network), "network", problem.network, "a name")
    _require(_matches(_DIGEST, problem.graph), "graph", problem.graph, "a sha256")
    _require(1 <= problem.batch <= BATCH_MAX, "batch", problem.batch, f"from 1 to {BATCH_MAX}")
    call = problem.call or ()
    _require(len(call) <= ARGUMENTS_MAX, "call", len(call), f"at most {ARGUMENTS_MAX} arguments")
    for name, value in call:
        where = f"call.{name:.80}"
        _require(name.isprintable() and len(name) <= NAME_LENGTH, "call", name, "names")
        if isinstance(value, TensorType):
            numel = math.prod(size for size in value.shape if size)
            _require(len(value.shape) <= RANK_MAX, where, value.shape, f"rank {RANK_MAX} at most")
            _require(numel < 1 << 53, where, value.shape, "a shape that some memory holds")
        else:
            plain = value is None or _is_plain(value)
            _require(plain, where, value, "a number or a short printable text")


def _check_choices(plan: Plan) -> None:
    seen: set[str] = set()
    _require(bool(plan.choices), "choices", [], "at least one")
    for index, choice in enumerate(plan.choices):
        where = f"choices[{index}]"
        _check_candidate(choice.candidate, where, plan.problem.arch)
        if choice.times is not None and choice.times.runner_up is not None:
            other, _ = choice.times.runner_up
            _check_candidate(other, f"{where}.times.runner_up", plan.problem.arch)
        for node in choice.nodes:  # these are also all names of the problem
            named = len(node) <= NODE_LENGTH and ".." not in node and _matches(_NODE, node)
            _require(named, f"{where}.nodes", node, "names of nodes")
            _require(node not in seen, f"{where}.nodes", node, "nodes of no other choice")
            seen.add(node)


def _check_candidate(candidate: Candidate, where: str, arch: str) -> None:
    """One of a family that is not here is never run, and its config must be printable."""
    family, config, space = candidate.family, candidate.config, _search_space(arch)
    if family in space.families:
        admitted = space.admits(family, config)
        _require(admitted, f"{where}.config", dict(config), f"in the search space of {arch}")
        return
    is_missing = _is_name(family) and not is_family(family)
    known = ", ".join(space.families)
    _require(is_missing, f"{where}.family", family, f"one of {known}")
    for key, value in config.items():
        parts = value if isinstance(value, tuple) else (value,)
        plain = _is_name(key) and all(map(_is_plain, parts))
        _require(plain, f"{where}.config", {key: value}, "numbers and short printable texts")


_search_space = cache(load_search_space)


def _check_environment(environment: Environment, arch: str) -> None:
    values = environment.to_json()
    for name, value in values.items():
        _require(_is_plain(value), f"environment.{name}", value, "short and printable")
    _require(environment.arch == arch, "environment.arch", environment.arch, f"the plan's, {arch}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= TEXT_LENGTH and value.isprintable()
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 53)


def _is_name(text: str) -> bool:
    return len(text) <= NAME_LENGTH and text.isidentifier()


def _matches(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.fullmatch(text) is not None


def _require(condition: bool, place: str, got: Any, wanted: str) -> None:
    if not condition:
        raise InvalidPlan(f"{place}: must be {wanted}, got {got!r:.80}")
