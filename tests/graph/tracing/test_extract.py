"""From a module to its layer graph: the graph computes what the module does, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune.errors import UnsupportedModule
from plantune.graph.graph import Graph
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.models import resnet
from plantune.models.se_resnet9 import se_resnet9_fixup

Extracts = Callable[..., Graph]
Randomise = Callable[[nn.Module], nn.Module]


def image(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("channels", "batch"), [(1, 1), (3, 2), (11, 2), (14, 3)])
def test_se_resnet9(
    channels: int, batch: int, training: bool, extracts: Extracts, randomise: Randomise
) -> None:
    module = randomise(se_resnet9_fixup(channels, base_planes=32)).train(training)
    graph = extracts(module, image(batch, channels, 64, 64))
    assert [name for name, _ in graph.parameters] != []
    assert {name for name, _ in graph.parameters} == set(module.state_dict())
    assert {"space_to_depth", "sigmoid", "avg_pool2d"} < {node.op for node in graph.nodes}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 64),
        pytest.param("resnet34", 33, marks=pytest.mark.slow),
        ("resnet50", 33),
    ],
)
def test_resnet(
    name: str, size: int, training: bool, extracts: Extracts, randomise: Randomise
) -> None:
    module = randomise(getattr(resnet, name)(num_classes=10)).train(training)
    graph = extracts(module, image(2, 3, size, size))
    ops = [node.op for node in graph.nodes]
    norms = [n for n, m in module.named_modules() if isinstance(m, nn.BatchNorm2d)]
    # In inference only a shift is left of a batch norm; in training all its buffers move.
    assert ops.count("batch_norm") == (len(norms) if training else 0)
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    moved = {f"{norm}.{s}" for norm in norms for s in statistics} if training else set()
    assert {buffer for buffer, _ in graph.updates} == moved
    scales = [n for n in graph.nodes if n.op == "mul_channel" and n.name not in graph.constants]
    assert scales == []


def test_batch_norm_of_inference_without_folding_stays_after_its_convolution(
    extracts: Extracts, randomise: Randomise
) -> None:
    module = randomise(nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3)))
    module.eval()
    ops = [node.op for node in extracts(module, image(2, 2, 5, 5), fold=False).nodes]
    assert ops.index("mul_channel") > ops.index("conv2d")
    folded = [node.op for node in extracts(module, image(2, 2, 5, 5)).nodes]
    assert folded.index("mul_channel") < folded.index("conv2d")
    # A frozen batch norm in a network that trains is not folded: its weight is to learn.
    module.train()[1].eval()
    assert [node.op for node in extracts(module, image(2, 2, 5, 5)).nodes] == ops


def test_training_mode_is_each_modules_own(extracts: Extracts, randomise: Randomise) -> None:
    module = randomise(nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)))
    module[0].eval()
    graph = extracts(module, image(3, 2, 4, 4))
    assert {buffer.split(".")[0] for buffer, _ in graph.updates} == {"2"}


def test_one_batch_norm_called_twice_moves_its_statistics_twice(
    extracts: Extracts, randomise: Randomise, calls: Any
) -> None:
    module = randomise(calls(lambda m, x: m.bn(m.bn(x) * 2.0), bn=nn.BatchNorm2d(2)))
    graph = extracts(module, image(3, 2, 4, 4))
    assert sorted(buffer for buffer, _ in graph.updates) == sorted(module.state_dict())[1:4]


def test_statistics_read_around_their_batch_norm(
    extracts: Extracts, randomise: Randomise, calls: Any
) -> None:
    """The buffer is one tensor: a name that was read before the write means the new value."""

    def forward(m: Any, x: Tensor) -> Tensor:
        mean = m.bn.running_mean
        return m.bn(x).mean((2, 3)) + mean

    extracts(randomise(calls(forward, bn=nn.BatchNorm2d(2))), image(3, 2, 4, 4))


def test_a_view_of_a_statistic_that_moves_is_refused(randomise: Randomise, calls: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        mean = m.bn.running_mean.view(2, 1, 1)
        return m.bn(x) + mean

    with pytest.raises(
        UnsupportedModule, match="at bn: an in-place op on a tensor of which a view"
    ):
        extract(
            randomise(calls(forward, bn=nn.BatchNorm2d(2))), TensorType((3, 2, 4, 4), "float64")
        )


def test_tied_weights_are_one_parameter_under_the_first_name(
    extracts: Extracts, randomise: Randomise
) -> None:
    module = randomise(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    module[2].weight = module[0].weight
    graph = extracts(module, image(4, 3))
    assert [name for name, _ in graph.parameters] == ["0.weight", "0.bias", "2.bias"]


def test_one_module_called_twice_at_two_shapes(
    extracts: Extracts, randomise: Randomise, calls: Any
) -> None:
    conv = nn.Conv2d(2, 2, 3, stride=2, padding=1)
    module = randomise(calls(lambda m, x: m.conv(m.conv(x)), conv=conv))
    graph = extracts(module, image(1, 2, 7, 6))
    names = [node.name for node in graph.nodes if node.op == "conv2d"]
    assert names == ["conv/conv2d", "conv/conv2d_2"]


def test_containers_nest(extracts: Extracts, randomise: Randomise, calls: Any) -> None:
    layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU()))] * 2)
    heads = nn.ModuleDict({"a": nn.Linear(3, 2)})

    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x)
        return m.heads["a"](x)

    graph = extracts(randomise(calls(forward, layers=layers, heads=heads)), image(2, 3))
    assert [n.name for n in graph.nodes][:3] == [
        "layers.0.0/matmul",
        "layers.0.0/add_channel",
        "layers.0.1.0/relu",
    ]


def test_a_node_is_named_after_the_module_in_whose_forward_it_stands(
    extracts: Extracts, calls: Any
) -> None:
    inner = calls(lambda m, x: torch.relu(x) * 2.0)
    graph = extracts(calls(lambda m, x: m.a(m.a(x)) + 1.0, a=inner), image(3))
    assert [n.name for n in graph.nodes] == [
        "a/relu",
        "a/affine",
        "a/relu_2",
        "a/affine_2",
        "affine",
    ]


def sizes_in_place(m: Any, x: Tensor) -> Tensor:
    n = x.size(0)
    n *= x.shape[1]
    return x.view(n, -1)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x,
        lambda m, x: (x, x),
        lambda m, x: (torch.relu(x), x, x * 2.0),
        lambda m, x: x.view(x.shape[0], -1).reshape(x.size(0), x.shape[1], -1),
        sizes_in_place,
        lambda m, x: x * x.dim() + x.shape[-1] / 2,
        lambda m, x: x.mean((1, 2)) if m.training else x,
    ],
)
def test_without_parameters(forward: Callable[..., Any], extracts: Extracts, calls: Any) -> None:
    graph = extracts(calls(forward), image(2, 3, 4))
    assert graph.parameters == graph.buffers == ()


def test_parameters_and_buffers_of_the_root_whatever_their_names(
    extracts: Extracts, calls: Any
) -> None:
    """`mul` and `add` are also names that nodes would take."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return (x * x) * m.mul + m.add + m.offset

    double = torch.tensor([2.0, 3.0], dtype=torch.float64)
    module = calls(forward, mul=nn.Parameter(double), add=nn.Parameter(-double), offset=double / 7)
    graph = extracts(module, image(3, 2))
    assert [name for name, _ in graph.parameters] == ["mul", "add"]
    assert [name for name, _ in graph.buffers] == ["offset"]


