"""What is traced is what the module does when it is called, whoever changed it before."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune.graph.graph import Graph
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.extract import extract_with_outputs
from plantune.graph.types import TensorType

IMAGE = (2, 3, 8, 8)
Extracts = Callable[..., Graph]


def image() -> Tensor:
    return torch.randn(IMAGE, dtype=torch.float64)


def doubled(layer: nn.Module) -> nn.Module:
    """As adapters do: the layer's own forward is called by another one in its place."""
    plain = layer.forward
    layer.forward = lambda x: plain(x) * 2.0  # type: ignore[method-assign]
    return layer


class TestReplacedMethods:
    @pytest.mark.parametrize(
        "layer",
        [nn.ReLU, lambda: nn.Conv2d(3, 3, 3), nn.Flatten],
        ids=["ReLU", "Conv2d", "Flatten"],
    )
    def test_a_childs_forward(self, layer: Any, extracts: Extracts) -> None:
        graph = extracts(nn.Sequential(doubled(layer())).double(), image())
        assert len(graph.nodes) > 1

    def test_the_roots_forward(self, extracts: Extracts) -> None:
        extracts(doubled(nn.Sequential(nn.ReLU())), image())
        extracts(doubled(nn.ReLU()), image())

    def test_a_childs_other_method(self, extracts: Extracts) -> None:
        conv = nn.Conv2d(3, 3, 3).double()
        conv._conv_forward = lambda x, weight, bias: torch.relu(x)  # type: ignore
        graph = extracts(nn.Sequential(conv), image())
        assert [node.op for node in graph.nodes] == ["relu"]

    @pytest.mark.parametrize("wraps", [functools.wraps, lambda f: lambda g: g])
    def test_a_class_of_torch(
        self, wraps: Any, extracts: Extracts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain = nn.ReLU.forward

        @wraps(plain)
        def patched(self: nn.ReLU, x: Tensor) -> Tensor:
            return plain(self, x) + 1.0

        monkeypatch.setattr(nn.ReLU, "forward", patched)
        graph = extracts(nn.Sequential(nn.ReLU()), image())
        assert len(graph.nodes) == 2

    def test_a_call_of_ones_own(self, extracts: Extracts) -> None:
        class Loud(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.relu(x)

            def __call__(self, x: Tensor) -> Any:
                return super().__call__(x) * 3.0

        assert len(extracts(Loud(), image()).nodes) == 2
        assert len(extracts(nn.Sequential(Loud()), image()).nodes) == 2

    def test_arguments_that_are_not_given_have_their_defaults(
        self, extracts: Extracts, calls: Any
    ) -> None:
        class Optional(nn.Module):
            def forward(self, x: Tensor, mask: Tensor | None = None, scale: bool = True) -> Any:
                if mask is not None:
                    x = x * mask
                return x * 2.0 if scale else x

        assert len(extracts(Optional(), image()).nodes) == 1


class TestModes:
    def test_the_callers_autocast_is_not_the_modules(self, extracts: Extracts) -> None:
        net = nn.Sequential(nn.Conv2d(3, 4, 3)).double()
        with torch.autocast("cpu", torch.bfloat16):
            graph = extract_with_outputs(net, Arguments((TensorType(IMAGE, "float64"),)))[0]
        assert graph.digest == extracts(net, image()).digest

    def test_gradients_that_are_off_do_not_count_in_inference(self, extracts: Extracts) -> None:
        @torch.no_grad()
        def forward(x: Tensor) -> Tensor:
            return x * 2.0

        net = nn.Sequential(nn.ReLU()).eval()
        net.forward = forward  # type: ignore[method-assign]
        assert len(extracts(net, image()).nodes) == 1

    def test_each_submodules_own_counts(self, extracts: Extracts) -> None:
        for training in (True, False):
            net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
            net.double().train(training)
            net[1].train(not training)
            graph = extracts(net, image())
            assert {name for name, _ in graph.updates} == {
                f"{2 - (not training)}.{kind}"
                for kind in ("running_mean", "running_var", "num_batches_tracked")
            }


def test_a_forward_may_name_its_parts_for_a_profiler(extracts: Extracts) -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.profiler.record_function("mine"):
                return x * 2.0

    assert len(extracts(Named(), image()).nodes) == 1


class TestParametrized:
    def test_a_weight_that_follows_from_its_original(self, extracts: Extracts) -> None:
        class Halved(nn.Module):
            def forward(self, w: Tensor) -> Tensor:
                return w * 0.5

        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double()
        nn.utils.parametrize.register_parametrization(net[0], "weight", Halved())
        graph = extracts(net, image())
        assert "0.parametrizations.weight.original" in dict(graph.parameters)


Named = namedtuple("Named", ["first", "second"])


class TestOutputs:
    @pytest.mark.parametrize(
        "made",
        [
            lambda x: (x + 1.0,),
            lambda x: [x + 1.0, x],
            lambda x: {"y": x + 1.0, "aux": [x * 2.0, None]},
            lambda x: OrderedDict(b=x, a=x + 1.0),
            lambda x: Named(x + 1.0, (x * 2.0, 3)),
            lambda x: (x, x.shape, "name", 1.5),
            lambda x: ((((x * 2.0,),),), ()),
        ],
    )
    def test_a_structure_is_kept(self, made: Any, calls: Any) -> None:
        module, x = calls(lambda m, x: made(x)), image()
        graph, outputs = extract_with_outputs(module, Arguments((TensorType(IMAGE, "float64"),)))
        expected = module(x)
        tensors = [t for t in torch.utils._pytree.tree_leaves(expected) if isinstance(t, Tensor)]
        assert len(graph.outputs) == len(tensors)
        got = outputs.of(tensors)
        assert type(got) is type(expected)
        assert str(got) == str(expected)
