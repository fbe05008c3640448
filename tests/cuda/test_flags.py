"""cuDNN's algorithms are timed inside alone, whatever happens there."""

from __future__ import annotations

import pytest
import torch

from plantune.cuda.flags import autotuned, flags, float32_products, plain_float32


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)


def now():
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


@pytest.mark.parametrize("deterministic", [False, True])
def test_inside_it_is_on_and_outside_as_before(deterministic):
    with autotuned(deterministic=deterministic):
        assert now() == (True, deterministic)
    assert now() == (False, False)


def test_what_the_user_asked_for_stays(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with autotuned(deterministic=False):
        assert now() == (True, True)


def test_an_error_leaves_nothing_switched():
    with pytest.raises(ValueError, match="inside"), autotuned(deterministic=False):
        raise ValueError("inside")
    assert now() == (False, False)


def test_a_reference_in_float32_has_no_tf32():
    places = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    before = [place.fp32_precision for place in places]
    with plain_float32():
        assert [place.fp32_precision for place in places] == ["ieee", "ieee"]
    assert [place.fp32_precision for place in places] == before


@pytest.mark.parametrize("given", ["ieee", "tf32"])
def test_the_precision_of_products_is_what_torch_says_at_that_moment(given):
    products = torch.backends.cuda.matmul
    with (
        flags(torch.backends.cudnn.conv, fp32_precision=given),
        flags(products, fp32_precision="ieee"),
    ):
        assert float32_products() == (given, "ieee")
    with plain_float32(), flags(products, fp32_precision=given):
        assert float32_products() == ("ieee", given)
