from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.models import resnet

BASIC = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
DEPTHS = BASIC | {"resnet50": (3, 4, 6, 3)}
PARAMETERS = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032}
TENSORS = {"resnet18": 62, "resnet34": 110, "resnet50": 161}

Shapes = dict[str, tuple[int, ...]]


def build(name: str, **options: int) -> nn.Module:
    return getattr(resnet, name)(**options)


def norm_shapes(name: str, planes: int) -> Shapes:
    vectors = ["weight", "bias", "running_mean", "running_var"]
    return {f"{name}.{v}": (planes,) for v in vectors} | {f"{name}.num_batches_tracked": ()}


def kernels(name: str, inputs: int, width: int) -> list[tuple[int, ...]]:
    """The shapes of a block's convolutions, from the paper's table."""
    if name in BASIC:
        return [(width, inputs, 3, 3), (width, width, 3, 3)]
    return [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]


def expected_shapes(name: str, num_classes: int = 1000, in_channels: int = 3) -> Shapes:
    """Every key of torchvision's state dict in its order, written from the architecture."""
    shapes: Shapes = {"conv1.weight": (64, in_channels, 7, 7)} | norm_shapes("bn1", 64)
    inputs = 64
    for stage, depth in enumerate(DEPTHS[name]):
        width = 64 * 2**stage
        for index in range(depth):
            prefix = f"layer{stage + 1}.{index}"
            convolutions = kernels(name, inputs, width)
            planes = convolutions[-1][0]
            for number, shape in enumerate(convolutions, start=1):
                shapes[f"{prefix}.conv{number}.weight"] = shape
                shapes |= norm_shapes(f"{prefix}.bn{number}", shape[0])
            if index == 0 and (stage > 0 or planes != inputs):
                shapes[f"{prefix}.downsample.0.weight"] = (planes, inputs, 1, 1)
                shapes |= norm_shapes(f"{prefix}.downsample.1", planes)
            inputs = planes
    return shapes | {"fc.weight": (num_classes, inputs), "fc.bias": (num_classes,)}


def randomise(model: nn.Module) -> None:
    """Running statistics, weights and biases that no batch norm could be skipped with."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(std=0.1)
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 1.5)


class Reference:
    """The network as functional calls on a state dict, written from the paper."""

    def __init__(self, name: str, state: dict[str, Tensor], training: bool) -> None:
        self.name, self.training = name, training
        self.state = {key: value.clone() for key, value in state.items()}

    def conv_norm(self, x: Tensor, conv: str, norm: str, stride: int = 1) -> Tensor:
        weight = self.state[f"{conv}.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        names = ["running_mean", "running_var", "weight", "bias"]
        return F.batch_norm(x, *(self.state[f"{norm}.{n}"] for n in names), training=self.training)

    def block(self, x: Tensor, prefix: str, stride: int) -> Tensor:
        number_of_convs = 2 if self.name in BASIC else 3
        strided = 1 if self.name in BASIC else 2
        out = x
        for n in range(1, number_of_convs + 1):
            step = stride if n == strided else 1
            out = self.conv_norm(out, f"{prefix}.conv{n}", f"{prefix}.bn{n}", step)
            out = F.relu(out) if n < number_of_convs else out
        if f"{prefix}.downsample.0.weight" in self.state:
            x = self.conv_norm(x, f"{prefix}.downsample.0", f"{prefix}.downsample.1", stride)
        return F.relu(out + x)

    def __call__(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv_norm(x, "conv1", "bn1", 2)), 3, 2, 1)
        for stage, depth in enumerate(DEPTHS[self.name], start=1):
            for index in range(depth):
                stride = 2 if stage > 1 and index == 0 else 1
                x = self.block(x, f"layer{stage}.{index}", stride)
        return F.linear(x.mean((2, 3)), self.state["fc.weight"], self.state["fc.bias"])


@pytest.mark.parametrize("name", DEPTHS)
def test_has_torchvisions_keys_shapes_and_order(name: str) -> None:
    model = build(name)
    shapes = [(key, tuple(value.shape)) for key, value in model.state_dict().items()]
    assert shapes == list(expected_shapes(name).items())
    parameters = list(model.parameters())
    assert len(parameters) == TENSORS[name]
    assert sum(p.numel() for p in parameters) == PARAMETERS[name]


def test_classes_and_input_channels_change_the_ends_alone() -> None:
    model = build("resnet18", num_classes=10, in_channels=1)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert shapes == expected_shapes("resnet18", num_classes=10, in_channels=1)


def test_child_modules_have_torchvisions_names_and_order() -> None:
    children = [name for name, _ in build("resnet18").named_children()]
    stages = ["layer1", "layer2", "layer3", "layer4"]
    assert children == ["conv1", "bn1", "relu", "maxpool", *stages, "avgpool", "fc"]
    basic = [name for name, _ in build("resnet18").layer2[0].named_children()]
    assert basic == ["conv1", "bn1", "relu", "conv2", "bn2", "downsample"]
    bottleneck = [name for name, _ in build("resnet50").layer1[0].named_children()]
    names = ["conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "relu", "downsample"]
    assert bottleneck == names


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("name", "size"), [("resnet18", 97), ("resnet34", 64), ("resnet50", 65)])
def test_follows_the_architecture(name: str, size: int, training: bool) -> None:
    torch.manual_seed(0)
    model = build(name, num_classes=10).double().train(training)
    randomise(model)
    reference = Reference(name, model.state_dict(), training)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    expected = reference(x)
    assert expected.shape == (2, 10)
    torch.testing.assert_close(model(x), expected)
    for key in ("bn1.running_mean", "layer4.1.bn2.running_var"):
        torch.testing.assert_close(model.state_dict()[key], reference.state[key])


def test_input_is_left_alone() -> None:
    model = build("resnet18", num_classes=10).eval()
    x = torch.randn(1, 3, 64, 64)
    before = x.clone()
    model(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_initialisation_is_hes_by_fan_out(name: str) -> None:
    torch.manual_seed(0)
    for key, weight in build(name).state_dict().items():
        if weight.dim() == 4:
            fan_out = weight.shape[0] * weight[0, 0].numel()
            assert weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05), key
        elif "bn" in key and key.endswith("weight"):
            assert bool((weight == 1).all()), key


def test_every_parameter_has_a_gradient() -> None:
    model = build("resnet50", num_classes=10)
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
