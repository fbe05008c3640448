"""Plans that no search made: the framework's kernels, and ones that estimates choose."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from plantune.base.canonical import Attrs, words
from plantune.devices.cuda.flags import float32_precisions
from plantune.errors import IllegalCandidate
from plantune.graph import Graph, Step
from plantune.graph.free_casts import stores_wider
from plantune.graph.fusions import Fusion, fusions_named
from plantune.graph.partition import fused
from plantune.kernels.conversions import conversion_cost
from plantune.kernels.families.framework import BY_LAYOUT_OF_IMAGE
from plantune.kernels.family import Candidate
from plantune.kernels.one_call import PAIRS, is_one_call
from plantune.kernels.registry import (
    can_be_guessed,
    candidates,
    estimate_us,
    family_named,
    why_not,
)
from plantune.kernels.torch_ops import viewed
from plantune.kernels.weights.pitch import cuts_channels
from plantune.plans.plan import Choice, Plan
from plantune.plans.problem import Problem
from plantune.plans.written_words import FRAMEWORK, GUESS, HAND, OF_FRAMEWORK
from plantune.space.search_space import SearchSpace


@dataclass(frozen=True)
class Preference:
    """Candidates of `family` or its `rivals` whose config has these values, for steps that start
    with an op of `starts`, if any are named, have no op of `without` if they read few elements, and
    read `most` elements first, in rows of at least `wide`, if these are given.
    """

    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    starts: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    most: int | None = None
    wide: int = 0
    without: tuple[str, ...] = ()

    def admits(self, step: Step, candidate: Candidate) -> bool:
        fits = all(candidate.config.get(key) == value for key, value in self.config.items())
        starts = not self.starts or step.ops[0] in self.starts
        read = step.types[step.nodes[0].inputs[0]]
        few = self.most is None or read.numel <= self.most
        large = few and (not self.wide or read.shape[-1] >= self.wide)
        large &= read.numel > FEW or {*self.without}.isdisjoint(step.ops)
        return candidate.family in (self.family, *self.rivals) and fits and starts and large


FEW = 1 << 22  # elements
# A view costs nothing, so it is part of every plan; nchw is what callers bring.
FALLBACK = (Preference("view"), Preference("framework", {"layout": "nchw"}))
# Fewer products before fewer passes, all in nhwc so that nothing is converted between.
CPU_PREFERENCES = (
    Preference("winograd"),
    Preference("patch_conv"),
    Preference("pooled_conv"),
    Preference("direct_conv"),
    Preference("direct_linear"),
    Preference("gemm", {"layout": "nhwc"}, starts=("conv2d",)),
    Preference("onednn_conv", {"layout": "nhwc", "prepack": True}),
    Preference("squeeze_excite", {"layout": "nhwc"}),
    Preference("gemm", {"layout": "nchw"}, starts=("matmul",)),
    Preference("view"),
    Preference("framework", {"layout": "nhwc"}),
)
COMPILED = (
    *("winograd", "squeeze_excite"),
    *("patch_conv", "pooled_conv", "direct_conv", "direct_linear"),
)
# Fused kernels before single ones, all in nhwc; of a family the config that its guess likes best.
CUDA_PREFERENCES = (
    Preference("gru_translate", rivals=("gru_translate_steps",)),
    Preference("gru_scan"),
    Preference("gru_scan_grad"),
    Preference("lstm_scan"),
    Preference("lstm_scan_grad"),
    Preference("stem"),
    Preference("first_conv", {"layout": "nchw"}),
    # Of few rows: a layer that reads more is a convolution of single pixels.
    Preference("linear", most=1 << 16),
    Preference("conv_pair"),
    Preference("hopper_conv", rivals=("resident_conv", "grouped_conv")),
    Preference("hopper_float_conv"),
    Preference("se_grad"),
    Preference("hopper_dgrad", starts=("conv2d_dgrad",), rivals=("resident_dgrad",)),
    # Margins of smaller boxes have as many pixels as the boxes: in se_resnet9's third block one
    # kernel took 60 us, two 51 (2,048 images, H200, 2026-11-22).
    Preference("hopper_dgrad", starts=("avg_pool2d_grad",), rivals=("resident_dgrad",), wide=4),
    Preference("hopper_float_dgrad", starts=("conv2d_dgrad",)),
    Preference("hopper_float_dgrad", starts=("avg_pool2d_grad",), wide=4),
    Preference("hopper_wgrad", {"layout": "nhwc"}),
    Preference("hopper_float_wgrad", {"layout": "nhwc"}),
    Preference("implicit_gemm_conv", rivals=("linear",)),
    Preference("linear"),
    Preference("depthwise_conv"),
    Preference("grouped_conv"),
    Preference("batched_product"),
    # Of few pixels: each block reads the weights. With 2,048 images se_resnet9's second one took 28
    # us, both ops alone 24, its third 26 and 14 (H200, 2026-11-22).
    Preference("pool_conv", most=FEW),
    Preference("se_tail", without=("avg_pool2d",)),
    # densenet121 took 1.53 ms instead of 2.93, 32 images in float16 (H100, 2026-11-23).
    Preference("concat"),
    Preference("layer_norm"),
    Preference("layer_norm_grad"),
    Preference("attention"),
    Preference("rearrange"),
    Preference("softmax"),
    Preference("group_norm", {"layout": "nhwc"}),
    Preference("group_norm_grad", {"layout": "nhwc"}),
    Preference("batch_norm"),
    Preference("batch_norm_grad"),
    Preference("pool", {"layout": "nhwc"}),
    Preference("pool_grad", {"layout": "nhwc"}),
    Preference("pointwise_sum"),
    Preference("cast", {"layout": "nhwc"}),
    Preference("cast"),
    Preference("pointwise", {"layout": "nhwc"}),
    Preference("pointwise", {"layout": "nchw"}),  # of what has not four dimensions
    Preference("view"),
    Preference("framework", {"layout": "nhwc"}),
)
CHANNELS_LAST = (Preference("view"), Preference("framework", {"layout": "nhwc"}))
PREFERENCES: Mapping[str, tuple[Preference, ...]] = {
    "cpu": CPU_PREFERENCES,
    "cuda": CUDA_PREFERENCES,
}
FUSIONS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("stem", "pool_conv", "conv_epilogue", "se_tail", "linear"),
    "cuda": words(
        "image_stem stem first_conv conv_pair conv_epilogue pool_conv se_tail scaled_se_tail "
        "pooled_se_tail linear se_grad linear_epilogue flat_linear rows_of_pixels "
        "linear_then_residual pool_grad masked_dgrad pooled_dgrad pointwise_sum concat "
        "sample_norm attention windows softmax batch_norm batch_norm_grad pointwise_chain"
    ),
}
MOST_GUESSES = 32
# Families that need no layout of their own: to convert what they read would cost more than they do.
ANY_LAYOUT = ("first_conv", "pointwise", "pool", "framework")


def compose(
    graph: Graph,
    space: SearchSpace,
    *,
    network: str,
    fusions: Sequence[Fusion] = (),
    preferences: Sequence[Preference] = (),
    origin: str = HAND,
) -> Plan:
    """The plan that fuses greedily and takes each step's first legal preferred candidate.

    A group that no preferred candidate can run stays unfused, and so does one of a pass that only
    the framework can, in more than one call: a smaller group may have a kernel.
    """

    chooser = _Chooser(graph, space, preferences)
    choices = tuple(
        Choice(tuple(node.name for node in step.nodes), chooser.choose(step))
        for step in fused(graph, fusions, chooser.pays)
    )
    return Plan(Problem.of(graph, space.arch.name, network), choices, origin)


class _Chooser:
    """Chooses a candidate for each step, in order: what steps made before decides layouts."""

    def __init__(self, graph: Graph, space: SearchSpace, preferences: Sequence[Preference]) -> None:
        self._graph, self._space, self._preferences = graph, space, preferences
        self._known: dict[str, Candidate | None] = {}
        self._layouts = {name: type_.layout for name, type_ in graph.sources}
        self._strided: set[str] = set()

    def pays(self, step: Step) -> bool:
        """Whether a group is worth a step of its own."""
        if stores_wider(step) and step.nodes[-1].name not in self._graph.results:
            return False
        found = self._preferred(step)
        if found is None or found.family != "framework" or step.phase == "refresh":
            return found is not None
        return is_one_call(step, self._space.arch.kind)

    def choose(self, step: Step) -> Candidate:
        """Raises IllegalCandidate if nothing runs the step."""
        made, space = [name for name, _ in step.outputs], self._space
        # Torch makes what never changes once, and a pass what needs a kernel of ours.
        own = None if self._graph.fixed.issuperset(made) else self._preferred(step)
        candidate = own or _first(step, space, FALLBACK)
        if candidate is None:
            raise IllegalCandidate(f"no candidate runs step {step.name!r} on {space.arch.name}")
        candidate = _reading(step, candidate, self._strided, space)
        if candidate.family == "cast":
            candidate = self._cast(step, candidate)
        else:
            candidate = _following(step, candidate, self._layouts, space)
        if candidate.family == "framework" and _strides(step):
            self._strided.update(made)
        family = family_named(candidate.family)
        demanded = family.layouts(family.parts(step), candidate.config)
        self._layouts |= {name: demanded.get(name, "nchw") for name in made}
        return candidate

    def _cast(self, step: Step, candidate: Candidate) -> Candidate:
        """A cast reads an image as it lies, and brings it into nhwc for layers that want it so."""
        node, constant = step.nodes[0], step.phase == "refresh"
        if len(node.types[0].shape) != 4 or constant or node.inputs[0] in step.constants:
            return candidate
        read = self._layouts[node.inputs[0]]
        images = not BY_LAYOUT_OF_IMAGE.isdisjoint(n.op for n in self._graph.consumers[node.name])
        for made in ("nhwc", read) if images else (read,):
            other = Candidate("cast", Attrs(source_layout=read, layout=made))
            if why_not(step, other, self._space) is None:
                return other
        return candidate

    def _preferred(self, step: Step) -> Candidate | None:
        if step.signature not in self._known:  # most layers of a ResNet are alike
            self._known[step.signature] = _first(step, self._space, self._preferences)
        return self._known[step.signature]


def framework_plan(graph: Graph, space: SearchSpace, *, network: str) -> Plan:
    """The framework's kernels as eager calls them, in the layout that callers bring; on a GPU
    images are channels_last, which suits tensor cores, if there is a convolution.

    In nchw a captured wide_resnet50_2 took 1.27 of eager's time in inference (32 images, fp16,
    2026-11-21), and se_resnet9_fixup 8.95 ms instead of 6.66 in training (2,048 images, H200,
    2026-11-22).
    """
    convolves = any(node.op == "conv2d" for node in graph.nodes)
    preferences = CHANNELS_LAST if space.arch.kind == "cuda" and convolves else FALLBACK
    return compose(
        graph, space, network=network, fusions=(PAIRS,), preferences=preferences, origin=FRAMEWORK
    )


def framework_plans(graph: Graph, space: SearchSpace, *, network: str) -> tuple[Plan, ...]:
    """`framework_plan`, and the same in channels_last if that is another one: eager's calls in both
    layouts took 0.60 ms and 0.51 of a small network's pass (one thread of a Xeon, 2026-11-29).
    """
    plain = framework_plan(graph, space, network=network)
    if not any(node.op == "conv2d" for node in graph.nodes):
        return (plain,)
    made = compose(graph, space, network=network, fusions=(PAIRS,), preferences=CHANNELS_LAST)
    other = replace(made, origin=plain.origin)
    return (plain,) if other == plain else (plain, other)


def hand_plan(
    graph: Graph,
    space: SearchSpace,
    *,
    network: str,
    without: Collection[str] = (),
    fusions: Sequence[Fusion] | None = None,
) -> Plan:
    """What one would pick without measuring: a search starts from it and must beat it.

    `without` names families that it leaves out, such as those that are compiled on a CPU.
    `fusions` are those that one would pick, unless they are given.
    """
    kind = space.arch.kind
    return compose(
        graph,
        space,
        network=network,
        fusions=fusions_named(*FUSIONS[kind]) if fusions is None else fusions,
        preferences=[p for p in PREFERENCES[kind] if p.family not in without],
    )


def guessed_plan(graph: Graph, space: SearchSpace, *, network: str) -> Plan | None:
    """What runs until a search has measured something, if it is more than the framework's kernels:
    on a GPU the plan by hand.

    Of one graph of eager's channels_last kernels it took 0.42 (resnet50), 0.41 (mobilenet_v2), 0.31
    (densenet121), 0.59 (convnext_tiny), 0.89 (swin_t) of the time (32 images, fp16, H200,
    2026-11-23), and eager 1.2 to 3.4 times as long as that graph (2026-11-22). In
    training steps run beside others: 2.96 ms instead of 3.44 (se_resnet9_fixup, 2,048 images, on
    the same day).
    """
    if space.arch.kind != "cuda":
        return None
    problem = Problem.of(graph, space.arch.name, network)
    key = (
        problem,
        graph.structure.nodes,
        graph.inserted_casts,
        space.digest,
        float32_precisions(),
    )
    if key not in _guesses:
        if len(_guesses) == MOST_GUESSES:
            _guesses.clear()
        _guesses[key] = _guessed(graph, space, network)
    return _guesses[key]


def _guessed(graph: Graph, space: SearchSpace, network: str) -> Plan | None:
    trains = graph.backward_from is not None
    by_hand = hand_plan(graph, space, network=network)
    plan = replace(by_hand, origin=GUESS, branches=trains)
    families = {choice.candidate.family for choice in plan.choices}
    return None if families <= OF_FRAMEWORK else plan


# A guess takes seconds for a deep network, which a process may build several times.
_guesses: dict[tuple[Any, ...], Plan | None] = {}


def _strides(step: Step) -> bool:
    """Whether torch's views here are in strides that no kernel of ours reads."""
    source = viewed(step.nodes[0])
    if source is None or len(step.nodes) > 1 or step.phase == "refresh":
        return False
    return not cuts_channels(step.nodes[0], step.types[source])


