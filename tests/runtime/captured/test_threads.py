"""Backward passes come in threads of autograd's: each is prepared before a caller captures."""

from __future__ import annotations

import torch

from plantune.runtime.captured import captured_program as captured
from plantune.runtime.captured.handles import _ThisThread

from .conftest import program_of


def passes(program, x: torch.Tensor) -> None:
    (y,) = program.forward(x)
    program.backward(torch.ones_like(y))


def test_replays_prepare_what_the_warm_up_called(captures, module, x, monkeypatch) -> None:
    made = []
    monkeypatch.setattr(captured, "make_handles", lambda libraries: made.append(set(libraries)))
    program = program_of(module, train=True)
    program._recorder.libraries |= {"cudnn"}
    passes(program, x)
    passes(program, x)
    assert made == [{"cudnn"}, {"cudnn"}]


def test_cudnn_searches_only_where_it_can_or_has(captures, module, x, monkeypatch) -> None:
    """In a capture it finds what an earlier run in the same thread found."""
    monkeypatch.setattr(captured, "this_thread", _ThisThread())
    searched = []
    autotuned = captured.autotuned

    def noting(**given):
        searched.append(given["searches"])
        return autotuned(**given)

    monkeypatch.setattr(captured, "autotuned", noting)
    program = program_of(module, train=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        program._autotuned()
    passes(program, x)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        program._autotuned()
    assert searched[0] is False
    assert searched[1:]
    assert all(searched[1:])
