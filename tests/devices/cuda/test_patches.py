"""Kernels of a graph are told where a caller's tensor lies, or it is said that they cannot be."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_uint32, c_uint64, c_void_p
from typing import Any

import pytest

from plantune.devices.cuda import driver, recording
from plantune.devices.cuda.patches import Executable, Patch
from plantune.devices.cuda.recording import Recording, recorded
from plantune.devices.cuda.tensor_map import BYTES, TensorMap, tensor_map
from plantune.errors import CudaError

PLACES = (0x7F00_0000_1000, 0x7F00_0000_2000)
OTHER, EXECUTABLE = 0x7F00_0000_9000, 77
# How a driver may write the place of a tensor into a map, by the number of the word.
FORMATS: dict[str, Callable[[int], dict[int, int]]] = {
    "in its first word": lambda address: {0: address},
    "in another word": lambda address: {5: address},
    "shifted": lambda address: {5: address >> 4},
    "with its alignment": lambda address: {5: address, 9: address % 128 == 0},
    "with its page": lambda address: {5: address, 9: address >> 40},
}
Step = Callable[[int], None]


class Members(ctypes.Structure):
    _fields_ = (("size", c_uint32), ("x", c_void_p), ("y", c_void_p), ("count", c_uint64))


class Maps(ctypes.Structure):
    _fields_ = (("w", TensorMap), ("x", TensorMap))


class Driver:
    """Answers as a driver would, and keeps what the nodes of an instantiated graph hold."""

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[bytes, ...]] = {}
        self.extents: dict[int, tuple[int, ...]] = {}
        self.sizes: dict[int, list[int]] = {}
        self.fails = False
        self.encoded = 0
        self.format = FORMATS["shifted"]
        self._launches = 0

    def launch(self, function: Any, stream: int, extent: Any, arguments: Sequence[Any]) -> None:
        self._launches += 1
        self.sizes[self._launches] = [ctypes.sizeof(value) for value in arguments]

    def capture_of(self, stream: int) -> tuple[int, int | None]:
        return 1, self._launches

    def encode_tensor_map(self, place: int, address: int, *what: Any) -> None:
        assert place % 64 == 0
        assert address % 16 == 0
        self.encoded += 1
        words = {**dict(enumerate(range(100, 116))), **self.format(address)}
        ctypes.memmove(place, (c_uint64 * 16)(*words.values()), BYTES)

    def node_updater(self, executable: int, node: int, params: driver.NodeParams) -> Any:
        assert executable == EXECUTABLE
        sizes = self.sizes[node]

        def update() -> None:
            if self.fails:
                raise RuntimeError("refused")
            starts = [params.arguments[index] for index in range(len(sizes))]
            held = [ctypes.string_at(*part) for part in zip(starts, sizes, strict=True)]
            self.nodes[node] = tuple(held)
            self.extents[node] = (*params.grid, *params.block, params.shared_bytes)

        return update


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for name in ("launch", "capture_of", "encode_tensor_map", "node_updater"):
        monkeypatch.setattr(driver, name, getattr(made, name))
    return made


def launch(*values: Any, function: int = 3, grid: int = 2) -> None:
    extent = driver.Extent((grid, 1, 1), 64, 1024)
    recording.launch(c_void_p(function), 5, extent, values)


def recording_of(step: Step, place: int, *, only: bool = False) -> Recording:
    with recorded(only=only) as found:
        recording.label("step")
        step(place)
    return found


def patches_of(step: Step, elsewhere: Step | None = None) -> list[Patch] | None:
    """Of the tensor that `step` is given; recorded `elsewhere` with another step, if there is."""
    executable = Executable(EXECUTABLE, recording_of(step, PLACES[0]))
    other = recording_of(elsewhere or step, PLACES[1], only=True)
    return executable.patches(other, PLACES, ["step"])


def move(patches: list[Patch] | None, address: int) -> None:
    assert patches is not None
    for patch in patches:
        patch.move(address)


def map_of(address: int) -> TensorMap:
    return tensor_map("float16", address, (64, 64), (128,), (64, 64))


class TestFound:
    def test_a_pointer_that_is_an_argument(self, fake: Driver) -> None:
        move(patches_of(lambda x: launch(c_uint32(1), c_void_p(x))), OTHER)
        assert fake.nodes == {1: (bytes(c_uint32(1)), bytes(c_void_p(OTHER)))}
        assert fake.extents == {1: (2, 1, 1, 64, 1, 1, 1024)}

    def test_a_pointer_in_a_structure(self, fake: Driver) -> None:
        move(patches_of(lambda x: launch(Members(1, x, 5, 6))), OTHER)
        assert fake.nodes == {1: (bytes(Members(1, OTHER, 5, 6)),)}

    def test_two_pointers_to_one_tensor(self, fake: Driver) -> None:
        """A convolution may be added to its own input."""
        move(patches_of(lambda x: launch(Members(1, x, x, 6), c_void_p(x))), OTHER)
        assert fake.nodes == {1: (bytes(Members(1, OTHER, OTHER, 6)), bytes(c_void_p(OTHER)))}

    def test_each_launch_of_a_step(self, fake: Driver) -> None:
        def step(x: int) -> None:
            launch(c_void_p(x))
            launch(c_void_p(5))  # what it makes of the tensor is in memory of its own
            launch(c_void_p(x))

        move(patches_of(step), OTHER)
        assert fake.nodes == {1: (bytes(c_void_p(OTHER)),), 3: (bytes(c_void_p(OTHER)),)}

    @pytest.mark.parametrize("form", FORMATS)
    def test_a_tensor_map_as_the_driver_would_encode_it(self, fake: Driver, form: str) -> None:
        fake.format = FORMATS[form]
        patches = patches_of(lambda x: launch(Maps(map_of(4096), map_of(x)), c_void_p(x)))
        for address in (OTHER, OTHER + 16, PLACES[0], 1 << 46, OTHER):
            move(patches, address)
            wanted = bytes(Maps(map_of(4096), map_of(address)))
            assert fake.nodes == {1: (wanted, bytes(c_void_p(address)))}

    @pytest.mark.parametrize(
        ("form", "times"),
        [("in its first word", 0), ("in another word", 0), ("shifted", 1), ("with its page", 1)],
    )
    def test_only_what_is_more_than_an_address_is_encoded_again(
        self, fake: Driver, form: str, times: int
    ) -> None:
        fake.format = FORMATS[form]
        patches = patches_of(lambda x: launch(Maps(map_of(4096), map_of(x))))
        before = fake.encoded
        move(patches, OTHER)
        assert fake.encoded - before == times

    def test_a_driver_that_encodes_no_free_address(
        self, fake: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def encode(place: int, address: int, *what: Any) -> None:
            if address not in (*PLACES, OTHER):
                raise CudaError("nothing is there")
            fake.encode_tensor_map(place, address, *what)

        fake.format = FORMATS["in its first word"]
        monkeypatch.setattr(driver, "encode_tensor_map", encode)
        move(patches_of(lambda x: launch(map_of(x))), OTHER)
        assert fake.nodes == {1: (bytes(map_of(OTHER)),)}

    def test_two_ends_in_one_node_share_its_arguments(self, fake: Driver) -> None:
        """Each update sets all arguments of a node: none may take the other's address back."""
        executable = Executable(
            EXECUTABLE, recording_of(lambda x: launch(Members(1, x, 64, 6)), PLACES[0])
        )
        to_x = recording_of(lambda x: launch(Members(1, x, 64, 6)), PLACES[1], only=True)
        to_y = recording_of(lambda y: launch(Members(1, PLACES[0], y, 6)), 128, only=True)
        x, y = (
            executable.patches(to_x, PLACES, ["step"]),
            executable.patches(to_y, (64, 128), ["step"]),
        )
        move(x, OTHER)
        move(y, 256)
        assert fake.nodes == {1: (bytes(Members(1, OTHER, 256, 6)),)}

    def test_a_driver_that_refuses_is_heard(self, fake: Driver) -> None:
        patches = patches_of(lambda x: launch(c_void_p(x)))
        fake.fails = True
        with pytest.raises(RuntimeError, match="refused"):
            move(patches, OTHER)


