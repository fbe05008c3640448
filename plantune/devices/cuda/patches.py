"""Kernels of an instantiated graph whose pointers to a caller's memory change from call to call.

Which bytes of their arguments hold such a pointer is not guessed: the launches are recorded with
the tensor at two places, and what differs must be the two addresses, or tensor maps of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_uint, c_uint64, c_void_p
from dataclasses import dataclass

from plantune.devices.cuda import driver, tensor_map
from plantune.devices.cuda.recording import Encodes, Launched, Recording
from plantune.errors import CudaError

WORD_BYTES = 8
# Of an address that a tensor map may have: aligned to 16 bytes, and within 47 bits.
PROBED_BITS = range(4, 47)
Places = tuple[int, int]  # of a tensor: when the graph was captured, and where it is now


@dataclass(frozen=True)
class Slot:
    """Where an argument holds a pointer, or with `encoder` a tensor map."""

    argument: int
    start: int
    encoder: Encodes | None = None


class Node:
    """A kernel node, and the arguments that its next launch has."""

    def __init__(self, executable: int, place: int, launched: Launched) -> None:
        self._memory = [ctypes.create_string_buffer(a, len(a)) for a in launched.arguments]
        self.starts = [ctypes.addressof(memory) for memory in self._memory]
        params = driver.NodeParams(
            function=launched.function,
            grid=(c_uint * 3)(*launched.extent.grid),
            block=(c_uint * 3)(launched.extent.threads, 1, 1),
            shared_bytes=launched.extent.shared_bytes,
            arguments=(c_void_p * len(self.starts))(*self.starts),
        )
        self.update = driver.node_updater(executable, place, params)


class Patch:
    """Where a node's arguments hold a tensor."""

    def __init__(self, node: Node, slots: Sequence[Slot]) -> None:
        self._node = node  # it keeps its arguments' memory
        # From the next launch on the kernel finds the tensor at that address.
        self.move = _mover(node, slots)


def _mover(node: Node, slots: Sequence[Slot]) -> Callable[[int], None]:
    """Made once, and one function where it can be: calls wait for it."""
    update = node.update
    if len(slots) == 1 and slots[0].encoder is None:
        word = c_uint64.from_address(node.starts[slots[0].argument] + slots[0].start)

        def move_word(address: int) -> None:
            word.value = address
            update()

        return move_word
    writes = [_writes(node.starts[slot.argument] + slot.start, slot.encoder) for slot in slots]

    def move(address: int) -> None:
        for write in writes:
            write(address)
        update()

    return move


class Executable:
    """A graph that was made of a capture, with the kernels recorded during it."""

    def __init__(self, handle: int, captured: Recording) -> None:
        self._handle = handle
        self._captured = captured
        self._made: dict[int, Node] = {}

    def patches(
        self, elsewhere: Recording, places: Places, labels: Sequence[str]
    ) -> list[Patch] | None:
        """What moves a tensor that only the launches under these labels touch, which were recorded
        `elsewhere` too. None if some arguments differ otherwise, a node is not known, or a
        label shows no pointer: its kernels were given the address at another time.
        """
        found = []
        for label in labels:
            of_label = self._patches_of(self._captured.under(label), elsewhere.under(label), places)
            if not of_label:
                return None
            found += of_label
        return found or None

    def _patches_of(
        self, here: Sequence[Launched], there: Sequence[Launched], places: Places
    ) -> list[Patch]:
        """Those of one label; none if something speaks against them."""
        if len(here) != len(there):
            return []
        found = []
        for one, other in zip(here, there, strict=True):
            slots = _slots(one, other, places, self._captured.encoders)
            if slots is None or (slots and one.node is None):
                return []
            if slots:
                found.append(Patch(self._node_of(one), slots))
        return found

    def _node_of(self, launched: Launched) -> Node:
        place = launched.node
        assert place is not None
        if place not in self._made:
            self._made[place] = Node(self._handle, place, launched)
        return self._made[place]


def _slots(
    one: Launched, other: Launched, places: Places, encoders: dict[bytes, Encodes]
) -> list[Slot] | None:
    """Where two launches differ by the place of a tensor; None if they differ otherwise."""
    same = one.extent == other.extent and one.function.value == other.function.value
    if not same or [*map(len, one.arguments)] != [*map(len, other.arguments)]:
        return None
    slots: list[Slot] = []
    for index, (mine, its) in enumerate(zip(one.arguments, other.arguments, strict=True)):
        start = 0
        while start < len(mine):
            if mine[start : start + WORD_BYTES] == its[start : start + WORD_BYTES]:
                start += WORD_BYTES
                continue
            slot = _slot(index, start, mine, its, places, encoders)
            if slot is None:
                return None
            slots.append(slot)
            start = slot.start + (WORD_BYTES if slot.encoder is None else tensor_map.BYTES)
    return slots


def _slot(
    index: int, start: int, mine: bytes, its: bytes, places: Places, encoders: dict[bytes, Encodes]
) -> Slot | None:
    """The slot at a word that differs."""
    last = start // tensor_map.ALIGNMENT * tensor_map.ALIGNMENT
    for first in range(last, max(last - tensor_map.BYTES, -1), -tensor_map.ALIGNMENT):
        encoded, moved = (text[first : first + tensor_map.BYTES] for text in (mine, its))
        encoder = encoders.get(encoded)
        if encoder is None:
            continue
        if [bytes(encoder.encoded(place)) for place in places] != [encoded, moved]:
            return None
        alone = _is_address_alone(encoder, encoded, start - first, places[0])
        return Slot(index, start) if alone else Slot(index, first, encoder)
    words = (mine[start : start + WORD_BYTES], its[start : start + WORD_BYTES])
    pointers = tuple(place.to_bytes(WORD_BYTES, "little") for place in places)
    return Slot(index, start) if words == pointers else None


def _is_address_alone(encoder: Encodes, encoded: bytes, at: int, place: int) -> bool:
    """Whether all that a tensor map says of the tensor's place is its address, in one word: then
    that is written, which costs less than encoding it again.
    """
    for address in (place ^ (1 << bit) for bit in PROBED_BITS):
        word = address.to_bytes(WORD_BYTES, "little")
        try:
            found = bytes(encoder.encoded(address))
        except CudaError:  # a driver that knows that nothing is there
            return False
        if found != encoded[:at] + word + encoded[at + WORD_BYTES :]:
            return False
    return True


def _writes(at: int, encoder: Encodes | None) -> Callable[[int], None]:
    if encoder is None:
        word = c_uint64.from_address(at)

        def write(address: int) -> None:
            word.value = address

        return write

    def encode(address: int) -> None:
        ctypes.memmove(at, bytes(encoder.encoded(address)), tensor_map.BYTES)

    return encode
