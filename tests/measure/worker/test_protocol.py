from __future__ import annotations

import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator

import pytest

from plantune.base.canonical import canonical
from plantune.errors import InvalidGraph, ProtocolError
from plantune.graph.graph import Graph
from plantune.graph.step import Step, make_step
from plantune.graph.types import TensorType
from plantune.measure.worker import protocol
from plantune.measure.worker.protocol import HEADER, LIMIT_BYTES, MARK, Channel, decode, encode


@pytest.fixture
def ends() -> Iterator[tuple[Channel, int]]:
    """A channel, and the descriptor from which it reads, to write into."""
    incoming, theirs = os.pipe()
    unread, outgoing = os.pipe()
    channel = Channel(incoming, outgoing)
    yield channel, theirs
    channel.close()
    for descriptor in (theirs, unread):
        os.close(descriptor)


@pytest.fixture
def loop() -> Iterator[Channel]:
    """A channel that reads what it sends."""
    incoming, outgoing = os.pipe()
    channel = Channel(incoming, outgoing)
    yield channel
    channel.close()


def test_a_message_arrives_as_it_was_sent(loop):
    message = {"text": 'a "b" \n ü', "list": [1, 2.5, None, True], "nested": {"a": {}}}
    loop.send(message)
    loop.send({"second": 1})
    assert loop.receive() == message
    assert loop.receive() == {"second": 1}


def test_a_message_larger_than_the_pipe(loop):
    message = {"text": "x" * (1 << 20)}
    sender = threading.Thread(target=loop.send, args=(message,))
    sender.start()
    assert loop.receive() == message
    sender.join()


def test_a_reader_that_does_not_read(loop):
    with pytest.raises(TimeoutError):
        loop.send({"text": "x" * (1 << 20)}, time.monotonic() + 0.05)


@pytest.mark.parametrize("sent", [b"", b"plt", HEADER.pack(MARK, 5, 0) + b"{}"])
def test_the_deadline_within_a_message(ends, sent):
    channel, theirs = ends
    os.write(theirs, sent)
    deadline = time.monotonic() + 0.1
    with pytest.raises(TimeoutError):
        channel.receive(deadline)
    assert time.monotonic() >= deadline


def test_a_message_in_many_pieces(ends):
    channel, theirs = ends
    data = encode({"a": 1})

    def trickle():
        for byte in data:
            os.write(theirs, bytes([byte]))

    writer = threading.Thread(target=trickle)
    writer.start()
    assert channel.receive() == {"a": 1}
    writer.join()


def body(text: bytes) -> bytes:
    return HEADER.pack(MARK, len(text), zlib.crc32(text)) + text


@pytest.mark.parametrize(
    "sent",
    [
        b"Hello, I am a library and I print things.\n",
        struct.pack("<4sII", MARK, LIMIT_BYTES + 1, 0),
        HEADER.pack(MARK, 2, zlib.crc32(b"{}") ^ 1) + b"{}",
        body(b"\xff\xfe"),
        body(b'{"a": NaN}'),
        body(b'{"a": 1'),
        body(b"[1, 2]"),
        body(b'"text"'),
        body(b"[" * 60_000),
    ],
)
def test_garbage_is_not_a_message(ends, sent):
    channel, theirs = ends
    os.write(theirs, sent)
    with pytest.raises(ProtocolError):
        channel.receive()


@pytest.mark.parametrize("place", range(len(encode({"median_us": 12.5}))))
def test_every_damaged_byte_is_seen(ends, place):
    """A length that grew waits for what does not come."""
    channel, theirs = ends
    bad = bytearray(encode({"median_us": 12.5}))
    bad[place] ^= 1
    os.write(theirs, bad)
    with pytest.raises((ProtocolError, TimeoutError)):
        channel.receive(time.monotonic() + 0.05)


@pytest.mark.parametrize("sent", [b"", b"plt1", encode({"a": 1})[:-1]])
def test_the_other_side_is_gone(sent):
    incoming, theirs = os.pipe()
    unread, outgoing = os.pipe()
    channel = Channel(incoming, outgoing)
    os.write(theirs, sent)
    os.close(theirs)
    os.close(unread)
    with pytest.raises(EOFError):
        channel.receive()
    with pytest.raises(BrokenPipeError):
        channel.send({"a": 1})
    channel.close()


def test_a_message_over_the_limit_is_not_sent(monkeypatch):
    monkeypatch.setattr(protocol, "LIMIT_BYTES", 100)
    with pytest.raises(ProtocolError, match="over the limit of 100"):
        encode({"text": "x" * 100})


def test_no_message_holds_a_nan():
    with pytest.raises(ValueError, match="JSON"):
        encode({"a": float("nan")})
    with pytest.raises(ProtocolError):
        decode(b'{"a": Infinity}')


@pytest.fixture
def step(step_of) -> Step:
    def emit(b):
        x, w = b.input("x", TensorType((2, 3, 8, 8))), b.parameter("w", TensorType((4, 3, 3, 3)))
        geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
        (y,) = b.emit("conv2d", x, w, **geometry)
        return b.emit("relu", y)

    return step_of(emit)


def test_a_step_travels_whole(step):
    sent = json.loads(canonical(step.to_json()))
    assert Step.from_json(sent) == step
    assert Step.from_json(sent).signature == step.signature
    assert Step.from_json(sent).constants == {"w"}


def test_a_part_of_a_graph_travels(step):
    graph = Graph(step.inputs, (), (), step.nodes, ("relu",))
    for name in ("conv2d", "relu"):
        part = make_step(graph, [name])
        assert Step.from_json(json.loads(canonical(part.to_json()))) == part
    renamed = step.renamed({"x": "x in nhwc"})
    assert Step.from_json(renamed.to_json()) == renamed


def without(data, key):
    return {k: v for k, v in data.items() if k != key}


SPOILED = {
    "a missing field": lambda d: without(d, "phase"),
    "an unknown field": lambda d: {**d, "more": 1},
    "an unknown phase": lambda d: {**d, "phase": "sideways"},
    "no nodes": lambda d: {**d, "nodes": []},
    "no outputs": lambda d: {**d, "outputs": []},
    "an unknown op": lambda d: {**d, "nodes": [{**d["nodes"][0], "op": "system"}, d["nodes"][1]]},
    "nodes that do not fit": lambda d: {**d, "nodes": d["nodes"][::-1]},
    "an input that nobody reads": lambda d: {**d, "inputs": [*d["inputs"], ["z", TYPE]]},
    "a missing input": lambda d: {**d, "inputs": d["inputs"][:1]},
    "a constant that is not an input": lambda d: {**d, "constants": ["v"]},
    "constants out of order": lambda d: {**d, "constants": ["x", "w"]},
    "an output that is an input": lambda d: {**d, "outputs": [d["inputs"][0]]},
    "an output of another type": lambda d: {**d, "outputs": [["relu", TYPE]]},
    "a size that is not a number": lambda d: {**d, "inputs": [["x", {**TYPE, "shape": ["2"]}]]},
    "a list": lambda d: [d],
    "nothing": lambda d: None,
}
TYPE = {"shape": [2], "dtype": "float32", "layout": "nchw"}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_is_not_a_step_is_refused(step, spoil):
    with pytest.raises(InvalidGraph):
        Step.from_json(spoil(json.loads(canonical(step.to_json()))))
