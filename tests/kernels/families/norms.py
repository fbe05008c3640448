"""What the tests of norms and of their gradients share: steps, refused configs, whole passes."""

from __future__ import annotations

import copy

from torch import nn

from plantune import optimize
from plantune.base.canonical import Attrs
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.plans.guess import guessed_plan
from plantune.space.arch import load_arch
from plantune.space.search_space import load_search_space

from .conftest import legal
from .contract import KERNELS, Contract


def norm_of(op, shape, weights, then, kept, **attrs):
    """A norm with weights of these shapes and what follows it; `kept` are the places of outputs
    that leave beside what the step makes.
    """

    def emit(b):
        x = b.x(*shape)
        outputs = b.all(op, x, *(b.w(*each) for each in weights), eps=1e-5, **attrs)
        y = outputs[0]
        for name in then:
            y = b(name, y, b.x(*shape)) if name == "add" else b(name, y)
        return (y, *(outputs[place] for place in kept))

    return emit


def gradient_of(op, shape, statistics, weights, affine, left, **attrs):
    """The gradient of such a norm, of the values that `statistics` declares; `left` are the places
    of the outputs that leave.
    """

    def emit(b):
        kept = [statistics(b) for _ in range(2)]
        scale = [b.w(*weights)] if affine else []
        inputs = (b.x(*shape), b.x(*shape), *kept, *scale)
        made = b.all(f"{op}_grad", *inputs, eps=1e-5, affine=affine, **attrs)
        return tuple(made[place] for place in left if place < len(made))

    return emit


class GradientContract(Contract):
    """Of gradients whose blocks leave sums, which a second kernel collects."""

    def kernels(self, step, config):
        sums = self.family.workspace_bytes(self.family.parts(step), config)
        return KERNELS | {"collect", "collect_unaligned"} if sums else KERNELS


def grouped(layout="nhwc", groups=1, threads=256):
    """A config of the families of group norms."""
    return Attrs(layout=layout, groups=groups, threads=threads)


class ImagesContract(Contract):
    """Of families of group norms, which take images in both layouts."""

    def test_it_runs_every_step(self, name, dtype):
        step = self.step(self.steps[name], dtype)
        images = len(step.nodes[0].types[0].shape) == 4
        layouts = {candidate.config["layout"] for candidate in legal(self.family, step)}
        assert layouts == ({"nchw", "nhwc"} if images else {"nchw"})

    def configs_to_build(self, step, arch):
        return grouped("nchw", 1, 512), grouped("nhwc", 2, 512)

    def check_usage(self, step, config, usage):
        super().check_usage(step, config, usage)
        assert all(used.shared_bytes <= 48 << 10 for used in usage.values())


def assert_refused(family, parts, reasons, arch="sm90"):
    """That each config is refused for its reason, or taken where that is None."""
    for config, reason in reasons.items():
        got = family.why_not_config(parts, config, load_arch(arch))
        assert got is None if reason is None else reason in got


def assert_guessed_for_training(family, layers, x):
    graph = differentiate(extract(nn.Sequential(*layers).half(), TensorType(x, "float16")))
    plan = guessed_plan(graph, load_search_space("sm90"), network="norm")
    assert family.name in {choice.candidate.family for choice in plan.choices}


def assert_a_pass_has_the_gradients_of_float64(module, x, seed):
    """Within twice eager's distance from them."""
    tuned = optimize(module, x, mode="train", fallback="silent")
    wide = copy.deepcopy(module).double()
    tuned(x).backward(seed)
    wide(x.double()).backward(seed.double())
    module(x).backward(seed)
    for name, exact in wide.named_parameters():
        ours = tuned.get_parameter(name).grad.double()
        theirs = module.get_parameter(name).grad.double()
        allowed = 2 * (theirs - exact.grad).norm() + 2e-3 * exact.grad.norm()
        assert (ours - exact.grad).norm() <= allowed, name
