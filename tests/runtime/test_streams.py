"""Streams of plantune's own."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from plantune.runtime import streams


def test_collectives_come_before_the_blocks_of_passes(monkeypatch):
    """Else they wait until no kernel of a pass is left."""
    asked = []
    monkeypatch.setattr(streams, "_spare", {})
    monkeypatch.setattr(streams, "make_stream", asked.append)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda *given: SimpleNamespace())
    owner, device = SimpleNamespace, torch.device("cuda", 0)
    streams.stream_for(owner, device)
    streams.stream_for(owner, device, "collectives")
    assert asked[0] == 0 > asked[1]
