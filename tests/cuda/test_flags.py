"""cuDNN's algorithms are timed inside alone, whatever happens there."""

from __future__ import annotations

import pytest
import torch

from plantune.cuda.flags import autotuned, plain_float32


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
