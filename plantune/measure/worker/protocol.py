"""Messages between a measuring worker and its parent: framed JSON over descriptors of their own.

Whatever a library prints goes elsewhere, and what is not a message is recognised. JSON alone, so
that nothing which comes over a pipe is ever run.
"""

from __future__ import annotations

import json
import math
import os
import select
import struct
import time
import zlib
from typing import Any

from plantune.base.canonical import canonical
from plantune.errors import ProtocolError

Message = dict[str, Any]

# Before each body: a mark, the body's length, and its checksum.
HEADER = struct.Struct("<4sII")
MARK = b"plt1"
# A graph of a thousand nodes has less than one.
LIMIT_BYTES = 64 << 20
CHUNK_BYTES = 1 << 16


class Channel:
    """Both directions between a worker and its parent; it owns its descriptors.

    A deadline is on `time.monotonic`; beyond it TimeoutError is raised, and the channel is in the
    middle of a message.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)

    def send(self, message: Message, deadline: float = math.inf) -> None:
        """Raises BrokenPipeError if the other side is gone."""
        left = memoryview(encode(message))
        while left:
            _wait(self._outgoing, select.POLLOUT, deadline)
            left = left[os.write(self._outgoing, left[:CHUNK_BYTES]) :]

    def receive(self, deadline: float = math.inf) -> Message:
        """The next message.

        Raises EOFError if the other side is gone, ProtocolError if it sent something else.
        """
        mark, length, checksum = HEADER.unpack(self._read(HEADER.size, deadline))
        if mark != MARK or length > LIMIT_BYTES:
            raise ProtocolError(f"no message starts with {mark!r}, {length} bytes")
        body = self._read(length, deadline)
        if zlib.crc32(body) != checksum:
            raise ProtocolError(f"a message of {length} bytes arrived damaged")
        return decode(body)

    def _read(self, count: int, deadline: float) -> bytes:
        read = bytearray()
        while len(read) < count:
            _wait(self._incoming, select.POLLIN, deadline)
            chunk = os.read(self._incoming, min(count - len(read), CHUNK_BYTES))
            if not chunk:
                raise EOFError(f"the other side is gone after {len(read)} of {count} bytes")
            read += chunk
        return bytes(read)

    def close(self) -> None:
        os.close(self._incoming)
        os.close(self._outgoing)


def encode(message: Message) -> bytes:
    """A message with its header; raises ProtocolError if it is too large."""
    body = canonical(message).encode()
    if len(body) > LIMIT_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {LIMIT_BYTES}")
    return HEADER.pack(MARK, len(body), zlib.crc32(body)) + body


def decode(body: bytes) -> Message:
    """The message of a body; raises ProtocolError if it is not a JSON object."""
    try:
        message = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a message is an object, got {type(message).__name__}")
    return message


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that JSON knows")


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Returns when the descriptor can be used, or when its other side is gone."""
    poll = select.poll()
    poll.register(descriptor, event)
    left = deadline - time.monotonic()
    if not poll.poll(None if left == math.inf else max(left, 0) * 1e3):
        raise TimeoutError("the deadline is over")
