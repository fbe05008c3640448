from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune.models.se_resnet9 import FixupBlock, SpaceToDepth, se_resnet9_fixup

SCALARS = ["bias1a", "bias1b", "bias2a", "bias2b", "scale"]
STAGES = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]


def expected_shapes(in_channels: int) -> dict[str, tuple[int, ...]]:
    """Every published parameter name with its shape, written from the network's description."""
    shapes: dict[str, tuple[int, ...]] = {"stem.1.weight": (64, 16 * in_channels, 1, 1)}
    for i, (inputs, planes, stride) in enumerate(STAGES):
        block = {f"fixup_{scalar}": (1,) for scalar in SCALARS} | {
            "conv1.weight": (planes, inputs, 3, 3),
            "conv2.weight": (planes, planes, 3, 3),
            "se.excite.0.weight": (planes // 16, planes),
            "se.excite.0.bias": (planes // 16,),
            "se.excite.2.weight": (planes, planes // 16),
            "se.excite.2.bias": (planes,),
        }
        if stride == 2:
            block["downsample.1.weight"] = (planes, inputs, 1, 1)
        shapes |= {f"layers.{i}.0.{name}": shape for name, shape in block.items()}
    return shapes


def randomise(module: nn.Module, seed: int) -> None:
    """Random weights, and scalars far from Fixup's initial zeros, which would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            fan_in = parameter[0].numel()
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(noise * fan_in**-0.5)


def block_reference(state: dict[str, Tensor], x: Tensor, stride: int) -> Tensor:
    """The published formula in functional calls, the bias of the identity spelled out."""
    biased = x + state["fixup_bias1a"]
    out = F.conv2d(biased, state["conv1.weight"], stride=stride, padding=1)
    out = F.relu(out + state["fixup_bias1b"])
    out = F.conv2d(out + state["fixup_bias2a"], state["conv2.weight"], padding=1)
    out = out * state["fixup_scale"] + state["fixup_bias2b"]
    hidden = F.linear(out.mean((2, 3)), state["se.excite.0.weight"], state["se.excite.0.bias"])
    gate = F.linear(F.relu(hidden), state["se.excite.2.weight"], state["se.excite.2.bias"])
    identity = x
    if "downsample.1.weight" in state:
        pooled = F.avg_pool2d(biased, 3, stride, 1, count_include_pad=True)
        identity = F.conv2d(pooled, state["downsample.1.weight"])
    return F.relu(out * torch.sigmoid(gate)[:, :, None, None] + identity)


def block_state(model: nn.Module, index: int) -> dict[str, Tensor]:
    prefix = f"layers.{index}.0."
    state = model.state_dict()
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


@pytest.mark.parametrize("in_channels", [1, 3, 11, 14])
def test_has_exactly_the_published_parameters(in_channels: int) -> None:
    model = se_resnet9_fixup(in_channels)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert shapes == expected_shapes(in_channels)
    assert all(isinstance(p, nn.Parameter) for p in model.state_dict(keep_vars=True).values())


def test_base_planes_scale_every_stage() -> None:
    model = se_resnet9_fixup(3, base_planes=32)
    assert model.stem[1].weight.shape == (32, 48, 1, 1)
    assert model.layers[3][0].conv1.weight.shape == (256, 128, 3, 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_space_to_depth_orders_channels_by_dy_dx_c(channels: int) -> None:
    x = torch.arange(2 * channels * 8 * 12).view(2, channels, 8, 12)
    y = SpaceToDepth(4)(x)
    assert y.shape == (2, 16 * channels, 2, 3)
    for dy in range(4):
        for dx in range(4):
            for c in range(channels):
                expected = x[:, c, dy::4, dx::4]
                assert torch.equal(y[:, (dy * 4 + dx) * channels + c], expected)


def test_space_to_depth_takes_channels_last() -> None:
    x = torch.randn(2, 3, 8, 8)
    channels_last = x.to(memory_format=torch.channels_last)
    assert torch.equal(SpaceToDepth(4)(channels_last), SpaceToDepth(4)(x))


@pytest.mark.parametrize(("inputs", "planes", "stride"), STAGES[:3])
@pytest.mark.parametrize("size", [4, 5])
def test_block_follows_the_formula(inputs: int, planes: int, stride: int, size: int) -> None:
    block = FixupBlock(inputs, planes, stride).double()
    randomise(block, seed=inputs + planes)
    x = torch.randn(3, inputs, size, size, dtype=torch.float64)
    expected = block_reference(block.state_dict(), x, stride)
    torch.testing.assert_close(block(x), expected)


def test_identity_without_downsample_leaves_out_bias1a() -> None:
    block = FixupBlock(32, 32, 1)
    x = torch.rand(2, 32, 4, 4)
    nn.init.zeros_(block.conv2.weight)
    nn.init.constant_(block.fixup_bias1a, 3.0)
    torch.testing.assert_close(block(x), x)


def test_identity_with_downsample_has_bias1a() -> None:
    block = FixupBlock(32, 64, 2)
    x = torch.rand(2, 32, 4, 4)
    nn.init.zeros_(block.conv2.weight)
    nn.init.constant_(block.fixup_bias1a, 3.0)
    pooled = F.avg_pool2d(x + 3.0, 3, 2, 1)
    expected = F.relu(F.conv2d(pooled, block.downsample[1].weight))
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize(("in_channels", "batch"), [(1, 2), (3, 1), (11, 2), (14, 3)])
def test_network_is_stem_and_four_blocks(in_channels: int, batch: int) -> None:
    model = se_resnet9_fixup(in_channels).double()
    randomise(model, seed=in_channels)
    image = torch.randn(batch, in_channels, 64, 64, dtype=torch.float64)
    x = F.relu(F.conv2d(SpaceToDepth(4)(image), model.stem[1].weight))
    for index, (_, _, stride) in enumerate(STAGES):
        x = block_reference(block_state(model, index), x, stride)
    assert x.shape == (batch, 512, 2, 2)
    torch.testing.assert_close(model(image), x)


def test_every_parameter_has_a_gradient() -> None:
    model = se_resnet9_fixup(3, base_planes=32)
    randomise(model, seed=0)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_fixup_initialisation() -> None:
    torch.manual_seed(0)
    model = se_resnet9_fixup(3)
    for layer, (_, planes, _) in zip(model.layers, STAGES, strict=True):
        block = layer[0]
        assert not block.conv2.weight.any()
        assert [block.get_parameter(f"fixup_{s}").item() for s in SCALARS] == [0, 0, 0, 0, 1]
        # He's deviation for 9 * planes, divided by the square root of the number of blocks.
        deviation = (2 / (9 * planes)) ** 0.5 / 2
        assert block.conv1.weight.std().item() == pytest.approx(deviation, rel=0.02)
        if block.downsample is not None:
            deviation = (2 / planes) ** 0.5
            assert block.downsample[1].weight.std().item() == pytest.approx(deviation, rel=0.05)


def test_strict_state_dict_both_ways() -> None:
    source, target = se_resnet9_fixup(3), se_resnet9_fixup(3)
    randomise(source, seed=1)
    target.load_state_dict(source.state_dict(), strict=True)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(source(x), target(x))
