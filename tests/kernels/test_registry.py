from __future__ import annotations

import pkgutil

import pytest

from plantune.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.kernels import families
from plantune.kernels.family import Candidate, KernelFamily
from plantune.kernels.registry import all_families, candidates, family_named, why_not
from plantune.space.search_space import load_search_space


def test_every_file_is_a_family_of_its_own_name():
    modules = {module.name for module in pkgutil.iter_modules(families.__path__)}
    assert set(all_families()) == modules
    assert all(isinstance(family, KernelFamily) for family in all_families().values())
    assert {"framework", "view", "onednn_conv", "gemm", "inductor"} <= modules


def test_families_hold_no_state():
    assert all(vars(family) == {} for family in all_families().values())


def test_every_family_has_configs_in_the_space_of_its_arch(space):
    for family in all_families().values():
        if "cpu" in family.arch_kinds:
            assert family.configs(space), family.name


def test_every_table_of_the_cpu_space_is_a_family(space):
    assert set(space.families) <= set(all_families())


def test_an_unknown_family_is_named_with_the_known_ones(step_of, space):
    with pytest.raises(IllegalCandidate, match=r"called 'cudnn'; known: .*framework.*view"):
        family_named("cudnn")
    step = step_of(lambda b: b("relu", b.x(2, 3)))
    assert "no kernel family is called 'cudnn'" in why_not(step, Candidate("cudnn", Attrs()), space)


def test_candidates_are_exactly_what_nothing_speaks_against(step_of, space):
    step = step_of(lambda b: b("relu", b.conv(b.x(2, 4, 5, 5), b.w(6, 4, 1, 1))))
    legal = candidates(step, space)
    assert len(set(legal)) == len(legal) > 4
    everything = [
        Candidate(family.name, config)
        for family in all_families().values()
        for config in family.configs(space)
    ]
    assert tuple(c for c in everything if why_not(step, c, space) is None) == legal


def test_a_family_of_another_arch_is_refused(step_of):
    step = step_of(lambda b: b("relu", b.conv(b.x(2, 4, 5, 5), b.w(6, 4, 1, 1))))
    space = load_search_space("sm90")
    assert all("cuda" in family_named(c.family).arch_kinds for c in candidates(step, space))
    reason = family_named("gemm").why_not_arch(space.arch)
    assert reason == "gemm runs on cpu, not on cuda"


def test_candidate_json_round_trips_exactly(space):
    for family in all_families().values():
        for config in family.configs(space):
            candidate = Candidate(family.name, config)
            assert Candidate.from_json(candidate.to_json()) == candidate


def test_configs_of_other_types_are_other_candidates():
    assert Candidate("f", Attrs(a=1)) != Candidate("f", Attrs(a=True))
    assert len({Candidate("f", Attrs(a=1)), Candidate("f", Attrs(a=1.0))}) == 2
