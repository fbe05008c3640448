"""Every fusion matters: the check sees a step that is fused wrongly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.errors import WrongResult
from plantune.graph.fusions import Item, all_fusions
from plantune.graph.graph import Node
from plantune.graph.step import Step
from plantune.kernels.family import Binding, Candidate, KernelFamily, Parts
from plantune.measure.inputs import draw_inputs
from plantune.measure.numerics import check

from .fused_steps import STEPS

# One may draw numbers that a single ReLU leaves as they are.
SEEDS = (0, 1, 2)


class Mutant(KernelFamily):
    """Computes other nodes than the step has."""

    name: ClassVar = "mutant"
    arch_kinds = frozenset(("cpu",))

    def __init__(self, nodes: tuple[Node, ...], names: dict[str, str]) -> None:
        self.nodes, self.names = nodes, names

    def read(self, step):
        return Parts(step)

    def configs(self, space):
        return (Attrs(),)

    def evaluate(self, step, values):
        known = replace(step, nodes=self.nodes).evaluate(values)
        return {name: known[self.names.get(name, name)] for name, _ in step.outputs}

    def bind(self, parts, config, frame):
        step = parts.step

        def launch(stream):
            inputs = {name: frame.values[name] for name, _ in step.inputs}
            for name, result in self.evaluate(step, inputs).items():
                frame.values[name].copy_(result)

        return Binding(launch)


def reading(node: Node, names: dict[str, str]) -> Node:
    return replace(node, inputs=tuple(names.get(value, value) for value in node.inputs))


def without_node(step: Step, index: int) -> Mutant | None:
    """The step with one node left out: its input takes its place, where it has the same type."""
    node = step.nodes[index]
    taken = next((v for v in node.inputs if step.types[v].shape == node.types[0].shape), None)
    if taken is None or len(node.types) > 1:
        return None
    names = {node.name: taken}
    rest = (*step.nodes[:index], *(reading(n, names) for n in step.nodes[index + 1 :]))
    return Mutant(tuple(rest), names)


def swapped(step: Step, index: int) -> Mutant | None:
    """The step with two neighbours in the other order."""
    first, second = step.nodes[index : index + 2]
    chained = (
        first.inputs and second.inputs[0] == first.name and first.name not in second.inputs[1:]
    )
    types = {step.types[first.inputs[0]], first.types[0], second.types[0]}
    read = [n for n in step.nodes if first.name in n.inputs and n is not second]
    leaves = first.name in dict(step.outputs)
    if not chained or len(types) > 1 or read or leaves or len(first.types) > 1:
        return None
    now_first = replace(second, inputs=(first.inputs[0], *second.inputs[1:]))
    now_second = replace(first, inputs=(second.name, *first.inputs[1:]))
    names = {second.name: first.name}
    rest = tuple(reading(n, names) for n in step.nodes[index + 2 :])
    return Mutant((*step.nodes[:index], now_first, now_second, *rest), names)


def other_padding(step: Step, index: int) -> Mutant | None:
    """The step whose pool counts its padding where it should not, or the other way round."""
    node = step.nodes[index]
    if "count_padding" not in node.attrs:
        return None
    attrs = Attrs({**node.attrs, "count_padding": not node.attrs["count_padding"]})
    changed = replace(node, attrs=attrs)
    return Mutant((*step.nodes[:index], changed, *step.nodes[index + 1 :]), {})


def mutants(step: Step) -> Iterator[tuple[str, Mutant]]:
    for index, node in enumerate(step.nodes):
        if mutant := without_node(step, index):
            yield f"{node.op} left out", mutant
        if mutant := other_padding(step, index):
            yield f"{node.op} with other padding", mutant
    for index, (first, second) in enumerate(itertools.pairwise(step.nodes)):
        if mutant := swapped(step, index):
            yield f"{second.op} before {first.op}", mutant


def is_equal(step: Step, mutant: Mutant) -> bool:
    """Whether a mutant means the same: two additions may change their order."""
    data = draw_inputs(step, torch.Generator().manual_seed(7))
    wide = {n: t.double() if t.is_floating_point() else t for n, t in data.items()}
    exact, other = step.evaluate(wide), mutant.evaluate(step, wide)
    return all(torch.allclose(exact[name], other[name]) for name in other)


def check_mutant(step: Step, space) -> None:
    for seed in SEEDS:
        check(step, Candidate("mutant", Attrs()), space, seed)


@pytest.mark.parametrize("fusion", STEPS)
def test_a_step_that_is_fused_wrongly_is_seen(fusion, space, register):
    seen = set()
    for step in STEPS[fusion]:
        for what, mutant in mutants(step):
            if is_equal(step, mutant):
                continue
            register(mutant=mutant)
            with pytest.raises(WrongResult):
                check_mutant(step, space)
            seen.add(what)
    assert len(seen) >= 2, seen


def test_every_fusion_has_its_whole_path_here():
    for fusion in all_fusions():
        items = [item for item in fusion.path if isinstance(item, Item) and not item.repeats]
        found = max(len(step.nodes) for step in STEPS[fusion.name])
        optional = sum(item.optional for item in items)
        assert found > len(items) - optional, fusion.name
