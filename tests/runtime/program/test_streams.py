"""Streams of plantune's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from plantune.devices.cuda.capture import one_capture
from plantune.runtime.program import streams

GPU = torch.device("cuda", 0)


class Owner:
    pass


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


@pytest.fixture
def gpu(monkeypatch):
    """What was waited for, and the streams that were made, on a GPU of which there is none."""
    done = SimpleNamespace(waits=0, made=[])

    def make(*_):
        done.made.append(SimpleNamespace())
        return done.made[-1]

    monkeypatch.setattr(streams, "_spare", {})
    monkeypatch.setattr(streams, "make_stream", lambda priority: priority)
    monkeypatch.setattr(torch.cuda, "ExternalStream", make)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: setattr(done, "waits", done.waits + 1))
    return done


def test_a_spare_one_is_waited_for(gpu):
    first = streams.stream_for(Owner(), GPU)
    assert streams.stream_for(Owner(), GPU) is first
    assert gpu.waits == 1
    assert len(gpu.made) == 1


def test_nobody_waits_for_the_gpu_beside_another_threads_capture(gpu):
    """A new stream instead: that capture would break, and to wait for its end may be for ever."""
    streams.stream_for(Owner(), GPU)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(one_capture.acquire).result()
        try:
            streams.stream_for(Owner(), GPU)
        finally:
            thread.submit(one_capture.release).result()
    assert gpu.waits == 0
    assert len(gpu.made) == 2
    streams.stream_for(Owner(), GPU)
    assert gpu.waits == 1