def also(step: Step) -> Step:
    """After a launch that can be patched."""
    return lambda x: (launch(c_void_p(x)), step(x))[-1]


REFUSED: dict[str, tuple[Step, Step]] = {
    "a pointer behind its beginning": (lambda x: launch(c_void_p(x + 16)),) * 2,
    "another number differs": (
        lambda x: launch(c_void_p(x), c_uint64(1)),
        lambda x: launch(c_void_p(x), c_uint64(2)),
    ),
    "half of a word differs": (
        lambda x: launch(c_void_p(x), c_uint32(1)),
        lambda x: launch(c_void_p(x), c_uint32(2)),
    ),
    "a tensor map of something else": (lambda x: launch(map_of(x + 16)),) * 2,
    "a tensor map that nobody made": (
        lambda x: launch(TensorMap.from_buffer_copy((c_uint64 * 16)(1, 2, x >> 4))),
    )
    * 2,
    "another launch": (also(lambda x: None), also(lambda x: launch(c_void_p(x)))),
    "another grid": (lambda x: launch(c_void_p(x)), lambda x: launch(c_void_p(x), grid=3)),
    "another kernel": (lambda x: launch(c_void_p(x)), lambda x: launch(c_void_p(x), function=4)),
    "another number of arguments": (
        lambda x: launch(c_void_p(x)),
        lambda x: launch(c_void_p(x), c_void_p(x)),
    ),
    "arguments of another size": (
        lambda x: launch(c_void_p(x)),
        lambda x: launch(Members(1, x, 5, 6)),
    ),
    "no launch": (lambda x: None,) * 2,
}


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_otherwise_is_refused(name: str) -> None:
    assert patches_of(*REFUSED[name]) is None


def test_a_node_that_the_driver_does_not_tell_is_refused(
    fake: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "capture_of", lambda stream: (1, None))
    assert patches_of(lambda x: launch(c_void_p(x))) is None
    assert fake.nodes == {}


@pytest.mark.usefixtures("fake")
def test_a_step_that_shows_no_pointer_is_refused() -> None:
    """It touches the tensor, so it took the address at another time, and would keep it."""

    def steps(x: int) -> None:
        launch(c_void_p(x))
        recording.label("another")
        launch(c_void_p(PLACES[0]))

    executable = Executable(EXECUTABLE, recording_of(steps, PLACES[0]))
    elsewhere = recording_of(steps, PLACES[1], only=True)
    assert executable.patches(elsewhere, PLACES, ["step"]) is not None
    assert executable.patches(elsewhere, PLACES, ["step", "another"]) is None