def _reading(
    step: Step, candidate: Candidate, strided: Collection[str], space: SearchSpace
) -> Candidate:
    """The framework's kernel for a single op on a view, which ours would read a copy of."""
    views = any(name in strided for name, _ in step.inputs)
    if candidate.family != "pointwise" or not views or len(step.nodes) > 1:
        return candidate
    return _first(step, space, CHANNELS_LAST) or candidate


def _following(
    step: Step, candidate: Candidate, layouts: Mapping[str, str], space: SearchSpace
) -> Candidate:
    """The candidate in the layout shared by all images that it reads, if it takes any layout. What
    has four dimensions but was made from nothing that has is
    not an image: attention's rows stay rows.
    """
    images = {
        layouts[name]
        for name, type_ in step.inputs
        if len(type_.shape) == 4 and name not in step.constants
    }
    makes = any(len(type_.shape) == 4 for _, type_ in step.outputs)
    if not images and makes:
        images = {"nchw"}
    if candidate.family not in ANY_LAYOUT or len(images) != 1 or step.phase == "refresh":
        return candidate
    other = Candidate(candidate.family, Attrs(candidate.config, layout=images.pop()))
    bound = candidate.family == "framework" and _is_faster_in_nhwc(step)
    bound |= candidate.family == "pool" and _pays_conversion(step, candidate, other, space)
    return candidate if bound or why_not(step, other, space) else other


