"""Convolutions and linear layers as products in float32: what torch's own give, in its layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, linear

from plantune.runtime import products
from plantune.runtime.products import Float32Products

CONVOLUTIONS = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1},
    "two numbers": {"stride": (1, 3), "padding": (2, 0), "dilation": (1, 2)},
    "one number in a list": {"padding": [1]},
    "without a bias": {"bias": None, "padding": 1},
    # These are left to torch.
    "in groups": {"groups": 2},
    "same": {"padding": "same", "dilation": (1, 2)},
}


@pytest.fixture
def operands():
    images, weight, bias = torch.randn(2, 6, 9, 8), torch.randn(4, 6, 3, 2), torch.randn(4)
    return images, weight, bias


def matched(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution(name, layout, operands):
    images, weight, bias = operands
    options = {"bias": bias, **CONVOLUTIONS[name]}
    weight = weight[:, :3] if "groups" in options else weight
    images, weight = images.contiguous(memory_format=layout), weight.contiguous()
    wanted = conv2d(images, weight, **options)
    with Float32Products():
        matched(conv2d(images, weight, **options), wanted)


def test_one_that_is_too_large_is_left_to_torch(operands, monkeypatch):
    monkeypatch.setattr(products, "MOST_BYTES", 100)
    monkeypatch.setattr(products, "product", None)
    with Float32Products():
        matched(conv2d(*operands), conv2d(*operands))


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer(bias):
    x, weight = torch.randn(2, 3, 5), torch.randn(4, 5)
    offset = torch.randn(4) if bias else None
    with Float32Products():
        found = linear(x, weight, offset)
    matched(found, linear(x, weight, offset))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_16_bits_are_rounded_once(dtype):
    module = nn.Sequential(nn.Conv2d(6, 8, 3), nn.Flatten(), nn.Linear(8 * 7 * 6, 5)).to(dtype)
    x = torch.randn(2, 6, 9, 8).to(dtype)
    with Float32Products():
        found = module(x)
    conv, _, head = module
    y = conv2d(x.float(), conv.weight.float(), conv.bias.float()).to(dtype).flatten(1)
    wanted = linear(y.float(), head.weight.float(), head.bias.float()).to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
