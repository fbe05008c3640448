"""Each case of a table runs few configs on a GPU; all cases together must run every config."""

from __future__ import annotations

from plantune.base.canonical import Attrs
from plantune.kernels.families.layer_norm import FAMILY

from .cases import few, shares, shares_of
from .conftest import legal
from .test_layer_norm import STEPS


def pairs(configs):
    return {pair for config in configs for pair in config.items()}


def test_few_configs_have_every_value_of_every_key():
    configs = [Attrs(a=a, b=b, c=c) for a in (1, 2, 3) for b in (0, 1) for c in "xyz"]
    some = few(configs)
    assert some[0] == configs[0]
    assert len(some) <= 4
    assert pairs(some) == pairs(configs)
    assert few([]) == []


def test_a_case_begins_with_what_none_has_run():
    configs = [Attrs(a=a, b=b) for a in (0, 1) for b in (0, 1)]
    found = shares({("first", "float16"): configs, ("second", "float16"): configs})
    first, second = found.values()
    assert len(first) == len(second) == 2
    assert {*first, *second} == {*configs}


def test_what_no_case_has_run_is_run_by_the_last_that_can():
    configs = [Attrs(a=a, b=b) for a in (0, 1, 2) for b in (0, 1, 2)]
    found = shares({("all", "float16"): configs, ("one", "float16"): configs[:1]})
    assert {*found["all", "float16"]} == {*configs}
    assert found["one", "float16"] == configs[:1]


def test_the_cases_of_a_family_meet_all_of_its_configs(step_of):
    found = shares_of(FAMILY, STEPS, "sm90")
    all_legal = {
        (name, dtype): [each.config for each in legal(FAMILY, step_of(STEPS[name], dtype))]
        for name, dtype in found
    }
    met, known = (
        {(dtype, config) for (_, dtype), configs in one.items() for config in configs}
        for one in (found, all_legal)
    )
    assert met == known
    assert all(pairs(found[case]) == pairs(all_legal[case]) for case in found)
