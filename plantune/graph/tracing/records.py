"""What a trace records, and what its reader asks of all records at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from plantune.graph.memory import Memory
from plantune.graph.memory import memory_of as _memory
from plantune.graph.tracing.purity import OUT, Overload


@dataclass(frozen=True)
class Record:
    """One call of an overload, where it stands in the module and in the user's code. No gradient
    goes through what is `silent`: it is under no_grad. Where it makes an output of a Function, the
    gradient goes by that one's own backward pass, the `derivative`. Autocast `inserted` a cast that
    the user's code does not have.
    """

    overload: Overload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    place: str
    line: str
    silent: bool = False
    derivative: Derivative | None = None
    inserted: bool = False


@dataclass(frozen=True)
class Derivative:
    """How a torch.autograd.Function differentiates itself: from the gradients `seeds` of what it
    `made` of `inputs`, its backward pass has the `records`, and makes `gradients`, one of each
    input, None where there is none. `results` are the outputs after it, one of each in `made`.
    """

    made: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    seeds: tuple[Tensor, ...]
    records: tuple[Record, ...]
    gradients: tuple[Tensor | None, ...]

    @property
    def read(self) -> list[Tensor]:
        """What its backward pass reads, and what it makes on the way."""
        given = ((record.args, dict(record.kwargs)) for record in self.records)
        return [leaf for leaf in tree_leaves((*given, self.gradients)) if isinstance(leaf, Tensor)]


# What makes a jump of the last bit of its argument.
STEPS = frozenset(("floor", "ceil", "trunc", "fix", "round", "frac", "sign", "sgn", "heaviside"))
STEPS |= {"floor_divide", "remainder", "fmod", "bucketize", "searchsorted", "histc"}
STEPS |= {"eq", "ne", "lt", "le", "gt", "ge"}
CASTS = frozenset(("to", "_to_copy", "type_as"))


# Where a forward calls nothing.
NOTHING = Record(torch.ops.aten.detach.default, (), {}, None, "", "")


def written(records: tuple[Record, ...]) -> set[int]:
    """The storages to which a record writes."""
    writing = (target(record) for record in records if record.overload._schema.is_mutable)
    return {_memory(tensor).storage for tensor in writing if isinstance(tensor, Tensor)}


def target(record: Record) -> Any:
    """What a record that writes writes to."""
    return record.kwargs[OUT] if OUT in record.kwargs else record.args[0]


def counted_last(records: tuple[Record, ...]) -> list[Record]:
    """torch counts a batch before it normalises it. Graphs of earlier releases, which plans and
    trials are found by, have it after. What makes no tensor, as a look at two dtypes, is left out.
    """
    ordered = [r for r in records if _tensors(r.result) or r.overload._schema.is_mutable]
    for at, (count, norm) in enumerate(pairwise([*ordered])):
        names = (str(count.overload), str(norm.overload))
        if names == ("aten.add_.Tensor", "aten.batch_norm.default"):
            counts = all(count.args[0] is not given for given in norm.args)
            ordered[at : at + 2] = (norm, count) if counts else (count, norm)
    return ordered


def last_used(records: list[Record], leaves: tuple[Any, ...]) -> dict[Memory, int]:
    """The last record that reads each tensor; what the module returns is read after all."""
    found: dict[Memory, int] = {}
    for at, record in enumerate(records):
        given = tree_leaves((record.args, dict(record.kwargs)))
        found.update({_memory(tensor): at for tensor in given if isinstance(tensor, Tensor)})
        if record.derivative is not None:
            found.update({_memory(tensor): at for tensor in record.derivative.read})
    return {**found, **{_memory(leaf): len(records) for leaf in leaves if isinstance(leaf, Tensor)}}


def stepped(records: list[Record]) -> frozenset[int]:
    """The places of records whose results go into a step, through none but views and pointwise ops:
    a product with 1 / 41 has floor(41 / 41) be 0.
    """
    found, into = set(), set()
    for at, record in reversed([*enumerate(records)]):
        made, given = _storages(record.result), _storages((record.args, dict(record.kwargs)))
        if _is_step(record):
            into |= given
        elif not into.isdisjoint(made):
            found.add(at)
            if _keeps_places(record):
                into |= given
    return frozenset(found)


def _is_step(record: Record) -> bool:
    if _packet(record) in CASTS:
        return any(not leaf.is_floating_point() for leaf in _tensors(record.result))
    return _packet(record) in STEPS or record.kwargs.get("rounding_mode") is not None


def _keeps_places(record: Record) -> bool:
    pointwise = torch.Tag.pointwise in record.overload.tags or record.derivative is not None
    return pointwise or _packet(record) in CASTS


def _packet(record: Record) -> str:
    return record.overload._schema.name.partition("::")[2].removesuffix("_")


def _tensors(given: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def _storages(given: Any) -> set[int]:
    return {_memory(tensor).storage for tensor in _tensors(given)}
