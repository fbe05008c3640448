"""References by products of matrices: what torch's own give, in its layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, linear

from plantune.runtime.proof import products
from plantune.runtime.proof.products import (
    Products,
    SomeImagesAtOnce,
    float32_products,
    small_images_at_once,
)

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
    with float32_products():
        matched(conv2d(images, weight, **options), wanted)


def test_one_that_is_too_large_is_left_to_torch(operands, monkeypatch):
    monkeypatch.setattr(products, "MOST_BYTES", 100)
    monkeypatch.setattr(Products, "_product", None)
    with float32_products():
        matched(conv2d(*operands), conv2d(*operands))


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer(bias):
    x, weight = torch.randn(2, 3, 5), torch.randn(4, 5)
    offset = torch.randn(4) if bias else None
    with float32_products():
        found = linear(x, weight, offset)
    matched(found, linear(x, weight, offset))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_16_bits_are_rounded_once(dtype):
    module = nn.Sequential(nn.Conv2d(6, 8, 3), nn.Flatten(), nn.Linear(8 * 7 * 6, 5)).to(dtype)
    x = torch.randn(2, 6, 9, 8).to(dtype)
    with float32_products():
        found = module(x)
    conv, _, head = module
    y = conv2d(x.float(), conv.weight.float(), conv.bias.float()).to(dtype).flatten(1)
    wanted = linear(y.float(), head.weight.float(), head.bias.float()).to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


PLAIN = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
GEOMETRIES = [
    PLAIN,
    {**PLAIN, "stride": (2, 1)},
    {**PLAIN, "padding": (0, 2)},
    {**PLAIN, "dilation": (1, 2), "padding": (1, 2)},
    {**PLAIN, "groups": 2},
]


@pytest.fixture
def made(monkeypatch):
    """The sizes of the products that were made instead of a convolution."""
    found, product = [], Products._product

    def counted(self, *operands):
        found.append(operands[0].shape)
        return product(self, *operands)

    monkeypatch.setattr(Products, "_product", counted)
    return found


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_small_images_at_once(geometry, made):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 4, 4, generator=random, dtype=torch.float64)
    w = torch.randn(6, 4 // geometry["groups"], 3, 3, generator=random, dtype=torch.float64)
    with small_images_at_once():
        y = torch.conv2d(x, w, **geometry)
    torch.testing.assert_close(y, torch.conv2d(x, w, **geometry), rtol=1e-13, atol=1e-13)
    assert y.is_contiguous()
    assert len(made) == (geometry["groups"] == 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_reaches_the_same_pixels(value, made):
    """Padding is multiplied, too."""
    for place in ("x", "w"):
        x, w = torch.ones(2, 3, 4, 4, dtype=torch.float64), torch.ones(5, 3, 3, 3).double()
        {"x": x, "w": w}[place].view(-1)[7] = value
        with small_images_at_once():
            y = torch.conv2d(x, w, **PLAIN)
        torch.testing.assert_close(y, torch.conv2d(x, w, **PLAIN), equal_nan=True)
    assert len(made) == 2


def test_large_images_and_other_dtypes_are_left_to_torch(made):
    with small_images_at_once():
        torch.conv2d(torch.ones(1, 3, 8, 8).double(), torch.ones(5, 3, 3, 3).double(), **PLAIN)
        torch.conv2d(torch.ones(1, 3, 4, 4), torch.ones(5, 3, 3, 3), **PLAIN)
    assert not made


class TestSomeImagesAtOnce:
    @pytest.fixture(params=[products.CHUNK_BYTES, 2000], autouse=True)
    def chunk(self, request, monkeypatch):
        monkeypatch.setattr(products, "CHUNK_BYTES", request.param)

    @pytest.fixture(params=["plain", "strided", "two numbers", "in groups"])
    def given(self, request):
        """Images, a weight, the gradient of the output, and what torch takes after these."""
        geometry = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
        for name, value in CONVOLUTIONS[request.param].items():
            geometry[name] = (
                (value, value) if isinstance(value, int) and name != "groups" else value
            )
        x = torch.randn(5, 6, 9, 8, dtype=torch.float64)
        w = torch.randn(4, 6 // geometry["groups"], 3, 2, dtype=torch.float64)
        return x, w, torch.randn_like(conv2d(x, w, **geometry)), geometry

    def test_a_convolution(self, given):
        x, w, _, geometry = given
        wanted = conv2d(x, w, **geometry)
        with SomeImagesAtOnce():
            torch.testing.assert_close(conv2d(x, w, **geometry), wanted)

    def test_its_gradients(self, given):
        x, w, dy, geometry = given
        sizes = (geometry["stride"], geometry["padding"], geometry["dilation"])
        for mask in ((True, False, False), (False, True, False), (True, True, False)):
            rest = (None, *sizes, False, (0, 0), geometry["groups"], mask)
            wanted = torch.ops.aten.convolution_backward(dy, x, w, *rest)
            with SomeImagesAtOnce():
                found = torch.ops.aten.convolution_backward(dy, x, w, *rest)
            for one, other in zip(found[:2], wanted[:2], strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other)

    def test_nan_reaches_what_depends_on_it_alone(self, given):
        x, w, dy, geometry = given
        x[3, 2, 4, 4] = dy[3, 1, 1, 1] = math.nan
        sizes = (geometry["stride"], geometry["padding"], geometry["dilation"])
        rest = (None, *sizes, False, (0, 0), geometry["groups"], (True, True, False))

        def found():
            gradients = torch.ops.aten.convolution_backward(dy, x, w, *rest)[:2]
            return [y.isnan() for y in (conv2d(x, w, **geometry), *gradients)]

        wanted = found()
        with SomeImagesAtOnce():
            assert all(map(torch.equal, found(), wanted))

    def test_torchs_own_is_not_called(self, monkeypatch):
        """Else it took one image after the other, and nobody would notice."""
        x, w = torch.randn(3, 2, 4, 4), torch.randn(2, 2, 3, 3)
        with SomeImagesAtOnce():
            assert products._conv2d(x, w) is not None
            monkeypatch.setattr(products, "_conv2d", lambda *given, **named: "ours")
            monkeypatch.setattr(products, "_gradients", lambda *given, **named: "ours too")
            rest = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True, True, False))
            assert torch.conv2d(x, w) == "ours"
            assert torch.ops.aten.convolution_backward(x, x, w, *rest) == "ours too"
