from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from plantune.devices.cuda.flags import flags
from plantune.errors import IllegalCandidate
from plantune.graph.fusions import all_fusions, fusions_named
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.layers import EpisodicLSTM
from plantune.models.se_resnet9 import SEResNet9Fixup
from plantune.plans.checked_plan import check_plan
from plantune.plans.guess import (
    Preference,
    compose,
    framework_plan,
    guessed_plan,
    hand_plan,
)
from plantune.plans.problem import Problem
from plantune.runtime.program.schedule import make_schedule
from plantune.space.search_space import load_search_space


@pytest.fixture
def by_hand(graph, space):
    def make(*preferences, fusions=None):
        fusions = all_fusions() if fusions is None else fusions
        return compose(graph, space, network="block", fusions=fusions, preferences=preferences)

    return make


def candidate_of(plan, node):
    return next(c.candidate for c in plan.choices if node in c.nodes)


def nodes_with(plan, node):
    return next(c.nodes for c in plan.choices if node in c.nodes)


def test_the_default_plan_is_the_framework_call_by_call(graph, space):
    plan = framework_plan(graph, space, network="block")
    ops = {node.name: node.op for node in graph.nodes}
    assert [name for choice in plan.choices for name in choice.nodes] == [*ops]
    for choice in plan.choices:
        first, *rest = (ops[name] for name in choice.nodes)
        expected = ("view", {}) if first == "reshape" else ("framework", {"layout": "nchw"})
        assert (choice.candidate.family, dict(choice.candidate.config)) == expected
        assert not rest or (first in ("conv2d", "matmul") and rest == ["add_channel"])
    assert "view" in {choice.candidate.family for choice in plan.choices}


@pytest.mark.parametrize(("arch", "layout"), [("cpu", "nchw"), ("sm80", "nhwc"), ("sm90", "nhwc")])
def test_convolutions_on_a_gpu_are_channels_last(arch, layout):
    graph = extract(
        nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.ReLU()).eval(), TensorType((2, 4, 8, 8))
    )
    plan = framework_plan(graph, load_search_space(arch), network="conv")
    assert [dict(choice.candidate.config) for choice in plan.choices] == 2 * [{"layout": layout}]
    assert {choice.candidate.family for choice in plan.choices} == {"framework"}


def test_training_on_a_gpu_is_channels_last():
    graph = differentiate(extract(nn.Conv2d(4, 8, 3, bias=False), TensorType((2, 4, 8, 8))))
    plan = framework_plan(graph, load_search_space("sm90"), network="conv")
    assert {choice.candidate.config.get("layout") for choice in plan.choices} == {"nhwc"}


def test_without_a_convolution_the_callers_layout_stays():
    graph = extract(nn.ReLU(), TensorType((2, 4, 8, 8)))
    plan = framework_plan(graph, load_search_space("sm90"), network="relu")
    assert dict(plan.choices[0].candidate.config) == {"layout": "nchw"}


