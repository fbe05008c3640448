"""One forward pass for acting and learning: plans for other batches that compute the same bits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plantune.base.warning import warn
from plantune.errors import PlantuneError, PlantuneWarning
from plantune.graph import Attrs, Graph
from plantune.plans.checked_plan import CheckedPlan, check_plan
from plantune.plans.plan import PROGRAM, Plan
from plantune.plans.problem import Problem
from plantune.runtime.captured.program_pool import ProgramPool
from plantune.runtime.proof.draws import drawn_inputs
from plantune.runtime.watched.torch_internals import is_capturing

PRODUCTS = ("conv2d", "matmul")


class InconsistentPlans(PlantuneWarning):
    """Two calls of a module do not compute the same bits for one image."""


def by_its_program(plan: Plan) -> Plan:
    """The plan, run by its own steps even if another route was faster as a whole: their order of
    summation is known.
    """
    return replace(plan, route=PROGRAM, frozen_route=None)


def transferred(leader: Plan, own: CheckedPlan) -> CheckedPlan | str:
    """The leader's forward pass, step by step by the same candidates, for another batch, with the
    backward pass of a plan of its own; else why not.
    """
    graph, space = own.graph, own.space
    forward = {node.name for node in graph.nodes[: graph.backward_from]}
    choices = (
        *(choice for choice in leader.choices if choice.nodes[0] in forward),
        *(choice for choice in own.plan.choices if choice.nodes[0] not in forward),
    )
    problem = Problem.of(graph, space.arch.name, leader.problem.network)
    made = by_its_program(replace(own.plan, problem=problem, choices=choices, evidence=Attrs()))
    try:
        return check_plan(made, graph, space)
    except PlantuneError as error:
        return str(error)


def why_apart(leader: ProgramPool, other: ProgramPool) -> str | None:
    """Why both may give other outputs for the same images; None if they do not."""
    if leader.graph.updates or leader.graph.draws:
        return "it uses statistics of a batch, or random numbers"
    apart = None if leader.device.type == "cuda" and is_capturing() else difference(leader, other)
    if not apart:
        return None
    steps = ", ".join(_products_of_the_framework(leader.plan, leader.graph))
    where = f", by how the framework sums in {steps}" if steps else ""
    return f"outputs differ by {apart:.2g} of the largest{where}"


def _products_of_the_framework(plan: Plan, graph: Graph) -> list[str]:
    ops = {node.name: node.op for node in graph.nodes[: graph.backward_from]}
    of_framework = (choice for choice in plan.choices if choice.candidate.family == "framework")
    names = (name for choice in of_framework for name in choice.nodes)
    return [name for name in names if ops.get(name) in PRODUCTS]


def difference(leader: ProgramPool, other: ProgramPool) -> float | None:
    """How far apart the outputs are that both give for the same images, as a part of the largest;
    None if the calls cannot be compared.
    """
    graph = leader.graph
    random = torch.Generator(leader.device).manual_seed(0)
    inputs = drawn_inputs(graph, (), random)
    pairs = zip(inputs, other.graph.inputs, strict=True)
    parts = [_part(x, type_.shape) for x, (_, type_) in pairs]
    if any(part is None for part in parts):
        return None
    with torch.no_grad():
        whole = leader.run(*inputs)
        few = other.run(*(part for part in parts if part is not None))
    apart = [_apart(a, b) for a, b in zip(whole, few, strict=True)]
    return None if None in apart else max((each for each in apart if each is not None), default=0.0)


def _part(x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """The first images, for a call with fewer of them."""
    if tuple(x.shape) == shape:
        return x
    fits = len(shape) == x.dim() and tuple(x.shape[1:]) == shape[1:] and shape[0] < x.shape[0]
    return x[: shape[0]].clone(memory_format=torch.preserve_format) if fits else None


def _apart(a: Tensor, b: Tensor) -> float | None:
    part = _part(a, tuple(b.shape))
    if part is None:
        return None
    if torch.equal(part, b):
        return 0.0
    largest = max(float(b.double().abs().max()), 1e-30)
    return float((part.double() - b.double()).abs().max()) / largest


def report(name: str, why: str) -> None:
    warn(
        f"{name}: acting and learning do not compute the same bits: {why}",
        InconsistentPlans,
    )
