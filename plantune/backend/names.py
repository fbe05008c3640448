"""What people call a captured graph: the class whose code it is, and the line where it begins."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import fx, nn
from torch._dynamo.symbolic_convert import InstructionTranslator

from plantune.graph.lines import lines_of


def name_of(graph: fx.GraphModule) -> str:
    """To be asked while Dynamo captures it. It names plans, so it is a word."""
    names = (re.sub(r"\W", "", name) for name in _names(graph))
    return next(filter(None, names), "function")


def _names(graph: fx.GraphModule) -> Iterator[str]:
    frame = InstructionTranslator.current_tx()
    owners = (value for value in frame.f_locals.values() if isinstance(value, nn.Module))
    yield from (type(owner).__name__ for owner in owners)
    for node in graph.graph.nodes:
        for _, kind in node.meta.get("nn_module_stack", {}).values():
            yield str(getattr(kind, "__name__", kind))
    yield frame.f_code.co_name


def line_of(graph: fx.GraphModule) -> str:
    """Where it begins; empty if torch has noted that nowhere."""
    found = (lines_of(node) for node in graph.graph.nodes)
    return next(filter(None, found), [""])[0]
