from __future__ import annotations

import copy
import json
from dataclasses import fields, replace

import pytest

from plantune.base.canonical import Attrs
from plantune.errors import InvalidPlan
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.plans.guess import framework_plan
from plantune.plans.plan import LIVE_ROUTES, Plan
from plantune.plans.problem import Problem
from plantune.plans.step_times import StepTimes
from plantune.plans.written_words import FROZEN_ROUTE, ROUTE


def test_json_round_trips_exactly(plan):
    again = Plan.loads(plan.dumps())
    assert again == plan
    assert again.dumps() == plan.dumps()
    assert again.digest == plan.digest
    assert again.evidence["ratio"] == 0.1 + 0.2
    assert type(again.evidence["clean"]) is bool
    assert len({choice.candidate.family for choice in plan.choices}) > 2
    assert max(len(choice.nodes) for choice in plan.choices) > 2


def test_json_of_a_default_plan_round_trips(graph, space):
    plan = framework_plan(graph, space, network="block")
    assert Plan.loads(plan.dumps()) == plan


def test_a_plan_without_branches_and_call_is_written_as_ever(plan):
    """Earlier releases read it, and what they wrote keeps its text and digest."""
    line = replace(plan, branches=False, problem=plan.problem.key)
    data = line.to_json()
    assert data["format"] == 1
    assert not {"branches", "call"} & set(data)
    assert Plan.loads(line.dumps()) == line


def test_a_route_for_frozen_weights_is_a_format_of_its_own(plan):
    frozen = replace(plan, frozen_route="torchscript", problem=plan.problem.key)
    assert frozen.to_json()["format"] == 3
    assert Plan.loads(frozen.dumps()) == frozen
    assert (frozen.route_for(frozen=True), frozen.route_for(frozen=False)) == (
        "torchscript",
        plan.route,
    )
    assert plan.route_for(frozen=True) == plan.route


@pytest.mark.parametrize("route", LIVE_ROUTES)
def test_whoever_runs_it_is_read_again(plan, route):
    other = replace(plan, route=route)
    assert Plan.loads(other.dumps()) == other


def test_a_way_that_freezes_weights_runs_no_live_plan(plan):
    frozen = replace(plan, route="torchscript")
    with pytest.raises(InvalidPlan, match="runner: must be one of"):
        Plan.loads(frozen.dumps())


def test_dumps_is_canonical(plan):
    spaced = json.dumps(dict(reversed(json.loads(plan.dumps()).items())), indent=3)
    assert Plan.loads(spaced).dumps() == plan.dumps()


CHANGES = {
    "network": "other",
    "graph": "0" * 64,
    "arch": "sm90",
    "batch": 3,
    "dtype": "bfloat16",
    "mode": "train",
    "call": (("x", TensorType((2, 4, 6, 7))),),
    "order": (),
    "precisions": ("tf32", "ieee", "tf32"),
    "choices": (),
    "origin": "measured",
    "route": "eager",
    "branches": False,
    "frozen_route": "torchscript",
    "evidence": Attrs(),
}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_the_digest(plan, field):
    assert set(CHANGES) == set(FIELDS)
    other = {field: CHANGES[field]}
    if field not in OF_PLAN:
        other = {"problem": replace(plan.problem, **other)}
    assert replace(plan, **other).digest != plan.digest


TIMES = StepTimes(12.5, 3.25, (Candidate("gemm", Attrs(tile_m=64)), 13.75))


def timed(plan, times=TIMES):
    first, *rest = plan.choices
    return replace(plan, choices=(replace(first, times=times), *rest))


