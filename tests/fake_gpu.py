"""torch.cuda for tests without a GPU: streams that remember, graphs that hold nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch


class Stream:
    """Remembers whom it waited for, and the class which one is current."""

    current: Stream

    def __init__(self, device: object = None) -> None:
        self.waited: list[Stream] = []
        self.cuda_stream = id(self)

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Graph:
    """Of what was captured in it a replay does nothing. Nobody hands out its nodes."""

    def __init__(self, **_: object) -> None:
        self.was_captured = False

    def capture_begin(self, *_: object, **options: object) -> None:
        self.was_captured = True

    def capture_end(self) -> None:
        pass

    instantiate = capture_end

    def raw_cuda_graph_exec(self) -> None:
        return None

    def replay(self) -> None:
        assert self.was_captured, "nothing was captured"


@contextmanager
def captured_into(graph: Graph, **_: object) -> Iterator[None]:
    graph.capture_begin()
    yield


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """As torch does where a capture breaks: it stays on its stream."""
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


def replace_torchs(monkeypatch: pytest.MonkeyPatch, **others: Any) -> None:
    """Puts all of this, and others, in the place of torch's."""
    Stream.current = Stream()
    functions = {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda device=None: Stream.current,
        "set_stream": lambda stream: setattr(Stream, "current", stream),
        "stream": on_stream,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "device": lambda device: nullcontext(),
        "graph": captured_into,
    }
    for name, function in {**functions, **others}.items():
        monkeypatch.setattr(torch.cuda, name, function)
