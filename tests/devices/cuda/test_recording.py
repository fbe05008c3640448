"""What a thread launches is written down: arguments, label and node."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from plantune.devices.cuda import driver, recording

EXTENT = driver.Extent((2, 1, 1), 64)
FUNCTION = ctypes.c_void_p(7)


class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_uint64), ("second", ctypes.c_uint32))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of what the driver launched, each in a node with the number of the launch."""
    found: list[Any] = []
    monkeypatch.setattr(driver, "launch", lambda f, stream, extent, given: found.append(given))
    monkeypatch.setattr(driver, "capture_of", lambda stream: (1, len(found)))
    return found


def launch(*values: Any) -> None:
    recording.launch(FUNCTION, 5, EXTENT, values)


def test_nothing_is_recorded_outside(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "capture_of", None)  # and the driver is asked for nothing
    recording.label("a")
    recording.note_encoder(b"map", None)  # type: ignore[arg-type]
    launch(ctypes.c_int(3))
    assert len(launched) == 1


@pytest.mark.usefixtures("launched")
def test_bytes_and_node_of_each_launch_under_its_label() -> None:
    with recording.recorded() as found:
        launch(ctypes.c_int(0))
        recording.label("a")
        launch(ctypes.c_int(1), Pair(2, 3))
        launch()
        recording.label("b")
        launch(ctypes.c_void_p(4))
    assert [one.node for one in found.launches] == [1, 2, 3, 4]
    first, second = found.under("a")
    assert first.arguments == (bytes(ctypes.c_int(1)), bytes(Pair(2, 3)))
    assert (first.function, first.extent) == (FUNCTION, EXTENT)
    assert second.arguments == ()
    assert [one.arguments for one in found.under("b")] == [((4).to_bytes(8, "little"),)]


@pytest.mark.usefixtures("launched")
def test_arguments_that_change_later_are_recorded_as_they_were() -> None:
    pair = Pair(1, 2)
    with recording.recorded() as found:
        launch(pair)
        pair.first = 9
    assert found.launches[0].arguments == (bytes(Pair(1, 2)),)


def test_only_recorded_nothing_is_launched(launched: list[Any]) -> None:
    with recording.recorded(only=True) as found:
        launch(ctypes.c_int(1))
    assert launched == []
    assert [one.node for one in found.launches] == [None]


def test_outside_of_a_capture_there_is_no_node(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "capture_of", lambda stream: None)
    with recording.recorded() as found:
        launch(ctypes.c_int(1))
    assert len(launched) == 1
    assert found.launches[0].node is None


def test_an_error_ends_the_recording(launched: list[Any]) -> None:
    with pytest.raises(ValueError, match="broke"), recording.recorded(only=True) as found:
        raise ValueError("broke")
    launch(ctypes.c_int(1))
    assert len(launched) == 1
    assert found.launches == []


@pytest.mark.usefixtures("launched")
def test_a_recording_inside_of_another_has_its_launches_for_itself() -> None:
    with recording.recorded() as outer:
        recording.label("a")
        with recording.recorded(only=True) as inner:
            launch(ctypes.c_int(1))
        launch(ctypes.c_int(2))
    assert [one.label for one in inner.launches] == [""]
    assert [one.arguments for one in outer.under("a")] == [(bytes(ctypes.c_int(2)),)]


def test_another_threads_launches_are_its_own(launched: list[Any]) -> None:
    with recording.recorded(only=True) as found:
        other = threading.Thread(target=lambda: (recording.label("b"), launch(ctypes.c_int(1))))
        other.start()
        other.join()
    assert len(launched) == 1, "what is only recorded here is launched there"
    assert (found.label, found.launches) == ("", [])
