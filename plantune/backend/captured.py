"""A graph that Dynamo captured, as a module that holds the user's parameters and buffers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

# Where Dynamo found an input: L['self']._modules['norm']._buffers['running_mean'].
_STEPS = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_HELD = re.compile(r"\._(?:parameters|buffers)\['[^']+'\]$")
# Shorter ones may be names of the module's other inputs.
_LEAST_NAME = 5
# What a module has already, `Captured` among them.
_TAKEN = frozenset((*dir(nn.Module()), "code", "given", "count", "names"))


@dataclass(frozen=True)
class Inputs:
    """The places of a captured graph's inputs: `owned` has the names of those that are parameters
    and buffers, `given` are the others that the graph reads.
    """

    count: int
    owned: Mapping[int, str]
    given: tuple[int, ...]

    @staticmethod
    def of(graph: fx.GraphModule, examples: Sequence[Any]) -> Inputs:
        nodes, owned = graph.graph.find_nodes(op="placeholder"), dict[int, str]()
        for place, (node, example) in enumerate(zip(nodes, examples, strict=True)):
            source = _source(node)
            if isinstance(example, nn.Parameter) or _HELD.search(source):
                name = "_".join(_STEPS.findall(source))
                is_free = len(name) >= _LEAST_NAME and name not in {*owned.values(), *_TAKEN}
                owned[place] = name if is_free else node.name
        given = [place for place, node in enumerate(nodes) if node.users and place not in owned]
        return Inputs(len(nodes), owned, tuple(given))


def _source(node: fx.Node) -> str:
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)  # a method in torch 2.9


class Code:
    """What a captured graph computes. It never changes, so a copy of its holder shares it.

    `detached` are outputs that are others of them without their gradients: a plan does not make
    these.
    """

    def __init__(self, graph: fx.GraphModule, detached: Mapping[int, int]) -> None:
        self._forward, self.detached = graph.forward, detached

    def run(self, *values: Any) -> Any:
        made = self._forward(*values)
        if not self.detached:
            return made
        return tuple(value for at, value in enumerate(made) if at not in self.detached)

    def whole(self, made: Any) -> Any:
        """All outputs, of those that `run` made."""
        if not self.detached:
            return made
        left = iter(made)
        places = range(len(made) + len(self.detached))
        found: list[Any] = [None if at in self.detached else next(left) for at in places]
        for at, other in self.detached.items():
            found[at] = found[other].detach()
        return tuple(found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Code:
        return self


class Captured(nn.Module):
    """Is called with what is given, and returns the graph's outputs."""

    def __init__(self, code: Code, inputs: Inputs, state: Sequence[Tensor]) -> None:
        super().__init__()
        self.code, self.given, self.count = code, inputs.given, inputs.count
        self.names = tuple(inputs.owned.items())
        for (_, name), tensor in zip(self.names, state, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, *given: Any) -> Any:
        values: list[Any] = [None] * self.count
        owned = {**self._parameters, **self._buffers}
        for place, name in self.names:
            values[place] = owned[name]
        for place, value in zip(self.given, given, strict=True):
            values[place] = value
        return self.code.run(*values)
