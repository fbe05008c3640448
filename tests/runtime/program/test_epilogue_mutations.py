"""An epilogue that is misread or misfolded is seen by the check and by a program."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from importlib import import_module

import pytest

from plantune.errors import WrongResult
from plantune.graph.fusions import all_fusions
from plantune.kernels import families
from plantune.kernels.cpu import onednn
from plantune.kernels.cpu.folded import Folded
from plantune.kernels.family import _reading
from plantune.kernels.patterns import epilogue as epilogue_module
from plantune.kernels.patterns.epilogue import ConvEpilogue
from plantune.kernels.registry import candidates
from plantune.measure.numerics import check
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import Preference, compose
from plantune.runtime.program.program import Program

from .fused_steps import STEPS

CONV_FAMILIES = ("onednn_conv", "gemm")
PREFERENCES = tuple(map(Preference, CONV_FAMILIES))


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
        program = Program(check_plan(plan, case.graph, space))
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
