"""Changes of a module by every promised route, in any order: the next call is right.

`tools/studies/change_weights.py` runs as many as one likes, also on a GPU.
"""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
import torch

from plantune.runtime.calls.call_table import KEPT_SIGNATURES

from ...conftest import ROOT


@pytest.fixture(scope="module")
def script():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "studies" / "change_weights.py")))


@pytest.fixture(autouse=True)
def _same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def assert_holds(script, run):
    assert run["wrong"] == []
    assert script.summary([run])["holds"]
    # Of each signature that is kept: two batches, in training and without.
    assert run["instances"] <= 4 * KEPT_SIGNATURES


@pytest.mark.parametrize("calls", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_is_stale(script, calls):
    assert_holds(script, script.followed(0, script.Settings(calls)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_is_stale_on_a_gpu(script, dtype):
    assert_holds(
        script, script.followed(0, script.Settings(300, "cuda", dtype, every=3, compared=0.3))
    )


def test_what_no_look_notices_is_found(script, monkeypatch):
    monkeypatch.setattr(
        "plantune.runtime.captured.program_pool.LiveState.changed", lambda self: False
    )
    run = script.followed(0, script.Settings(100))
    assert run["wrong"]
    assert not script.summary([run])["holds"]


def test_growth_is_judged_where_the_time_ends_a_run(script):
    run = script.followed(0, script.Settings(1_000_000, seconds=0.2))
    assert run["calls"] < 1_000_000
    assert [len(held) for held in run["held_mib"]] == [2, 2]
