"""Values in tuples, dicts, dataclasses and the like: taken apart and put together again."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from plantune.graph.nested import kind_of, leaves, mapped

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    left: Any
    right: Any = None


@dataclass
class Counted:
    left: Any
    total: Any = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.left + 1


@dataclass(frozen=True, slots=True)
class Slots:
    left: Any
    right: Any


@dataclass
class Output(OrderedDict):
    """As Hugging Face's ModelOutput: fields that are None are no items."""

    left: Any = None
    right: Any = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


VALUES = {
    "number": 1,
    "none": None,
    "tuple": (1, 2),
    "list": [1, [2, None]],
    "dict": {"b": 1, "a": (2,)},
    "ordered": OrderedDict(b=1, a=2),
    "default": defaultdict(list, a=1),
    "named tuple": Pair(1, 2),
    "torch's tuple": torch.return_types.max((1, 2)),
    "dataclass": Frozen(1, Pair(2, 3)),
    "with what it made of itself": Counted(1),
    "with slots": Slots(1, [2]),
    "model output": Output(left=1),
    "size": torch.Size((2, 3)),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_put_together_again(value):
    again = mapped(lambda leaf: leaf, value)
    assert type(again) is type(value)
    assert again == value
    assert kind_of(again, type) == kind_of(value, type)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_each_leaf_is_replaced_in_its_place(value):
    assert leaves(mapped(id, value)) == [id(leaf) for leaf in leaves(value)]


def test_a_model_output_keeps_items_and_attributes_alike():
    made = mapped(lambda leaf: leaf and leaf + 1, Output(left=1))
    assert (made.left, made.right, dict(made)) == (2, None, {"left": 2})


def test_what_differs_is_of_another_kind():
    kinds = {kind_of(value, lambda leaf: (type(leaf), leaf)) for value in VALUES.values()}
    assert len(kinds) == len(VALUES)
    assert kind_of({"a": 1}, type) != kind_of({"b": 1}, type)
    assert kind_of((1, (2,)), type) != kind_of((1, 2), type)
