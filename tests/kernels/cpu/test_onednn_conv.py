from __future__ import annotations

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.kernels.cpu import onednn
from plantune.kernels.families.onednn_conv import FAMILY
from plantune.kernels.family import Frame
from plantune.kernels.registry import candidates
from plantune.measure.inputs import draw_inputs

CONFIG = {"layout": "nhwc", "prepack": True}


def conv(b):
    return b.conv(b.x(2, 3, 6, 6), b.w(4, 3, 3, 3))


def test_it_says_what_is_not_an_epilogue(step_of, refusal):
    step = step_of(lambda b: b("affine", conv(b), alpha=2.0, beta=0.0))
    assert "affine at 'affine' has no place" in refusal(step, "onednn_conv", **CONFIG)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtypes_that_it_runs(step_of, refusal, monkeypatch, dtype):
    monkeypatch.setattr(onednn, "runs_bfloat16", lambda: True)
    assert refusal(step_of(conv, dtype), "onednn_conv", **CONFIG) is None


def test_a_cpu_without_bfloat16(step_of, refusal, monkeypatch):
    """With AVX2 alone torch raises an error of its own, which would end a search."""
    monkeypatch.setattr(onednn, "runs_bfloat16", lambda: False)
    reason = refusal(step_of(conv, "bfloat16"), "onednn_conv", **CONFIG)
    assert reason == "oneDNN runs bfloat16 on CPUs with AVX-512 or AVX-NE-CONVERT alone"
    assert refusal(step_of(conv), "onednn_conv", **CONFIG) is None


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_it_names_a_dtype_that_it_does_not_run(step_of, refusal, dtype):
    assert f"not {dtype}" in refusal(step_of(conv, dtype), "onednn_conv", **CONFIG)


def test_a_torch_without_onednn(step_of, refusal, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    reason = refusal(step_of(conv), "onednn_conv", **CONFIG)
    assert reason == "this torch was built without oneDNN"


def test_configs_are_those_of_the_space(step_of, refusal, space):
    step = step_of(conv)
    found = [c.config for c in candidates(step, space) if c.family == "onednn_conv"]
    assert found == list(space.configs("onednn_conv"))
    assert len(found) >= 2
    assert "is not in the search space" in refusal(step, "onednn_conv", layout="nhwc", prepack=7)


def test_relu_keeps_nan(step_of):
    """oneDNN's own ReLU makes 0 of NaN and would hide a diverging network."""
    step = step_of(lambda b: b("relu", conv(b)))
    values = draw_inputs(step, torch.Generator().manual_seed(0))
    values["x0"] = values["x0"].contiguous(memory_format=torch.channels_last)
    values["x0"][0, 1, 3, 3] = torch.nan
    y = values["relu"] = torch.empty(2, 4, 4, 4).contiguous(memory_format=torch.channels_last)
    binding = FAMILY.bind(FAMILY.parts(step), Attrs(CONFIG), Frame(values))
    binding.refresh()
    binding.launch(0)
    assert torch.equal(y.isnan(), step.evaluate(values)["relu"].isnan())
    assert y.isnan().any()
    assert not y[1].isnan().any()
