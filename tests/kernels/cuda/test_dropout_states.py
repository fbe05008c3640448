"""What a captured recurrent layer counts its random numbers in lives as long as its call."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch

from plantune.kernels.torch_ops import keeping


@pytest.fixture
def states(monkeypatch):
    """References to what each call of a layer counted in; there is no cuDNN here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return []


def layer(states):
    def call():
        state = torch.empty(8, dtype=torch.uint8, device="meta")
        states.append(weakref.ref(state))
        x, h = (torch.empty(*shape, device="meta") for shape in ((3, 2, 4), (1, 2, 4)))
        weights = [torch.empty(16, 4, device="meta")] * 2
        sizes = (4, 0, 1, False, 0.5, True, False, [], state)
        torch.ops.aten._cudnn_rnn(x, weights, 2, None, h, h, 2, *sizes)

    return call


def test_a_capture_keeps_it(states):
    call = keeping("aten.lstm.input", layer(states))
    call()
    call()
    assert all(state() is not None for state in states)
    del call
    assert all(state() is None for state in states)


def test_in_inference_mode_too(states):
    call = keeping("aten.lstm.input", layer(states))
    with torch.inference_mode():
        call()
    assert states[0]() is not None


def test_nothing_else_does(states, monkeypatch):
    keeping("aten.gelu.default", layer(states))()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call = keeping("aten.gru.input", layer(states))
    call()
    assert all(state() is None for state in states)


def test_torchs_advice_on_weights_is_not_passed_on(states):
    def call():
        advice = "RNN module weights are not part of single contiguous chunk of memory."
        warnings.warn(advice, UserWarning, stacklevel=1)

    keeping("aten.gru.input", call)()
