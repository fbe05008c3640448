"""What a captured graph may ask for that no plan gives."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

from plantune.graph.nested import tensors_in

# What two views of larger memory have in common is not looked for.
MOST_ELEMENTS = 1 << 22
# Why such a graph is left to torch, of which nothing is said: that is the fastest way.
SCALARS = "it computes single numbers from single numbers, and a plan takes longer than that"
DETACH = (torch.detach, torch.Tensor.detach, torch.ops.aten.detach.default)


def why_not(graph: fx.GraphModule) -> str | None:
    """Why such a graph cannot run from a plan, whatever its ops are."""
    if has_scalars_alone(graph):
        return SCALARS
    return _why_shared(graph) or _why_numbers(graph)


def has_scalars_alone(graph: fx.GraphModule) -> bool:
    """Whether no tensor in it, read, computed or returned, has more than one element."""
    return all(map(_is_of_scalars, graph.graph.nodes))


def _is_of_scalars(node: fx.Node) -> bool:
    if node.op == "output" or "example_value" not in node.meta:
        return node.op != "get_attr"  # what is no value, such as the end of a scope, is none
    made = tensors_in(node.meta["example_value"])
    return all(tensor.layout == torch.strided and _number(tensor.numel()) == 1 for tensor in made)


def detached(graph: fx.GraphModule) -> dict[int, int]:
    """The places of outputs that are others of them, detached, with the places of those: such as a
    loss and what is logged of it.
    """
    made = [node if isinstance(node, fx.Node) else None for node in _results(graph)]
    places = {node: at for at, node in enumerate(made) if node is not None}
    found = {}
    for at, node in enumerate(made):
        source: Any = node
        while source is not None and _detaches(source):
            source = source.args[0]
        if source is not node and source in places:
            found[at] = places[source]
    return found


def _detaches(node: fx.Node) -> bool:
    return (node.op, node.target) == ("call_method", "detach") or node.target in DETACH


def _why_shared(graph: fx.GraphModule) -> str | None:
    """A plan returns copies. The code after it may write to a tensor and see that in another."""
    apart = {_results(graph)[at] for at in detached(graph)}
    outputs = [node for node in dict.fromkeys(_outputs(graph)) if node not in apart]
    inputs = [node for node in _inputs(graph) if _example(node) is not None]
    for one, other in (*combinations(outputs, 2), *((o, i) for o in outputs for i in inputs)):
        if _overlap(_example(one), _example(other)):
            return f"it returns {one.name}, which shares memory with {other.name}"
    return None


def _why_numbers(graph: fx.GraphModule) -> str | None:
    """Dynamo hands over such a number as a tensor, whose value the graph asks for."""
    for node in _inputs(graph):
        if getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False):
            return f"the number {node.name} is another one in each call; give it as a tensor"
    return None


def _inputs(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


def _results(graph: fx.GraphModule) -> tuple[Any, ...]:
    """What it returns, one after the other."""
    (output,) = graph.graph.find_nodes(op="output")
    made = output.args[0]
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def _outputs(graph: fx.GraphModule) -> list[fx.Node]:
    (output,) = graph.graph.find_nodes(op="output")
    return [node for node in output.all_input_nodes if _example(node) is not None]


def _example(node: fx.Node) -> Tensor | None:
    example = node.meta.get("example_value")
    return example if isinstance(example, Tensor) else None


def _overlap(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or _storage(one) != _storage(other):
        return False
    if one.dtype != other.dtype or max(_end(one), _end(other)) > MOST_ELEMENTS:
        return True
    return bool(torch.isin(_elements(one), _elements(other)).any())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _end(tensor: Tensor) -> int:
    """The first element of the storage after those of the tensor."""
    pairs = zip(map(_number, tensor.shape), map(_number, tensor.stride()), strict=True)
    return _number(tensor.storage_offset()) + sum((n - 1) * step for n, step in pairs) + 1


def _elements(tensor: Tensor) -> Tensor:
    """Their places in the storage."""
    shape, strides = (tuple(map(_number, sizes)) for sizes in (tensor.shape, tensor.stride()))
    every = torch.arange(_end(tensor))
    return every.as_strided(shape, strides, _number(tensor.storage_offset())).flatten()


def _number(size: Any) -> int:
    """What a size was in the call that was captured; to ask for its value would fix it."""
    known: Any = size.node.hint if isinstance(size, torch.SymInt) else size
    return int(known)
