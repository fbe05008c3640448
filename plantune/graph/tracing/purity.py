"""Which overloads can be ops: those that make their outputs and change nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Overload = torch._ops.OpOverload
# Draw no random numbers if one of these arguments has this value.
DROPS = {"p": 0, "train": False}
RECURRENT = {"dropout": 0, "train": False}
DRAWS_UNLESS: Mapping[str, Mapping[str, Any]] = {
    "aten.scaled_dot_product_attention.default": {"dropout_p": 0},
    "aten.rrelu.default": {"training": False},
    **{
        f"aten.{kind}dropout.default": DROPS
        for kind in ("", "feature_", "alpha_", "feature_alpha_", "native_")
    },
    **{
        f"aten.{kind}.{given}": RECURRENT
        for kind in ("gru", "lstm", "rnn_tanh", "rnn_relu")
        for given in ("input", "data")
    },
}
# The argument that says where a result goes.
OUT = "out"
# What writes random numbers, where what returns them has another name.
RETURNS: Mapping[str, str] = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.normal_.default": "aten.normal_functional.default",
}


def why_impure(overload: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What an overload with these arguments does besides computing its outputs from its inputs and
    from random numbers.
    """
    given = _given(overload, args, kwargs)
    if given.get("generator") is not None:
        return "draws from a generator of its own"
    moves = given.get("training") or given.get("use_input_stats")
    if moves and given.get("running_mean") is not None:  # which no schema says
        return "moves statistics in this form"
    return None


def draws(overload: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether its outputs follow from random numbers, too."""
    if torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    given = _given(overload, args, kwargs)
    harmless = DRAWS_UNLESS.get(str(overload), {})
    return not any(given[argument] == value for argument, value in harmless.items())


def without_writing(overload: Overload) -> Overload | None:
    """The overload that returns what this one writes to its first argument or to `out`; None if
    torch has none, or if this one writes to others.
    """
    arguments = overload._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    name, _, kind = RETURNS.get(str(overload), str(overload)).rpartition(".")
    space, _, packet = name.partition(".")
    plain = getattr(getattr(torch.ops, space), packet.removesuffix("_"), None)
    if plain is None or written not in ([OUT], [arguments[0].name]):
        return None
    if written == [OUT]:
        kind = next((k for k in plain.overloads() if _takes(getattr(plain, k), overload)), "")
    return getattr(plain, kind) if kind in plain.overloads() else None


def _takes(plain: Overload, overload: Overload) -> bool:
    """Whether an overload has the arguments of one with `out`, but for that."""
    here, there = (
        [(a.name, str(a.type)) for a in each._schema.arguments if a.name != OUT]
        for each in (plain, overload)
    )
    return here == there and not plain._schema.is_mutable


def left_out(
    overload: Overload, plain: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The arguments that a call of `overload` left out, and which one of `plain` must have."""
    given = _given(overload, args, kwargs)
    asked = [a.name for a in plain._schema.arguments[len(args) :] if not a.has_default_value()]
    return {name: given[name] for name in asked if name not in kwargs and name in given}


def _given(overload: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every argument by its name, also those that were left out."""
    arguments = overload._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**defaults, **dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
