"""The plan: which steps cover a network, which candidate runs each, and the evidence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plantune.base.canonical import Attrs, canonical, digest
from plantune.errors import InvalidPlan
from plantune.graph.graph import Graph
from plantune.kernels.family import Candidate
from plantune.plans.problem import PROBLEM_FIELDS, Problem
from plantune.plans.step_times import StepTimes
from plantune.plans.written_words import (
    FRAMEWORK,
    FROZEN_ROUTE,
    GUESS,
    ROUTE,
    WRITTEN_ORIGINS,
    origin_of,
)

# A plan is written in the first format that can say it: earlier releases read what they can run.
FORMAT = 1
# What a plan has only if it needs it, and the format that brought it.
FORMATS = {"branches": 2, FROZEN_ROUTE: 3, "call": 4, "times": 4, "order": 5, "precisions": 6}
PROGRAM, EAGER = "program", "eager"
# What runs the network: the plan's program, or one of the framework's routes that was faster as a
# whole. All of them read the current weights.
LIVE_ROUTES = (
    PROGRAM,
    EAGER,
    "eager-channels-last",
    "torchscript-traced",
    "torchscript-traced-channels-last",
)
# For modules whose weights stay until `refresh()`.
FROZEN_ROUTES = (*LIVE_ROUTES, "torchscript", "torchscript-channels-last")


@dataclass(frozen=True)
class Choice:
    """One step, by the names of its nodes, and the candidate that runs it. `times` is what a search
    measured of it; choices are equal without that.
    """

    nodes: tuple[str, ...]
    candidate: Candidate
    times: StepTimes | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        data = {"nodes": list(self.nodes), **self.candidate.to_json()}
        return data if self.times is None else {**data, "times": self.times.to_json()}


@dataclass(frozen=True)
class Plan:
    """The choices for a problem.

    `origin` says where the choices come from, in the words of `written_words`; `evidence` holds
    what was measured for them. Where one of the framework's routes was faster as a whole, `route`
    names it and the choices are what lost; `frozen_route` is the same for frozen weights, where
    that differs. With `branches`, steps that nothing waits for at once run beside others on a GPU.
    """

    problem: Problem
    choices: tuple[Choice, ...]
    origin: str = FRAMEWORK
    evidence: Attrs = field(default_factory=Attrs)
    route: str = PROGRAM
    branches: bool = False
    frozen_route: str | None = None

    @property
    def digest(self) -> str:
        return digest(self.to_json())

    @property
    def written_origin(self) -> str:
        """The origin as files, databases and JSON have it."""
        return WRITTEN_ORIGINS[self.origin]

    @property
    def is_unsearched(self) -> bool:
        """Whether nothing was measured or picked for it: calls run it until a search was made."""
        return self.origin in (FRAMEWORK, GUESS)

    def route_for(self, *, frozen: bool) -> str:
        """What runs the network: the program, or one of the framework's routes that was faster."""
        return self.frozen_route if frozen and self.frozen_route is not None else self.route

    def to_json(self) -> dict[str, Any]:
        optional = {"branches": self.branches, FROZEN_ROUTE: self.frozen_route}
        data = self.problem.to_json() | {name: value for name, value in optional.items() if value}
        choices = [choice.to_json() for choice in self.choices]
        return {
            "format": _format_of(data, choices),
            **data,
            "choices": choices,
            "origin": self.written_origin,
            ROUTE: self.route,
            "evidence": dict(self.evidence),
        }

    def dumps(self) -> str:
        return canonical(self.to_json())

    @staticmethod
    def from_json(data: Any) -> Plan:
        """The plan of `to_json`; raises InvalidPlan naming the place of a fault."""
        return plan_from_json(data)

    @staticmethod
    def loads(text: str) -> Plan:
        """The plan of `dumps`; raises InvalidPlan naming the place of a fault."""
        try:
            data = json.loads(
                text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_twice
            )
        except (ValueError, RecursionError) as error:
            raise InvalidPlan(f"this is not JSON: {error}") from error
        return plan_from_json(data)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that JSON knows")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"field {key!r} is there twice")
        fields[key] = value
    return fields


