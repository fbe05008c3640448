"""cuDNN's algorithms are timed inside alone, whatever happens there."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from plantune.devices.cuda.flags import (
    autotuned,
    flags,
    float32_precisions,
    plain_float32,
    planned_for,
    precisions_of_calls,
    references_in_float32,
)


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
    places = (torch.backends.cudnn.conv, torch.backends.cuda.matmul, torch.backends.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    with plain_float32():
        assert [place.fp32_precision for place in places] == ["ieee"] * 3
    assert [place.fp32_precision for place in places] == before


@pytest.mark.parametrize("pinned", ["nothing", "cuda", "conv"])
@pytest.mark.parametrize("given", ["none", "tf32"])
@pytest.mark.usefixtures("copied_processes")
def test_a_precision_that_follows_another_still_does_after_a_reference(given, pinned):
    """In a process in which nobody has set any."""
    script = (
        "import torch\n"
        "from plantune.devices.cuda.flags import _SETTINGS, _get, _set, plain_float32\n"
        "def now(): return [_get(*place) for place in _SETTINGS]\n"
        "def after(): _set('generic', 'all', 'ieee'); return now()\n"
        f"_set('generic', 'all', {given!r})\n"
        f"{pinned!r} == 'cuda' and _set('cuda', 'all', 'tf32')\n"
        f"{pinned!r} == 'conv' and _set('cuda', 'conv', 'tf32')\n"
        "before = now()\n"
        "with plain_float32():\n"
        "    assert now() == ['ieee'] * 5, now()\n"
        # As torch.backends.cudnn.flags leaves it.
        f"    {given!r} == 'none' and _set('cuda', 'all', 'ieee')\n"
        "assert now() == before, (now(), before)\n"
        "print(*after()[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    own = {
        "nothing": "ieee ieee ieee ieee",
        "cuda": "tf32 tf32 tf32 tf32",
        "conv": "ieee tf32 ieee ieee",
    }
    assert (done.stdout.strip(), done.stderr) == (own[pinned], "")


def test_a_thread_that_makes_a_plan_keeps_to_one_precision():
    before, unasked = precisions_of_calls(), float32_precisions()
    with planned_for(("tf32", "ieee", "ieee")), ThreadPoolExecutor(1) as other:
        assert float32_precisions() == ("tf32", "ieee", "ieee")
        assert precisions_of_calls() == before
        assert other.submit(float32_precisions).result() == unasked
    assert float32_precisions() == unasked


@pytest.mark.parametrize("given", ["ieee", "tf32"])
def test_the_precision_of_products_is_what_torch_says_at_that_moment(given):
    conv, products = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    layers = torch.backends.cudnn.rnn
    with plain_float32():
        for number, place in enumerate((conv, products, layers)):
            with flags(place, fp32_precision=given):
                says = ["ieee"] * 3
                says[number] = given
                assert float32_precisions() == tuple(says)


def test_references_change_no_plan_of_anybody():
    with flags(torch.backends.cudnn.conv, fp32_precision="tf32"):
        before = float32_precisions()
        with references_in_float32(), ThreadPoolExecutor(1) as other:
            assert torch.backends.cudnn.conv.fp32_precision == "ieee"
            assert float32_precisions() == before
            assert other.submit(float32_precisions).result() == before
            with references_in_float32():
                assert float32_precisions() == before
        assert float32_precisions() == before
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"


def test_references_that_overlap_leave_what_was_before_them():
    """The first may end first, in another thread."""
    with flags(torch.backends.cudnn.conv, fp32_precision="tf32"):
        before = float32_precisions()
        first, second = references_in_float32(), references_in_float32()
        with ThreadPoolExecutor(1) as other:
            first.__enter__()
            other.submit(second.__enter__).result()
            first.__exit__(None, None, None)
            assert torch.backends.cudnn.conv.fp32_precision == "ieee"
            other.submit(second.__exit__, None, None, None).result()
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
        assert float32_precisions() == before
