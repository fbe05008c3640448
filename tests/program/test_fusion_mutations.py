"""Every fusion matters: a step that is fused wrongly is seen by the check and by a program."""

from __future__ import annotations

import itertools
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import ClassVar

import pytest
import torch
from torch import nn

from plantune.canonical import Attrs
from plantune.default_plans import Preference, compose
from plantune.errors import WrongResult
from plantune.graph.differentiate import differentiate
from plantune.graph.extract import extract
from plantune.graph.fusions import Item, all_fusions, groups_from
from plantune.graph.graph import Graph, Node
from plantune.graph.partition import why_not_group
from plantune.graph.step import Step, make_step
from plantune.graph.types import TensorType
from plantune.kernels import families, onednn
from plantune.kernels.family import Binding, Candidate, KernelFamily, Parts, _reading
from plantune.kernels.folded import Folded
from plantune.kernels.patterns import epilogue as epilogue_module
from plantune.kernels.patterns.epilogue import ConvEpilogue
from plantune.kernels.registry import candidates
from plantune.layers import SpaceToDepth
from plantune.measure.inputs import draw_inputs
from plantune.measure.numerics import check
from plantune.models.resnet import BasicBlock
from plantune.models.se_resnet9 import FixupBlock
from plantune.runtime.program import Program

# One may draw numbers that a single ReLU leaves as they are.
SEEDS = (0, 1, 2)
CONV_FAMILIES = ("onednn_conv", "gemm")
PREFERENCES = tuple(map(Preference, CONV_FAMILIES))


class Stem(nn.Module):
    """What the other networks lack: the stem with a bias, and pooling before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(SpaceToDepth(2), nn.Conv2d(12, 8, 1), nn.ReLU())
        self.offset = nn.Parameter(torch.ones(1))
        self.down = nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Conv2d(8, 6, 1))
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        return torch.relu(self.fc(self.down(self.stem(x) + self.offset).mean((2, 3))))


class Pixels(nn.Module):
    """A stem behind what makes numbers of its images' pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        self.mean = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x):
        return self.stem(x / 16 - self.mean)


class Scaled(nn.Module):
    """A convolution with every part of an epilogue, twice, the second time as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(4, 4, 1, bias=False)
        self.scale, self.bias, self.offset = (nn.Parameter(torch.ones(1)) for _ in range(3))

    def forward(self, x):
        y = torch.relu(self.conv1(x) * self.scale + self.bias + x) + self.offset
        return torch.relu(self.conv2(y) * self.scale + self.bias) + self.offset


class Normed(nn.Module):
    """A group norm with all that may follow one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        return torch.relu(self.norm(x) + x)