def plan_from_json(data: Any) -> Plan:
    """Checks every field before it is used; see `check_plan` for whether it fits a graph."""
    added = {k: t for k, t in ADDED_FIELDS.items() if isinstance(data, dict) and k in data}
    fields = _fields(data, "plan", {**PLAN_FIELDS, **added})
    expected = _format_of(added, fields["choices"])
    if fields["format"] != expected:
        raise InvalidPlan(f"format: this plantune reads {expected}, got {fields['format']!r}")
    branches = "branches" in added
    if branches and not fields["branches"]:
        raise InvalidPlan("branches: must be true or left out, got False")
    choices = tuple(
        _choice(item, f"choices[{index}]") for index, item in enumerate(fields["choices"])
    )
    for key, known in KNOWN_VALUES.items():
        if key in fields and fields[key] not in known:
            raise InvalidPlan(f"{key}: must be one of {', '.join(known)}, got {fields[key]!r}")
    problem = Problem.from_json(fields)
    covered = {name for choice in choices for name in choice.nodes}
    if problem.order and not covered <= set(problem.order):
        raise InvalidPlan("order: must have each node of the choices")
    return Plan(
        problem,
        choices,
        origin=origin_of(fields["origin"], (choice.candidate.family for choice in choices)),
        evidence=_attrs(fields["evidence"], "evidence"),
        route=fields[ROUTE],
        branches=branches,
        frozen_route=fields.get(FROZEN_ROUTE),
    )


def _format_of(fields: Iterable[str], choices: Iterable[Any]) -> int:
    """The first format that has these fields, and those of the choices."""
    named = [*fields, *(name for item in choices if isinstance(item, dict) for name in item)]
    return max((FORMATS.get(name, FORMAT) for name in named), default=FORMAT)


PLAN_FIELDS: dict[str, type] = {
    "format": int,
    **PROBLEM_FIELDS,
    "choices": list,
    "origin": str,
    ROUTE: str,
    "evidence": dict,
}
ADDED_FIELDS: dict[str, type] = {
    "branches": bool,
    FROZEN_ROUTE: str,
    "call": list,
    "order": list,
    "precisions": list,
}
KNOWN_VALUES: dict[str, tuple[str, ...]] = {
    "origin": tuple(dict.fromkeys(WRITTEN_ORIGINS.values())),
    ROUTE: LIVE_ROUTES,
    FROZEN_ROUTE: FROZEN_ROUTES,
}
CHOICE_FIELDS: dict[str, type] = {"nodes": list, "family": str, "config": dict}


def _fields(data: Any, where: str, wanted: Mapping[str, type]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InvalidPlan(f"{where}: must be an object, got {type(data).__name__}")
    wrong = set(data) ^ set(wanted)
    if wrong:
        raise InvalidPlan(f"{where}: fields missing or unknown: {', '.join(sorted(wrong))}")
    for key, type_ in wanted.items():
        if type(data[key]) is not type_:
            raise InvalidPlan(f"{where}.{key}: must be {type_.__name__}, got {data[key]!r:.80}")
    return data


def _choice(data: Any, where: str) -> Choice:
    added = {"times": dict} if isinstance(data, dict) and "times" in data else {}
    fields = _fields(data, where, {**CHOICE_FIELDS, **added})
    nodes = fields["nodes"]
    names = all(type(name) is str for name in nodes)
    if not nodes or not names or len(set(nodes)) < len(nodes):
        raise InvalidPlan(f"{where}.nodes: must be names of nodes, each once, got {nodes!r:.80}")
    config = _attrs(fields["config"], f"{where}.config")
    try:
        times = StepTimes.from_json(fields["times"]) if added else None
    except InvalidPlan as error:
        raise InvalidPlan(f"{where}.times: {error}") from error
    return Choice(tuple(nodes), Candidate(fields["family"], config), times)


def _attrs(data: dict[str, Any], where: str) -> Attrs:
    try:
        return Attrs(data)
    except (TypeError, ValueError) as error:
        raise InvalidPlan(f"{where}: {error}") from error


def is_for(plan: Plan, graph: Graph) -> bool:
    """Whether it was made for a network of these layers."""
    return plan.problem.graph == (graph.digest if plan.problem.order else graph.named_digest)


def named_as(plan: Plan, graph: Graph) -> Plan:
    """A plan for a network of these layers, with the names that they have in this graph. One from
    before layers were told apart without names has them already.
    """
    nodes = graph.structure.nodes
    if plan.problem.order == nodes:
        return plan
    named = plan.problem.order or nodes
    if len(named) != len(nodes):
        raise InvalidPlan(f"order: must be names of {len(nodes)} nodes, got {len(named)}")
    names = dict(zip(named, nodes, strict=True))
    place = {node.name: at for at, node in enumerate(graph.nodes)}

    def renamed(choice: Choice) -> Choice:
        own = [names.get(name, name) for name in choice.nodes]
        return replace(choice, nodes=tuple(sorted(own, key=lambda name: place.get(name, -1))))

    choices = tuple(map(renamed, plan.choices))
    problem = replace(plan.problem, graph=graph.digest, call=graph.inputs, order=nodes)
    return replace(plan, problem=problem, choices=choices)
