"""Random small networks: any legal partition with any legal candidates gives torch's results."""

from __future__ import annotations

import pytest

from plantune.graph.fusions import all_fusions, groups_from
from plantune.graph.ops import OPS
from plantune.kernels.family import KernelFamily
from plantune.kernels.registry import all_families

# No module here runs over time.
SCANS = {f"{cell}_scan{grad}" for cell in ("gru", "lstm") for grad in ("", "_grad")}
# In 16 bits alone.
SHORT = {"add_apart", "apart_grad", "batch_norm_again", "max_pool2d_taps", "max_pool2d_taps_grad"}
# A Function's own backward pass: the first is gone once a graph is differentiated, the second
# keeps a result of one apart (tests/runtime/test_functions.py).
FUNCTIONS = {"own_gradient", "identity"}
UNUSED = {"gru_translate", *SCANS, *SHORT, *FUNCTIONS}
MODES = ("infer", "eval", "train")
# The last for the fusion that no other has by chance: a batch norm with what follows it.
SEEDS = (*range(25), 41)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_any_plan_of_any_network_is_right(case_of, poisoned, space, why_wrong, seed, mode):
    case = case_of(seed, mode)
    program = poisoned(case.graph, case.plan, space)
    assert why_wrong(case, case.run(program)) is None
    assert why_wrong(case, case.run(program)) is None, "in the second pass"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_any_plan_with_branches_is_right(case_of, poisoned, space, why_wrong, lanes, seed, mode):
    """Whether they run as early or as late as they may."""
    case = case_of(seed, mode)
    program = poisoned(case.graph, case.plan, space, lanes)
    assert why_wrong(case, case.run(program)) is None
    assert why_wrong(case, case.run(program)) is None, "in the second pass"


def test_these_networks_use_every_op_family_and_fusion(case_of, space):
    cases = [case_of(seed, mode) for seed in SEEDS for mode in MODES]
    used = {choice.candidate.family for case in cases for choice in case.plan.choices}
    compiled = {n for n, f in all_families().items() if type(f).build is not KernelFamily.build}
    assert used >= all_families().keys() - compiled
    assert {node.op for case in cases for node in case.graph.nodes} >= set(OPS) - UNUSED
    for fusion in all_fusions():
        assert any(
            set(choice.nodes) in [set(group) for group in groups_from(case.graph, node, fusion)]
            for case in cases
            for choice in case.plan.choices
            if len(choice.nodes) > 1
            for node in case.graph.nodes
            if node.name in choice.nodes
        ), fusion.name


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(100, 300))
def test_any_plan_of_many_more_networks_is_right(case_of, poisoned, space, why_wrong, seed, mode):
    case = case_of(seed, mode)
    assert why_wrong(case, case.run(poisoned(case.graph, case.plan, space))) is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_any_plan_with_compiled_kernels_is_right(case_of, poisoned, space, why_wrong, seed, mode):
    case = case_of(seed, mode, compiled=True)
    assert why_wrong(case, case.run(poisoned(case.graph, case.plan, space))) is None