@pytest.mark.parametrize("times", [TIMES, StepTimes(12.5, 0.0)])
def test_a_choice_brings_what_a_search_measured_of_it(plan, times):
    """Plans are equal without that; it is in the text and the digest."""
    made = timed(plan, times)
    again = Plan.loads(made.dumps())
    assert again.choices[0].times == times
    assert again == plan
    assert (again.dumps(), again.digest) == (made.dumps(), made.digest)
    assert again.digest != plan.digest
    old = timed(replace(plan, branches=False, problem=plan.problem.key), times)
    assert old.to_json()["format"] == 4
    assert Plan.loads(old.dumps()).choices[0].times == times


OTHER = {"family": "gemm", "config": {}, "us": 2.0}
FALSE_TIMES = {
    "a number": 12.5,
    "nothing": {},
    "a field too many": {"us": 1.0, "roofline_us": 1.0, "runner_up": None, "run": 1},
    "an integer": {"us": 1, "roofline_us": 1.0, "runner_up": None},
    "a negative time": {"us": -1.0, "roofline_us": 1.0, "runner_up": None},
    "a text": {"us": 1.0, "roofline_us": "1", "runner_up": None},
    "a runner-up without time": {"us": 1.0, "roofline_us": 1.0, "runner_up": {"family": "gemm"}},
    "a family as a list": {"us": 1.0, "roofline_us": 1.0, "runner_up": {**OTHER, "family": []}},
    "null in a config": {
        "us": 1.0,
        "roofline_us": 1.0,
        "runner_up": {**OTHER, "config": {"a": None}},
    },
}


@pytest.mark.parametrize("name", FALSE_TIMES)
def test_times_that_nobody_measured_are_refused_with_their_place(plan, name):
    data = timed(plan).to_json()
    data["choices"][0]["times"] = FALSE_TIMES[name]
    with pytest.raises(InvalidPlan, match=r"choices\[0\]\.times: "):
        Plan.loads(json.dumps(data))


CHOICE_CHANGES = {
    "nodes": lambda c: replace(c, nodes=(*c.nodes, "another")),
    "order of nodes": lambda c: replace(c, nodes=(*c.nodes[1:], c.nodes[0])),
    "family": lambda c: replace(c, candidate=replace(c.candidate, family="other")),
    "config": lambda c: replace(c, candidate=replace(c.candidate, config=Attrs(layout="x"))),
    "config's type": lambda c: replace(
        c, candidate=replace(c.candidate, config=Attrs({**c.candidate.config, "prepack": 1}))
    ),
}


@pytest.mark.parametrize("change", CHOICE_CHANGES)
def test_every_part_of_a_choice_changes_the_digest(plan, change):
    index = next(i for i, choice in enumerate(plan.choices) if len(choice.nodes) > 1)
    changed = CHOICE_CHANGES[change](plan.choices[index])
    choices = (*plan.choices[:index], changed, *plan.choices[index + 1 :])
    assert replace(plan, choices=choices).digest != plan.digest


def test_the_order_of_choices_changes_the_digest(plan):
    assert replace(plan, choices=plan.choices[::-1]).digest != plan.digest


