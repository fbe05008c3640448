from __future__ import annotations

import pkgutil
from typing import ClassVar

import pytest

from plantune.base.canonical import Attrs
from plantune.errors import IllegalCandidate, PlantuneError
from plantune.kernels import families
from plantune.kernels.family import Candidate, KernelFamily, Parts
from plantune.kernels.legality import refuse
from plantune.kernels.registry import all_families, candidates, estimate_us, family_named, why_not
from plantune.space.search_space import load_search_space


def test_every_file_is_a_family_of_its_own_name():
    found = pkgutil.walk_packages(families.__path__, f"{families.__name__}.")
    modules = {item.name.rpartition(".")[2] for item in found if not item.ispkg}
    assert set(all_families()) == modules
    assert all(isinstance(family, KernelFamily) for family in all_families().values())
    assert {"framework", "view", "onednn_conv", "gemm", "inductor"} <= modules


@pytest.mark.parametrize("module", ["nowhere_to_be_found", "json"])
def test_a_users_module_without_a_family_is_named(monkeypatch, module):
    monkeypatch.setenv("PLANTUNE_FAMILIES", module)
    with pytest.raises(PlantuneError, match=f"PLANTUNE_FAMILIES names the module '{module}', wh"):
        all_families.__wrapped__()  # what is kept serves other tests


def test_families_hold_no_state():
    assert all(vars(family) == {} for family in all_families().values())


def test_every_family_has_configs_in_the_space_of_its_arch(space):
    for family in all_families().values():
        if "cpu" in family.arch_kinds:
            assert family.configs(space), family.name


def test_every_table_of_the_cpu_space_is_a_family(space):
    assert set(space.families) <= set(all_families())


class Reads(KernelFamily):
    """Counts how often it reads a step."""

    name: ClassVar = "reads"
    arch_kinds = frozenset(("cpu",))

    def __init__(self):
        self.read_steps = []

    def read(self, step):
        self.read_steps.append(step)
        refuse({"only a relu": step.ops != ("relu",)})
        return Parts(step)

    def configs(self, space):
        return tuple(Attrs(threads=threads) for threads in (1, 2, 3))

    def bind(self, parts, config, frame):
        raise AssertionError("nothing is launched")


def test_a_step_is_read_once_whatever_is_asked_of_it(step_of, space, register):
    family = Reads()
    register(reads=family)
    relu, sigmoid = (step_of(lambda b, op=op: b(op, b.x(2, 3))) for op in ("relu", "sigmoid"))
    found = candidates(relu, space)
    assert len(found) == 3
    assert all(estimate_us(relu, candidate, space.arch) > 0 for candidate in found)
    assert all(why_not(relu, candidate, space) is None for candidate in found)
    assert candidates(sigmoid, space) == ()
    assert why_not(sigmoid, found[0], space) == family.why_not_step(sigmoid) == "only a relu"
    with pytest.raises(IllegalCandidate, match="only a relu"):
        family.parts(sigmoid)
    assert family.read_steps == [relu, sigmoid]


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


@pytest.mark.usefixtures("as_with_a_compiler")
def test_a_compiler_that_is_gone_is_noticed(step_of, space, monkeypatch):
    step = step_of(lambda b: b("relu", b.conv(b.x(2, 4, 5, 5), b.w(6, 4, 1, 1))))
    for name in ("gemm", "patch_conv"):
        assert candidates(step, space, (name,))
        monkeypatch.setattr(type(family_named(name)), "why_not_config", lambda *given: "gone")
        assert candidates(step, space, (name,)) == ()


def test_candidate_json_round_trips_exactly(space):
    for family in all_families().values():
        for config in family.configs(space):
            candidate = Candidate(family.name, config)
            assert Candidate.from_json(candidate.to_json()) == candidate


def test_configs_of_other_types_are_other_candidates():
    assert Candidate("f", Attrs(a=1)) != Candidate("f", Attrs(a=True))
    assert len({Candidate("f", Attrs(a=1)), Candidate("f", Attrs(a=1.0))}) == 2
