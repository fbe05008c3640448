"""Every function and module of torch's own test lists runs from a plan, or is refused as listed."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plantune import optimize
from plantune.errors import PlantuneError
from plantune.plans.guess import framework_plan
from plantune.runtime.calls import choose
from plantune.space.search_space import load_search_space

from .torch_samples import NoSample, Sample, of_functions, of_modules

LISTED = Path(__file__).with_name("not_planned.txt")
PARTS = 8
# Nothing is written to what these make.
EMPTY = {"empty_like", "new_empty", "new_empty_strided"}
# Their samples seed torch's generator in the function itself, which is not an operation of a plan.
SEEDED = {"bernoulli", "normal", "rand_like", "randint_like", "randn_like", "nn.functional.rrelu"}


def listed(*kinds: str) -> set[str]:
    lines = (line.split(maxsplit=1) for line in LISTED.read_text().splitlines())
    return {words[1] for words in lines if len(words) == 2 and words[0] in kinds}


def outputs(sample: Sample, module: torch.nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    with torch.no_grad():
        made = module(*(tensor.clone() for tensor in sample.tensors))
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]


def why_not(sample: Sample) -> str | None:
    """None if the sample runs from its default plan, as eager does with the same seed."""
    try:
        graph = optimize(sample.module, *sample.tensors).pool().graph
        if not graph.nodes:
            return None  # It returns its input.
        plan = framework_plan(graph, load_search_space("cpu"), network=sample.name)
        tuned = optimize(sample.module, *sample.tensors, plan=plan, fallback="silent")
        outputs(sample, tuned)  # the first call makes the program
    except (PlantuneError, ValueError) as error:
        return str(error)
    ours, theirs = outputs(sample, tuned), outputs(sample, sample.module)
    assert tuned.last_call().how == "planned", sample.name
    if sample.name not in EMPTY | SEEDED:
        torch.testing.assert_close(ours, theirs, equal_nan=True, msg=lambda m: sample.name + m)
    return None


def refused(samples, part: int) -> dict[str, str]:
    found = {}
    for make in itertools.islice(samples, part, None, PARTS):
        torch.manual_seed(0)
        try:
            sample = make()
        except NoSample:  # torch has none for this dtype
            continue
        reason = why_not(sample)
        if reason is not None:
            found[sample.name] = reason
    return found


def names(samples, part: int) -> set[str]:
    return {make.keywords["name"] for make in itertools.islice(samples, part, None, PARTS)}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("kind", "of"), [("function", of_functions), ("module", of_modules)])
def test_what_is_not_planned_is_listed(kind, of, part, monkeypatch) -> None:
    """What is on the list without need fails, too."""
    pytest.importorskip("expecttest")  # torch's lists import it
    # Samples are judged here: a proof would draw numbers that many functions do not take.
    monkeypatch.setattr(choose, "is_proved", lambda *_: True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated functions say so
        asked, found = names(of(), part), refused(of(), part)
    known = listed(kind, f"{kind}?")  # those with ? beside some releases of torch
    assert {name: why for name, why in found.items() if name not in known} == {}
    assert (listed(kind) & asked) - set(found) == set()
