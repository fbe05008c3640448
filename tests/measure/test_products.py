"""Convolutions of small images as one product: torch's numbers, for every geometry."""

from __future__ import annotations

import math

import pytest
import torch

from plantune.measure.products import OneProduct

PLAIN = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
GEOMETRIES = [
    PLAIN,
    {**PLAIN, "stride": (2, 1)},
    {**PLAIN, "padding": (0, 2)},
    {**PLAIN, "dilation": (1, 2), "padding": (1, 2)},
    {**PLAIN, "groups": 2},
]


@pytest.fixture
def products(monkeypatch):
    """The sizes of the products that were made instead of a convolution."""
    made, unfold = [], torch.nn.functional.unfold

    def counted(*arguments):
        made.append(arguments[0].shape)
        return unfold(*arguments)

    monkeypatch.setattr(torch.nn.functional, "unfold", counted)
    return made


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_it_is_what_torch_makes(geometry, products):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 4, 4, generator=random, dtype=torch.float64)
    w = torch.randn(6, 4 // geometry["groups"], 3, 3, generator=random, dtype=torch.float64)
    with OneProduct():
        y = torch.conv2d(x, w, **geometry)
    torch.testing.assert_close(y, torch.conv2d(x, w, **geometry), rtol=1e-13, atol=1e-13)
    assert y.is_contiguous()
    assert len(products) == (geometry["groups"] == 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_reaches_the_same_pixels(value, products):
    """Padding is multiplied, too."""
    for place in ("x", "w"):
        x, w = torch.ones(2, 3, 4, 4, dtype=torch.float64), torch.ones(5, 3, 3, 3).double()
        {"x": x, "w": w}[place].view(-1)[7] = value
        with OneProduct():
            y = torch.conv2d(x, w, **PLAIN)
        torch.testing.assert_close(y, torch.conv2d(x, w, **PLAIN), equal_nan=True)
    assert len(products) == 2


def test_large_images_and_other_dtypes_are_left_to_torch(products):
    with OneProduct():
        torch.conv2d(torch.ones(1, 3, 8, 8).double(), torch.ones(5, 3, 3, 3).double(), **PLAIN)
        torch.conv2d(torch.ones(1, 3, 4, 4), torch.ones(5, 3, 3, 3), **PLAIN)
    assert not products