class Joined(nn.Module):
    """Images one after the other, normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu(self.norm(torch.cat((x, x.sigmoid()), 1)))


def graphs() -> Iterator[Graph]:
    """Graphs in which every shipped fusion has its longest path, without and with gradients."""
    for module, shape in (
        (FixupBlock(16, 16, 1), (2, 16, 4, 4)),
        (FixupBlock(16, 32, 2), (2, 16, 4, 4)),
        (BasicBlock(4, 4, 1), (2, 4, 4, 4)),
        (Stem(), (2, 3, 8, 8)),
        (Pixels(), (2, 3, 8, 8)),
        (Scaled(), (2, 4, 5, 5)),
        (Normed(), (2, 4, 3, 3)),
        (Joined(), (2, 4, 3, 3)),
    ):
        yield extract(module.eval(), TensorType(shape))
        graph = extract(module.train(), TensorType(shape), fold=False)
        yield differentiate(graph, ["x", *(name for name, _ in graph.parameters)])


def longest_steps(fusion, graph) -> Iterator[Step]:
    """The longest group that a fusion offers from each node."""
    for node in graph.nodes:
        groups = [g for g in groups_from(graph, node, fusion) if why_not_group(graph, g) is None]
        if groups:
            yield make_step(graph, max(groups, key=len))


GRAPHS = tuple(graphs())
STEPS = {
    fusion.name: [step for graph in GRAPHS for step in longest_steps(fusion, graph)]
    for fusion in all_fusions()
}


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
def test_a_step_that_is_fused_wrongly_is_seen(fusion, space, monkeypatch):
    seen = set()
    for step in STEPS[fusion]:
        for what, mutant in mutants(step):
            if is_equal(step, mutant):
                continue
            monkeypatch.setattr(
                "plantune.kernels.registry.all_families", lambda mutant=mutant: {"mutant": mutant}
            )
            monkeypatch.setattr("plantune.kernels.build._built", {})
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


def without(epilogue: ConvEpilogue, part: str, **changes: str | None) -> ConvEpilogue:
    """The same without a part of what follows the sums."""
    chain = tuple(each for each in epilogue.chain if each != part)
    return replace(epilogue, chain=chain, **changes)


def with_late_bias(epilogue: ConvEpilogue) -> ConvEpilogue:
    """Its bias is added last, unless there is an offset."""
    offset = epilogue.offset or epilogue.bias
    chain = (*without(epilogue, "offset").chain, *(("offset",) if offset else ()))
    return replace(epilogue, bias=None, offset=offset, chain=chain)


# Wrong readings of an epilogue, as every family with a convolution would get them.
MISREADINGS = {
    "the scale is dropped": lambda e: replace(e, scale=None),
    "the bias is dropped": lambda e: replace(e, bias=None),
    "the residual is dropped": lambda e: without(e, "residual", residual=None),
    "the ReLU is dropped": lambda e: without(e, "relu"),
    "the offset is dropped": lambda e: without(e, "offset", offset=None),
    "the offset is a bias": lambda e: without(e, "offset", offset=None, bias=e.bias or e.offset),
    "the bias is an offset": with_late_bias,
    "scale and bias change places": lambda e: replace(e, scale=e.bias, bias=e.scale),
    "the input is the residual": lambda e: replace(e, residual=e.residual and e.conv.inputs[0]),
}


class BiasFirst(Folded):
    """(conv + bias) * scale instead of conv * scale + bias."""

    def refresh(self):
        super().refresh()
        scale = self._epilogue.scale
        if self.bias is not None and scale is not None:
            self.bias = self.bias * self._values[scale].view(self._bias_shape)


class ReluLast(Folded):
    """relu(v + offset) instead of relu(v) + offset."""

    def refresh(self):
        super().refresh()
        self.offset = 0.0


class WithoutBias(Folded):
    """max(v, offset) instead of relu(v) + offset."""

    def __init__(self, epilogue, *arguments, **options):
        super().__init__(epilogue, *arguments, **options)
        self._biases = (epilogue.bias, None)


original_reading = epilogue_module.conv_epilogue
FOLDINGS = (BiasFirst, ReluLast, WithoutBias)


@pytest.fixture
def everywhere(monkeypatch):
    """Replaces a function of the epilogue in every family that uses it."""

    def patch(name, function):
        found = pkgutil.walk_packages(families.__path__, f"{families.__name__}.")
        for module in (epilogue_module, onednn, *(import_module(each.name) for each in found)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)
        monkeypatch.setattr("plantune.kernels.build._built", {})
        _reading.cache_clear()

    yield patch
    _reading.cache_clear()


def wrong_families(space, everything) -> set[str]:
    """Families of convolutions of which the check refuses some candidate of some step."""
    wrong = set()
    for step in everything:
        for candidate in candidates(step, space):
            if candidate.family in CONV_FAMILIES:
                try:
                    check(step, candidate, space)
                except (WrongResult, RuntimeError):
                    wrong.add(candidate.family)
    return wrong


@pytest.fixture(scope="module")
def conv_steps():
    """Convolutions with all parts, from networks."""
    steps = [s for s in STEPS["conv_epilogue"] if s.ops[0] == "conv2d" and s.phase == "forward"]
    return [s for s in steps if len(s.nodes) > 2]


def test_the_families_are_right_without_a_mutation(space, conv_steps):
    assert wrong_families(space, conv_steps) == set()
    assert {c.family for s in conv_steps for c in candidates(s, space)} >= set(CONV_FAMILIES)


@pytest.mark.parametrize("name", MISREADINGS)
def test_a_misread_epilogue_is_seen_by_the_check(space, conv_steps, everywhere, name):
    everywhere(
        "conv_epilogue", lambda step, **how: MISREADINGS[name](original_reading(step, **how))
    )
    assert wrong_families(space, conv_steps) >= set(CONV_FAMILIES)


@pytest.mark.parametrize("folding", FOLDINGS)
def test_a_misfolded_epilogue_is_seen_by_the_check(space, conv_steps, everywhere, folding):
    everywhere("Folded", folding)
    assert wrong_families(space, conv_steps) >= set(CONV_FAMILIES)


@pytest.fixture
def breaks(case_of, space, why_wrong):
    """Whether the program of a random network that fuses all it can is wrong."""

    def run(seed: int) -> bool:
        case = case_of(seed, "infer")
        plan = compose(
            case.graph, space, network="", fusions=all_fusions(), preferences=PREFERENCES
        )
        program = Program(case.graph, plan, space)
        try:
            return why_wrong(case, case.run(program)) is not None
        except RuntimeError:
            return True

    return run


@pytest.mark.parametrize("name", [*MISREADINGS, *(f.__name__ for f in FOLDINGS)])
def test_a_mutation_breaks_a_random_network(breaks, everywhere, name):
    folding = {f.__name__: f for f in FOLDINGS}.get(name)
    if folding is not None:
        everywhere("Folded", folding)
    else:
        everywhere(
            "conv_epilogue", lambda step, **how: MISREADINGS[name](original_reading(step, **how))
        )
    assert any(map(breaks, range(60)))


def test_without_a_mutation_no_random_network_breaks(breaks):
    assert not any(map(breaks, range(60)))