class TestGuess:
    """What runs on a GPU until a search has measured something."""

    MODULE = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())

    def guess(self, module, arch="sm90", train=False):
        graph = extract(module.train(train), TensorType((2, 8, 8, 8), "float16"))
        graph = differentiate(graph) if train else graph
        return guessed_plan(graph, load_search_space(arch), network="guess")

    @pytest.mark.parametrize("arch", ["sm80", "sm90"])
    def test_it_is_the_plan_by_hand(self, arch):
        plan = self.guess(copy.deepcopy(self.MODULE).half(), arch)
        assert plan.origin == "guess"
        (choice,) = (c for c in plan.choices if any("conv2d" in node for node in c.nodes))
        assert len(choice.nodes) == 3
        assert choice.candidate.family != "framework"

    def test_another_precision_of_products_is_another_guess(self):
        graph = extract(nn.Conv2d(64, 64, 3), TensorType((8, 64, 16, 16)))
        space = load_search_space("sm80")
        guesses = []
        for precision in ("tf32", "ieee", "tf32"):
            with flags(torch.backends.cudnn.conv, fp32_precision=precision):
                guesses.append(guessed_plan(graph, space, network="guess"))
        assert guesses[0] is guesses[2]
        assert guesses[0] is not guesses[1]

    def test_the_same_layers_are_guessed_once(self):
        module = copy.deepcopy(self.MODULE).half()
        plan = self.guess(module)
        assert self.guess(copy.deepcopy(module)) is plan
        assert self.guess(nn.Sequential(module)) is not plan
        assert self.guess(module, "sm80") is not plan

    def test_in_training_activations_move_in_few_passes(self):
        layers = (nn.Conv2d(4, 8, 3, bias=False), nn.ReLU(), nn.Sigmoid(), nn.AvgPool2d(3, 2, 1))
        module = nn.Sequential(*layers).half()
        graph = differentiate(extract(module, TensorType((2, 4, 8, 8), "float16"), fold=False))
        plan = guessed_plan(graph, load_search_space("sm80"), network="chain")
        ops = {node.name: node.op for node in graph.nodes}
        found = [(c.candidate.family, *(ops[name] for name in c.nodes)) for c in plan.choices]
        assert found[-3:] == [
            ("pool_grad", "avg_pool2d_grad"),
            ("pointwise", "sigmoid_grad", "relu_grad"),
            ("framework", "conv2d_wgrad"),
        ]

    def test_in_training_steps_run_beside_others(self):
        module = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.ReLU()).half()
        assert self.guess(module, train=True).branches
        assert not self.guess(module).branches

    @pytest.mark.parametrize(("n", "together"), [(64, True), (1024, False)])
    def test_pools_share_a_kernel_with_their_convolution_where_pixels_are_few(self, n, together):
        module = nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Conv2d(64, 64, 1, bias=False)).half()
        graph = extract(module, TensorType((n, 64, 16, 16), "float16"))
        plan = guessed_plan(graph, load_search_space("sm90"), network="pool")
        found = {choice.candidate.family for choice in plan.choices}
        assert ("pool_conv" in found) == together

    @pytest.mark.parametrize(("n", "together"), [(64, False), (1024, True)])
    def test_or_with_the_tail_before_it_where_they_are_many(self, n, together):
        module = SEResNet9Fixup().half().eval()
        graph = extract(module, TensorType((n, 3, 64, 64), "float16"))
        plan = guessed_plan(graph, load_search_space("sm90"), network="tails")
        ops = {node.name: node.op for node in graph.nodes}
        pooled = [c for c in plan.choices if ops[c.nodes[-1]] == "avg_pool2d" and len(c.nodes) > 1]
        assert [c.candidate.family for c in pooled] == ["se_tail"] * len(pooled)
        assert ("layers.1.0.downsample.0/avg_pool2d" in {c.nodes[-1] for c in pooled}) == together

    @pytest.mark.parametrize(("groups", "family"), [(32, "depthwise_conv"), (4, "grouped_conv")])
    def test_it_has_the_kernels_for_groups(self, groups, family):
        conv = nn.Conv2d(32, 32, 3, padding=1, groups=groups)
        graph = extract(conv.half(), TensorType((2, 32, 8, 8), "float16"))
        plan = guessed_plan(graph, load_search_space("sm90"), network="groups")
        assert family in {choice.candidate.family for choice in plan.choices}

    @pytest.mark.parametrize(
        ("module", "arch", "train"),
        [(MODULE, "cpu", False), (nn.Softmax(1), "sm90", False)],
        ids=["on a CPU", "without a kernel of ours"],
    )
    def test_there_is_none(self, module, arch, train):
        assert self.guess(copy.deepcopy(module).half(), arch, train) is None


def test_a_plan_says_what_it_is_for(graph, space):
    plan = framework_plan(graph, space, network="block")
    assert plan.problem.key == Problem("block", graph.digest, "cpu", 2, "float32", "infer")
    assert plan.problem.call == graph.inputs
    assert plan.origin == "framework"
    assert dict(plan.evidence) == {}
    trained = framework_plan(differentiate(graph), space, network="block")
    assert trained.problem.mode == "train"
    assert trained.problem.graph != plan.problem.graph


def test_composed_plans_fit_their_graph(graph, space, by_hand):
    for plan in (by_hand(), by_hand(Preference("onednn_conv"), Preference("gemm"))):
        check_plan(plan, graph, space)
        assert plan.origin == "hand"


def test_the_first_preference_that_can_run_a_step_wins(by_hand):
    both = by_hand(Preference("gemm", {"layout": "nhwc"}), Preference("onednn_conv"))
    assert candidate_of(both, "conv1/conv2d").family == "onednn_conv"
    one_by_one = by_hand(Preference("gemm"), Preference("onednn_conv"), fusions=())
    assert candidate_of(one_by_one, "conv2/conv2d").family == "gemm"
    turned = by_hand(Preference("onednn_conv"), Preference("gemm"), fusions=())
    assert candidate_of(turned, "conv2/conv2d").family == "onednn_conv"


def test_a_preference_picks_its_config(by_hand):
    for config in ({"layout": "nhwc"}, {"layout": "nchw"}, {"layout": "nhwc", "prepack": True}):
        candidate = candidate_of(by_hand(Preference("onednn_conv", config)), "conv1/conv2d")
        assert config.items() <= dict(candidate.config).items()