def put(value, *path):
    """A change of a plan's JSON: the value at a path."""

    def change(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def drop(*path):
    def change(data):
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


OF_PLAN = [field.name for field in fields(Plan) if field.name != "problem"]
FIELDS = [*(field.name for field in fields(Problem) if field.name != "earlier"), *OF_PLAN]
# Keys of JSON that are not called as the fields are.
WRITTEN = {"route": ROUTE, "frozen_route": FROZEN_ROUTE}
KEYS = [WRITTEN.get(name, name) for name in FIELDS]
X = {"shape": [2, 4, 6, 6], "dtype": "float32", "layout": "nchw"}
BROKEN = {
    **{f"no {key}": (drop(key), f"missing or unknown: {key}") for key in ("format", *KEYS)
       if key not in ("branches", "frozen_runner", "call", "order", "precisions")},
    **{f"choice without {key}": (drop("choices", 1, key), rf"choices\[1\].*unknown: {key}")
       for key in ("nodes", "family", "config")},
    "an unknown field": (put(1, "python"), "fields missing or unknown: python"),
    "an unknown field in a choice": (put("rm", "choices", 0, "run"), r"choices\[0\].*unknown: run"),
    "another format": (put(3, "format"), "format: this plantune reads 5, got 3"),
    "format as a string": (put("1", "format"), "plan.format: must be int, got '1'"),
    "format as a bool": (put(True, "format"), "plan.format: must be int, got True"),
    "batch as a bool": (put(True, "batch"), "plan.batch: must be int, got True"),
    "batch as a float": (put(2.0, "batch"), "plan.batch: must be int, got 2.0"),
    "batch as a string": (put("2", "batch"), "plan.batch: must be int"),
    "batch as null": (put(None, "batch"), "plan.batch: must be int, got None"),
    "no batch at all": (put(0, "batch"), "batch: must be 1 or more, got 0"),
    "a negative batch": (put(-1, "batch"), "batch: must be 1 or more, got -1"),
    "network as a number": (put(3, "network"), "plan.network: must be str"),
    "graph as a list": (put([], "graph"), "plan.graph: must be str"),
    "another mode": (put("test", "mode"), "mode: must be one of infer, train, got 'test'"),
    "a field that its format lacks": (put(1, "format"), "format: this plantune reads 5, got 1"),
    "no field that its format has": (drop("order"), "format: this plantune reads 4, got 5"),
    "an order as an object": (put({}, "order"), "plan.order: must be list"),
    "an empty order": (put([], "order"), "order: must be names of nodes, each once"),
    "a number in the order": (put(7, "order", 0), "order: must be names of nodes, each once"),
    "a node that is not in order": (put("a", "order", 0), "order: must have each node"),
    "a call as an object": (put({}, "call"), "plan.call: must be list"),
    "a call without a tensor": (put([["n", 1]], "call"), "call: must hold a tensor"),
    "an argument twice": (put([["x", X], ["x", 1]], "call"), "call: must hold .* each name once"),
    "an argument without a name": (put([X], "call"), "call: "),
    "a number as a name": (put([[1, X]], "call"), "call: an argument's name must be a text"),
    "a list as an argument": (put([["x", []]], "call"), "call: an argument must be a tensor's"),
    "half a type": (put([["x", {"shape": []}]], "call"), "call: an argument must be a tensor's"),
    "a size as a text": (put([["x", {**X, "shape": ["2"]}]], "call"), "call: shape"),
    "an unknown dtype": (put([["x", {**X, "dtype": "int7"}]], "call"), "call: dtype 'int7'"),
    "a dtype as a list": (put([["x", {**X, "dtype": []}]], "call"), "call: "),
    "a call of another batch": (put([["x", {**X, "shape": [3]}]], "call"), "call: needs the batch"),
    "branches that are none": (put(False, "branches"), "branches: must be true or left out"),
    "branches as a number": (put(1, "branches"), "plan.branches: must be bool, got 1"),
    "another runner": (put("compiled", "runner"), "runner: must be one of .*got 'compiled'"),
    "another origin": (put("guess", "origin"), "origin: must be one of .*got 'guess'"),
    "choices as an object": (put({}, "choices"), "plan.choices: must be list"),
    "a choice as a list": (put([], "choices", 0), r"choices\[0\]: must be an object, got list"),
    "no nodes": (put([], "choices", 0, "nodes"), r"choices\[0\].nodes: must be names"),
    "nodes as a string": (put("add", "choices", 0, "nodes"), r"choices\[0\].nodes: must be list"),
    "a node twice": (put(["relu"] * 2, "choices", 0, "nodes"), r"choices\[0\].nodes: .*each once"),
    "a node as a number": (put([7], "choices", 0, "nodes"), r"choices\[0\].nodes: must be names"),
    "family as null": (put(None, "choices", 0, "family"), r"choices\[0\].family: must be str"),
    "config as a list": (put([], "choices", 0, "config"), r"choices\[0\].config: must be dict"),
    "null in a config": (put({"layout": None}, "choices", 0, "config"), r"choices\[0\].config"),
    "an object in a config": (put({"a": {}}, "choices", 0, "config"), r"choices\[0\].config: a"),
    "floats in a sequence": (put({"a": [1.5]}, "choices", 0, "config"), r"choices\[0\].config: a"),
    "bools in a sequence": (put({"a": [True]}, "choices", 0, "config"), r"choices\[0\].config: a"),
    "evidence as a list": (put([], "evidence"), "plan.evidence: must be dict"),
    "an object in the evidence": (put({"a": {"b": 1}}, "evidence"), "evidence: a"),
    "a list in the evidence": (put({"a": [[1]]}, "evidence"), "evidence: a"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_refused_with_the_place(plan, name):
    change, message = BROKEN[name]
    data = copy.deepcopy(plan.to_json())
    change(data)
    with pytest.raises(InvalidPlan, match=message):
        Plan.loads(json.dumps(data))


TEXTS = {
    "nothing": "",
    "blanks": "  \n",
    "no JSON": "plan",
    "null": "null",
    "a number": "1",
    "a list": "[]",
    "an empty object": "{}",
    "two objects": "{}{}",
    "deep lists": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "a byte order mark": "\ufeff{}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_not_a_plan_is_refused(name):
    with pytest.raises(InvalidPlan):
        Plan.loads(TEXTS[name])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize("place", ["batch", "evidence", "config"])
def test_numbers_without_a_value_are_refused(plan, number, place):
    text = plan.dumps()
    broken = {
        "batch": text.replace('"batch":2', f'"batch":{number}'),
        "evidence": text.replace('"evidence":{', f'"evidence":{{"a":{number},'),
        "config": text.replace('"config":{', f'"config":{{"tile_m":{number},', 1),
    }[place]
    assert broken != text
    with pytest.raises(InvalidPlan):
        Plan.loads(broken)


def test_a_plan_that_names_a_field_twice_is_refused(plan):
    """JSON would take the last one, a reader's eye the first."""
    text = plan.dumps().replace('"batch":2', '"batch":64,"batch":2')
    with pytest.raises(InvalidPlan, match="batch"):
        Plan.loads(text)


@pytest.mark.parametrize("every", [7])
def test_a_truncated_plan_is_refused(plan, every):
    text = plan.dumps()
    for end in range(0, len(text), every):
        with pytest.raises(InvalidPlan):
            Plan.loads(text[:end])


def test_the_call_may_have_several_tensors_and_plain_values(plan):
    """In their order; batch and dtype are those of the first tensor."""
    arguments = (0.5, None, True, "mean", 3, TensorType((2, 7), "int64"), TensorType((9,)))
    call = tuple((f"argument_{n}", value) for n, value in enumerate(arguments))
    other = replace(plan, problem=replace(plan.problem, dtype="int64", call=call))
    again = Plan.loads(other.dumps())
    assert again == other
    assert [type(value) for _, value in again.problem.call] == [*map(type, arguments)]
    assert [name for name, _ in again.problem.tensors] == ["argument_5", "argument_6"]
    assert again.problem.call_text.endswith(", argument_5 2x7 int64, argument_6 9 float32")


def test_a_plan_of_flipped_bytes_is_refused_or_another_plan(plan):
    """Never another error, never the same plan; and what is read is written as it was read."""
    # Of a float, other digits may be the same number.
    plan = replace(plan, evidence=Attrs(seeds=(0, 1), clean=True))
    raw = plan.dumps().encode()
    for place in range(0, len(raw), 11):
        for bit in (0x01, 0x20, 0x80):
            flipped = bytearray(raw)
            flipped[place] ^= bit
            try:
                other = Plan.loads(flipped.decode("utf-8", errors="replace"))
            except InvalidPlan:
                continue
            assert other != plan
            assert Plan.loads(other.dumps()) == other
