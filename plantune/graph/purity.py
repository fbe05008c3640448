"""Which overloads can be ops: the same inputs make the same outputs, and stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Overload = torch._ops.OpOverload
# Draws no random numbers if this argument has this value.
DRAWS_UNLESS: Mapping[str, tuple[str, Any]] = {
    "aten.scaled_dot_product_attention.default": ("dropout_p", 0.0),
    "aten.dropout.default": ("train", False),
    "aten.feature_dropout.default": ("train", False),
    "aten.rrelu.default": ("training", False),
    **{
        f"aten.{kind}": ("dropout", 0.0)
        for kind in (
            "gru.input",
            "gru.data",
            "lstm.input",
            "lstm.data",
            "rnn_tanh.input",
            "rnn_relu.input",
        )
    },
}


def why_impure(overload: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What an overload with these arguments does besides computing its outputs from its inputs."""
    given = _given(overload, args, kwargs)
    if torch.Tag.nondeterministic_seeded in overload.tags:
        argument, harmless = DRAWS_UNLESS.get(str(overload), ("", None))
        if argument not in given or given[argument] != harmless:
            return "draws random numbers"
    moves = given.get("training") or given.get("use_input_stats")
    if moves and given.get("running_mean") is not None:  # which no schema says
        return "moves statistics in this form"
    return None


def without_writing(overload: Overload) -> Overload | None:
    """The overload that returns what this one writes to its first argument; None if torch has none,
    or if this one writes to others.
    """
    written = [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in overload._schema.arguments
    ]
    name, _, kind = str(overload).rpartition(".")
    space, _, packet = name.partition(".")
    plain = getattr(getattr(torch.ops, space), packet.removesuffix("_"), None)
    if not written[0] or any(written[1:]) or plain is None or kind not in plain.overloads():
        return None
    return getattr(plain, kind)  # type: ignore[no-any-return]


def _given(overload: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every argument by its name, also those that were left out."""
    arguments = overload._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**defaults, **dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