def test_a_config_that_is_not_there_is_no_candidate(by_hand):
    plan = by_hand(Preference("onednn_conv", {"layout": "nhwc", "stages": 3}))
    assert candidate_of(plan, "conv1/conv2d").family == "framework"


def test_a_preference_for_some_steps_leaves_the_others(by_hand):
    plan = by_hand(Preference("framework", {"layout": "nhwc"}, ("conv2d",)), fusions=())
    layouts = {c.nodes[0]: c.candidate.config.get("layout") for c in plan.choices}
    assert layouts["conv1/conv2d"] == layouts["conv2/conv2d"] == "nhwc"
    assert layouts["fc/matmul"] == "nchw"


def test_what_takes_any_layout_has_that_of_its_images(by_hand):
    plan = by_hand(Preference("framework", {"layout": "nhwc"}, ("conv2d",)), fusions=())
    assert candidate_of(plan, "relu").config["layout"] == "nhwc"


class ConvNeXtBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(32, 32, 7, padding=3, groups=32)
        self.norm, self.wide, self.back = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.scale = nn.Parameter(torch.ones(32, 1, 1))

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.back(nn.functional.gelu(self.wide(y)))
        return self.scale * y.permute(0, 3, 1, 2) + x


class Attention(nn.Module):
    """As many write it, with a mask of the shape."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        rows, count, _ = x.shape
        q, k, v = self.qkv(x).view(rows, count, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        mask = x.new_zeros(count, count)
        mask[1:, :1] = 1.0
        weights = (q * 0.25) @ k.transpose(-2, -1) + mask.masked_fill(mask != 0, -100.0)
        return (weights.softmax(-1) @ v).transpose(1, 2).reshape(rows, count, 64)


def guess_for(module, *shape, layout="nchw"):
    graph = extract(module.half().eval(), TensorType(shape, "float16", layout))
    return graph, guessed_plan(graph, load_search_space("sm90"), network="guess")


def test_rows_of_attention_are_no_images():
    # With fewer rows one kernel has it all.
    graph, plan = guess_for(Attention(), 8, 160, 64)
    schedule = make_schedule(check_plan(plan, graph, load_search_space("sm90")))
    assert not [copy for launch in schedule.launches for copy in launch.conversions]
    for node in graph.nodes:
        if len(node.types[0].shape) == 4:
            assert schedule.layouts.get(node.name, "nchw") == "nchw"
    # What reads a part of the first product is torch's, which takes any strides.
    scaled = next(node.name for node in graph.nodes if node.op == "affine")
    assert candidate_of(plan, scaled).family == "framework"
    assert candidate_of(plan, "add").family == "softmax"


def test_what_never_changes_is_torchs_which_makes_it_once():
    class Positions(nn.Module):
        def forward(self, x):
            places = torch.arange(64).to(x.dtype) * 0.5 + 1
            return x * places.sigmoid()

    graph, plan = guess_for(Positions(), 8, 64)
    families = {
        choice.candidate.family for choice in plan.choices if choice.nodes[-1] in graph.fixed
    }
    assert families <= {"framework", "view"}
    assert candidate_of(plan, graph.outputs[0]).family == "pointwise"


def test_pointwise_ops_of_rows_have_a_kernel():
    module = nn.Sequential(nn.Linear(49, 51), nn.GELU())
    graph, plan = guess_for(module, 32, 64, 49)
    gelu = next(node.name for node in graph.nodes if node.op == "gelu")
    assert candidate_of(plan, gelu).family == "pointwise"


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_the_first_convolution_reads_images_as_they_come(layout):
    _, plan = guess_for(nn.Conv2d(3, 64, 7, 2, 3), 4, 3, 64, 64, layout=layout)
    (choice,) = plan.choices
    assert choice.candidate.family == "first_conv"
    assert choice.candidate.config["layout"] == layout


def test_the_permutes_around_a_layer_norm_move_nothing():
    type_ = TensorType((2, 32, 14, 14), "float16", "nhwc")
    graph = extract(ConvNeXtBlock().half().eval(), type_)
    space = load_search_space("sm90")
    plan = hand_plan(graph, space, network="block")
    families = [choice.candidate.family for choice in plan.choices]
    assert "layer_norm" in families
    assert families.count("view") >= 2
    assert "framework" not in families
    schedule = make_schedule(check_plan(plan, graph, space))
    assert [launch.conversions for launch in schedule.launches] == [()] * len(families)


class Rows(nn.Module):
    """As in a pyramid of attention: rows, an image of them, and rows again."""

    def __init__(self):
        super().__init__()
        self.wide, self.each = nn.Linear(32, 64), nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.back = nn.Linear(64, 32)

    def forward(self, x):
        image = self.wide(x).transpose(1, 2).view(-1, 64, 14, 14)
        return self.back(self.each(image).flatten(2).transpose(1, 2))


def test_rows_are_images_and_images_rows():
    graph, plan = guess_for(Rows(), 4, 196, 32)
    schedule = make_schedule(check_plan(plan, graph, load_search_space("sm90")))
    assert not [copy for launch in schedule.launches for copy in launch.conversions]
    assert "framework" not in {choice.candidate.family for choice in plan.choices}


def test_what_a_preferred_family_cannot_run_stays_unfused(by_hand):
    plan = by_hand(Preference("gemm"))
    assert nodes_with(plan, "conv1/conv2d") == ("conv1/conv2d",)
    assert candidate_of(plan, "conv1/conv2d").family == "framework"
    assert nodes_with(plan, "fc/matmul") == ("fc/matmul", "fc/add_channel", "sigmoid")


def test_the_largest_group_that_can_run_is_taken(graph, by_hand):
    plan = by_hand(Preference("onednn_conv"))
    ops = {node.name: node.op for node in graph.nodes}
    assert [ops[name] for name in nodes_with(plan, "conv1/conv2d")] == ["conv2d", "add", "relu"]
    assert [ops[name] for name in nodes_with(plan, "conv2/conv2d")] == [
        "conv2d", "add_channel", "add", "relu",
    ]  # fmt: skip


def test_what_only_the_framework_can_fuse_stays_unfused(by_hand):
    plan = by_hand(Preference("gemm"), Preference("framework", {"layout": "nhwc"}))
    assert nodes_with(plan, "conv1/conv2d") == ("conv1/conv2d",)
    assert len(nodes_with(plan, "fc/matmul")) == 3


@pytest.mark.parametrize(("rows", "family"), [(16, "linear"), (64, "linear"), (256, "hopper_conv")])
def test_the_head_of_a_resnet_is_made_of_kernels(rows, family):
    """The last kernel writes where the caller needs the result, which is copied otherwise."""
    layers = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)
    head = nn.Sequential(*layers).eval().half()
    graph = extract(head, TensorType((rows, 512, 7, 7), "float16", "nhwc"))
    plan = hand_plan(graph, load_search_space("sm90"), network="head")
    assert [choice.candidate.family for choice in plan.choices][:3] == ["pool", "view", family]


def test_only_the_fusions_that_are_given_are_used(by_hand):
    plan = by_hand(Preference("onednn_conv"), Preference("gemm"), fusions=fusions_named("linear"))
    assert nodes_with(plan, "conv1/conv2d") == ("conv1/conv2d",)
    assert len(nodes_with(plan, "fc/matmul")) == 3


def test_where_nothing_runs_a_step_it_is_named(graph, space, monkeypatch):
    monkeypatch.setattr("plantune.plans.guess.candidates", lambda step, space, names: ())
    with pytest.raises(IllegalCandidate, match="no candidate runs step 'conv1/conv2d' on cpu"):
        framework_plan(graph, space, network="block")


def test_a_pools_gradient_is_gathered_where_images_are_wide():
    """In the last block that halves the image it is a kernel of its own."""
    graph = extract(SEResNet9Fixup(3).half(), TensorType((64, 3, 64, 64), "float16"))
    plan = hand_plan(differentiate(graph), load_search_space("sm90"), network="x")
    pools = [node.name for node in differentiate(graph).nodes if node.op == "avg_pool2d_grad"]
    families = [candidate_of(plan, name).family for name in pools]
    assert [family == "pool_grad" for family in families] == [True, False, False]


def test_a_preference_may_ask_for_wide_images(by_hand):
    wide, any_ = Preference("framework", {"layout": "nhwc"}, wide=7), Preference("framework")
    narrow = Preference("framework", {"layout": "nhwc"}, wide=6)
    layouts = [
        {str(c.candidate.config["layout"]) for c in by_hand(first, any_, fusions=()).choices}
        for first in (wide, narrow)
    ]
    assert "nhwc" not in layouts[0]
    assert "nhwc" in layouts[1]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_guess_runs_a_layer_over_a_sequence_by_its_kernel(dtype):
    layer = EpisodicLSTM(8, 128).to(getattr(torch, dtype))
    states = (TensorType((1, 4, 128), dtype),) * 2
    graph = extract(layer, TensorType((3, 4, 8), dtype), states)
    plan = hand_plan(graph, load_search_space("sm90"), network="memory")
    (scan,) = (node for node in graph.nodes if node.op == "lstm_scan")
    assert candidate_of(plan, scan.name).family == "lstm_scan"
