"""Fields of C structs from one line: types, arrays and a type of one's own, in their order."""

from __future__ import annotations

import ctypes

import pytest

from plantune.devices.cuda.structs import fields


class Pair(ctypes.Structure):
    _fields_ = fields("first:short second:float")


class Whole(ctypes.Structure):
    _fields_ = fields("x count:int pairs:pair[3] rows:ubyte[2]", pair=Pair)


def test_members_have_their_types_and_places() -> None:
    types = {"x": ctypes.c_void_p, "count": ctypes.c_int, "pairs": Pair * 3}
    assert dict(Whole._fields_) == {**types, "rows": ctypes.c_ubyte * 2}
    places = [getattr(Whole, name).offset for name, _ in Whole._fields_]
    assert places == [0, 8, 12, 36]
    assert ctypes.sizeof(Whole) == 40


def test_a_word_that_is_no_type_is_refused() -> None:
    with pytest.raises(AttributeError, match="c_pointer"):
        fields("x:pointer")