def test_unused_parameters_and_results_are_left_out(extracts: Extracts, calls: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.unread(x)
        return torch.relu(x)

    module = calls(forward, unread=nn.Linear(2, 2), unused=nn.Linear(2, 2)).double()
    graph = extracts(module, image(3, 2))
    assert [node.op for node in graph.nodes] == ["relu"]
    assert graph.parameters == ()


class TwoInputs(nn.Module):
    def forward(self, a: Tensor, b: Tensor, factor: float = 3.0) -> tuple[Tensor, Tensor]:
        return a * factor + b, a - b


def test_several_inputs_and_defaults(extracts: Extracts) -> None:
    graph = extracts(TwoInputs(), image(2, 3), image(3))
    assert [name for name, _ in graph.inputs] == ["x", "x1"]


@pytest.mark.parametrize(
    ("count", "message"), [(1, "missing a required argument"), (4, "too many positional")]
)
def test_the_number_of_inputs_must_fit(count: int, message: str) -> None:
    with pytest.raises(UnsupportedModule, match=f"TwoInputs cannot be called so: {message}"):
        extract(TwoInputs(), *[TensorType((3,))] * count)


def test_the_same_module_gives_the_same_digest_and_another_shape_another() -> None:
    module = resnet.resnet18(num_classes=10)
    first = extract(module, TensorType((2, 3, 33, 33)))
    assert extract(module, TensorType((2, 3, 33, 33))).digest == first.digest
    assert extract(resnet.resnet18(10), TensorType((2, 3, 33, 33))).digest == first.digest
    others = [
        extract(module, TensorType((1, 3, 33, 33))),
        extract(module, TensorType((2, 3, 33, 34))),
        extract(module, TensorType((2, 3, 33, 33), layout="nhwc")),
        extract(module.half(), TensorType((2, 3, 33, 33), "float16")),
        extract(module.float().eval(), TensorType((2, 3, 33, 33))),
    ]
    assert len({first.digest, *(graph.digest for graph in others)}) == 6