def _pays_conversion(step: Step, own: Candidate, other: Candidate, space: SearchSpace) -> bool:
    """Whether to convert what a pool reads takes no longer than what it would make elsewise: what
    follows is in nhwc.
    """
    (read,), cost = [type_ for _, type_ in step.inputs], conversion_cost(space.arch)
    own_us, other_us = (estimate_us(step, each, space.arch) for each in (own, other))
    return own_us + cost.time_us(read) < other_us + cost.time_us(step.outputs[0][1])


def _is_faster_in_nhwc(step: Step) -> bool:
    """Whether torch is by more than a conversion takes. It is not where filters are computed: each
    of eight such steps took as long in nchw (0.9 to 1.4, H200, 2026-11-24).
    """
    computed = any(
        node.op == "conv2d" and node.inputs[1] not in step.constants for node in step.nodes
    )
    return not BY_LAYOUT_OF_IMAGE.isdisjoint(step.ops) and not computed


def _first(step: Step, space: SearchSpace, preferences: Sequence[Preference]) -> Candidate | None:
    """The candidate of the first preference that admits any; of several the quickest by guess."""
    for preference in preferences:
        legal = candidates(step, space, (preference.family, *preference.rivals))
        admitted = [
            candidate
            for candidate in legal
            if preference.admits(step, candidate) and can_be_guessed(step, candidate)
        ]
        if admitted:
            return min(admitted, key=partial(estimate_us, step, arch=space.arch))
    return None
