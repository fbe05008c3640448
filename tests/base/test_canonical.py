from __future__ import annotations

import copy
import hashlib
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plantune.base.canonical import Attrs, canonical, digest

SCALARS = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
ATTRS = st.dictionaries(st.text(), SCALARS | st.text() | st.lists(st.integers()).map(tuple))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None]}, '{"a":[true,null],"b":1}'),
        ((1, 2), "[1,2]"),
        ([1, 1.0], "[1,1.0]"),
        (Attrs(stride=(2, 2), axis=1), '{"axis":1,"stride":[2,2]}'),
        ({"deep": [Attrs(z=1, a=2)]}, '{"deep":[{"a":2,"z":1}]}'),
        ("é", '"\\u00e9"'),
    ],
)
def test_canonical_text_is_sorted_dense_and_ascii(value: Any, text: str) -> None:
    assert canonical(value) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")]])
def test_canonical_refuses_numbers_that_json_lacks(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical(value)


def test_canonical_refuses_other_objects_by_name() -> None:
    with pytest.raises(TypeError, match="set has no canonical JSON form"):
        canonical({"a": {1}})


def test_digest_is_the_sha256_of_the_canonical_text() -> None:
    expected = hashlib.sha256(b'{"a":1,"b":2}').hexdigest()
    assert digest({"b": 2, "a": 1}) == expected
    assert len(expected) == 64


@given(ATTRS)
def test_attrs_survive_json_exactly(values: dict[str, Any]) -> None:
    attrs = Attrs(values)
    again = Attrs(json.loads(canonical(attrs)))
    assert again == attrs
    assert digest(again) == digest(attrs)
    assert {k: type(v) for k, v in again.items()} == {k: type(v) for k, v in attrs.items()}


@given(ATTRS, ATTRS)
def test_attrs_are_equal_exactly_when_their_text_is(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert (Attrs(a) == Attrs(b)) == (canonical(a) == canonical(b))
    assert Attrs(a) != Attrs(b) or hash(Attrs(a)) == hash(Attrs(b))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Attrs(a=1), Attrs(a=1.0)),
        (Attrs(a=1), Attrs(a=True)),
        (Attrs(a=1), Attrs(a="1")),
        (Attrs(a=1), Attrs(b=1)),
        (Attrs(a=1), Attrs(a=1, b=2)),
        (Attrs(a=(1,)), Attrs(a=1)),
        (Attrs(a=(1, 2)), Attrs(a=(2, 1))),
    ],
)
def test_different_attrs_are_different(one: Attrs, other: Attrs) -> None:
    assert one != other
    assert digest(one) != digest(other)


def test_attrs_ignore_the_order_of_writing_and_lists_become_tuples() -> None:
    one = Attrs({"b": [1, 2]}, a=3)
    assert one == Attrs(a=3, b=(1, 2))
    assert hash(one) == hash(Attrs(a=3, b=(1, 2)))
    assert list(one) == ["a", "b"]
    assert one["b"] == (1, 2)
    assert one != {"a": 3, "b": (1, 2)}
    assert repr(one) == "Attrs(a=3, b=(1, 2))"


def test_attrs_do_not_follow_what_they_were_made_from() -> None:
    source = {"a": [1, 2]}
    attrs = Attrs(source)
    source["a"].append(3)
    source["b"] = [4]
    assert dict(attrs) == {"a": (1, 2)}


def test_attrs_cannot_be_changed() -> None:
    attrs: Any = Attrs(a=1)
    with pytest.raises(TypeError):
        attrs["a"] = 2
    with pytest.raises(AttributeError):
        attrs.a = 2
    with pytest.raises(KeyError):
        attrs["b"]


@pytest.mark.parametrize(
    "copier", [copy.copy, copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))]
)
def test_attrs_can_be_copied(copier: Any) -> None:
    attrs = Attrs(a=1, b=(2, 3), c="d")
    assert copier(attrs) == attrs


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (float("nan"), ValueError, "eps: must be finite, got nan"),
        (float("inf"), ValueError, "eps: must be finite, got inf"),
        ((1, 2.0), TypeError, "eps: a sequence holds integers only"),
        ((1, True), TypeError, "eps: a sequence holds integers only"),
        (None, TypeError, "eps: must be a number, a string or a tuple of integers, got None"),
        ({"a": 1}, TypeError, "eps: must be a number"),
    ],
)
def test_attrs_refuse_what_has_no_exact_text(value: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Attrs(eps=value)


def test_an_unpickled_value_is_found_in_another_process():
    code = (
        "import pickle, sys; from plantune.base.canonical import Attrs; "
        "assert {pickle.loads(sys.stdin.buffer.read()): 1}[Attrs(layout='nhwc')] == 1"
    )
    value = pickle.dumps(Attrs(layout="nhwc"))
    subprocess.run([sys.executable, "-c", code], input=value, check=True)
