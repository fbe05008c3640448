"""What eager runs as one call is one call of the framework's, too."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plantune.base.canonical import Attrs
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.kernels.families.framework import FAMILY
from plantune.kernels.family import Frame
from plantune.kernels.one_call import calls_in, is_one_call
from plantune.measure.inputs import draw_inputs
from plantune.plans.guess import framework_plan, framework_plans, hand_plan
from plantune.plans.planner.candidates import step_candidates
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

NCHW, NHWC = Attrs(layout="nchw"), Attrs(layout="nhwc")


class Counting(TorchDispatchMode):
    """The overloads of torch that ran."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def biased_conv(b, **attrs):
    y = b.conv(b.x(2, 4, 6, 6), b.w(6, 4 // attrs.get("groups", 1), 3, 3), **attrs)
    return b("add_channel", y, b.w(6), axis=1)


def biased_product(b):
    return b("add_channel", b.linear(b.x(5, 3), b.w(4, 3)), b.w(4), axis=1)


def launched(step, config):
    """What a launch runs, and what it makes where each output was NaN before."""
    parts = FAMILY.parts(step)
    values = draw_inputs(step, torch.Generator().manual_seed(0))
    expected = step.evaluate(dict(values))
    for name, type_ in step.outputs:
        unwritten = torch.full(type_.shape, float("nan"))
        values[name] = unwritten if type_.is_float else torch.zeros_like(expected[name])
        values[name] = values[name].to(type_.torch_dtype)
    workspace = torch.empty(FAMILY.workspace_bytes(parts, config), dtype=torch.uint8)
    binding = FAMILY.bind(parts, config, Frame(values, workspace))
    for _ in range(2):
        with Counting() as counting:
            binding.launch(0)
    for name, type_ in step.outputs:
        rounding = torch.finfo(type_.torch_dtype).eps if type_.is_float else 0.0
        torch.testing.assert_close(values[name], expected[name], rtol=0, atol=16 * rounding)
    return counting.ran, values


@pytest.mark.parametrize("config", [NCHW, NHWC])
@pytest.mark.parametrize("attrs", [{}, {"padding": (1, 0), "stride": (2, 1)}, {"groups": 2}])
def test_a_convolution_adds_its_bias_itself(step_of, attrs, config):
    step = step_of(lambda b: biased_conv(b, **attrs))
    ran, values = launched(step, config)
    assert ran.count("convolution") == 1
    assert "add" not in ran
    assert "conv2d" not in values
    assert FAMILY.adopts(FAMILY.parts(step), config) == {"add_channel"}
    dense = torch.channels_last if config == NHWC else torch.contiguous_format
    assert values["add_channel"].is_contiguous(memory_format=dense)


def test_a_product_adds_its_bias_itself_in_the_given_memory(step_of):
    step = step_of(biased_product)
    ran, _ = launched(step, NCHW)
    assert "addmm" in ran
    assert not {"add", "mm"} & set(ran)
    assert FAMILY.adopts(FAMILY.parts(step), NCHW) == set()
    assert FAMILY.workspace_bytes(FAMILY.parts(step), NCHW) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_bias_is_added_before_the_result_is_rounded(step_of, dtype):
    """As in eager: the same bits."""
    _, values = launched(step_of(biased_product, dtype), NCHW)
    theirs = torch.nn.functional.linear(*(values[name] for name in ("x0", "w0", "w1")))
    assert torch.equal(values["add_channel"], theirs)


APART = {
    "of rows": lambda b: b("add_channel", b.linear(b.x(5, 3), b.w(4, 3)), b.w(5), axis=0),
    "read twice": lambda b: b(
        "add", y := b.linear(b.x(5, 3), b.w(4, 3)), b("add_channel", y, b.w(4), axis=1)
    ),
    "of something else": lambda b: b(
        "add", b.linear(b.x(5, 3), b.w(4, 3)), b("add_channel", b.x(5, 4), b.w(4), axis=1)
    ),
    "of integers": lambda b: b(
        "add_channel",
        b("matmul", b.x(5, 3, dtype="int64"), b.x(3, 4, dtype="int64"), transpose_a=False,
          transpose_b=False),
        b.x(4, dtype="int64"),
        axis=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("emit", APART.values(), ids=APART)
def test_other_ops_run_one_by_one(step_of, emit):
    step = step_of(emit)
    assert [len(nodes) for nodes in calls_in(step)] == [1] * len(step.nodes)
    assert not is_one_call(step, "cpu")
    assert "addmm" not in launched(step, NCHW)[0]


def test_a_product_that_leaves_the_step_is_made(step_of):
    step = step_of(
        lambda b: (y := b.linear(b.x(5, 3), b.w(4, 3)), b("add_channel", y, b.w(4), axis=1))
    )
    assert [len(nodes) for nodes in calls_in(step)] == [1, 1]
    launched(step, NCHW)


def test_in_a_longer_step_too(step_of):
    step = step_of(lambda b: b("relu", biased_conv(b)))
    ran, _ = launched(step, NHWC)
    assert ran.count("convolution") == 1
    assert "add" not in ran


def test_cudnn_adds_a_bias_in_a_launch_of_its_own(step_of):
    conv, product = step_of(biased_conv), step_of(biased_product)
    assert is_one_call(conv, "cpu")
    assert not is_one_call(conv, "cuda")
    assert is_one_call(product, "cuda")
    sm90 = load_arch("sm90")
    apart = [FAMILY.estimate_us(FAMILY.parts(each), NHWC, sm90) for each in (conv, product)]
    assert apart[0] > 2 * sm90.cost("framework")["launch_us"] > apart[1]


def test_the_bias_is_not_guessed_to_take_time(step_of):
    cpu = load_arch("cpu")
    alone = step_of(lambda b: b.conv(b.x(2, 4, 6, 6), b.w(6, 4, 3, 3)))
    both = FAMILY.estimate_us(FAMILY.parts(step_of(biased_conv)), NCHW, cpu)
    assert both == FAMILY.estimate_us(FAMILY.parts(alone), NCHW, cpu)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4 * 36, 5)

    def forward(self, x):
        return self.linear(torch.relu(self.conv(x)).flatten(1))


def groups(plan):
    return {choice.nodes for choice in plan.choices if choice.candidate.family == "framework"}


def test_the_frameworks_plan_has_eagers_calls():
    graph = extract(Net().eval(), TensorType((2, 3, 8, 8)))
    plan = framework_plan(graph, load_search_space("cpu"), network="net")
    assert groups(plan) == {
        ("conv/conv2d", "conv/add_channel"), ("relu",), ("linear/matmul", "linear/add_channel")
    }  # fmt: skip
    sm90 = framework_plan(graph, load_search_space("sm90"), network="net")
    assert ("linear/matmul", "linear/add_channel") in groups(sm90)
    assert ("conv/conv2d",) in groups(sm90)


def test_a_plan_by_hand_has_them_where_no_kernel_of_ours_runs():
    graph = extract(Net().double().eval(), TensorType((2, 3, 8, 8), "float64"))
    plan = hand_plan(graph, load_search_space("cpu"), network="net")
    assert ("conv/conv2d", "conv/add_channel") in groups(plan)


def test_eagers_calls_are_candidates_of_a_search():
    graph = extract(Net().eval(), TensorType((2, 3, 8, 8)))
    found = step_candidates(graph, load_search_space("cpu"))
    of_framework = {item.nodes for item in found if item.candidate.family == "framework"}
    assert ("conv/conv2d", "conv/add_channel") in of_framework
    assert ("linear/matmul", "linear/add_channel") in of_framework
    assert ("conv/conv2d", "conv/add_channel", "relu") not in of_framework


def test_eagers_calls_are_plans_in_both_layouts():
    graph = extract(Net().eval(), TensorType((2, 3, 8, 8)))
    found = framework_plans(graph, load_search_space("cpu"), network="net")
    layouts = [
        {c.candidate.config["layout"] for c in plan.choices if c.candidate.family == "framework"}
        for plan in found
    ]
    assert layouts == [{"nchw"}, {"nhwc"}]
    assert groups(found[0]) == groups(found[1])
    linear = extract(torch.nn.Linear(3, 4).eval(), TensorType((2, 3)))
    assert len(framework_plans(linear, load_search_space("cpu"), network="net")) == 1
    assert len(framework_plans(graph, load_search_space("sm90"), network="net")) == 1
