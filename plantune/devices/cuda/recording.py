"""Records what a thread launches: the arguments that a captured graph holds, and in which node."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_void_p
from dataclasses import dataclass, field
from typing import Any, Protocol

from plantune.base.scopes import with_values
from plantune.devices.cuda import driver


class Encodes(Protocol):
    """Makes a tensor map for a tensor at another address."""

    def encoded(self, address: int) -> Any: ...


@dataclass(frozen=True)
class Launched:
    """A launch: the bytes of its arguments, and its node in the graph that is being captured."""

    label: str
    function: c_void_p
    extent: driver.Extent
    arguments: tuple[bytes, ...]
    node: int | None


@dataclass
class Recording:
    """The launches of a thread in order; with `only` nothing is really launched."""

    only: bool
    label: str = ""
    launches: list[Launched] = field(default_factory=list)
    # What made each tensor map, by its bytes.
    encoders: dict[bytes, Encodes] = field(default_factory=dict)

    def under(self, label: str) -> list[Launched]:
        return [launched for launched in self.launches if launched.label == label]


class _Current(threading.local):
    recording: Recording | None = None


_current = _Current()


@contextmanager
def recorded(*, only: bool = False) -> Iterator[Recording]:
    """Inside, this thread's launches are recorded."""
    recording = Recording(only)
    with with_values(_current, recording=recording):
        yield recording


def label(name: str) -> None:
    """Launches of this thread are recorded under this name from here on."""
    if _current.recording is not None:
        _current.recording.label = name


def note_encoder(encoded: bytes, encoder: Encodes) -> None:
    """Keeps what made a tensor map while launches are recorded."""
    if _current.recording is not None:
        _current.recording.encoders[encoded] = encoder


def launch(
    function: c_void_p, stream: int, extent: driver.Extent, arguments: Sequence[Any]
) -> None:
    """Launches a kernel on a stream; `arguments` are ctypes values, passed by value."""
    recording = _current.recording
    if recording is None or not recording.only:
        driver.launch(function, stream, extent, arguments)
    if recording is not None:
        capture = None if recording.only else driver.capture_of(stream)
        content = tuple(bytes(value) for value in arguments)
        node = None if capture is None else capture[1]
        recording.launches.append(Launched(recording.label, function, extent, content, node))
