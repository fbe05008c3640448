"""What a captured graph may ask for that no plan gives."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

# What two views of larger memory have in common is not looked for.
MOST_ELEMENTS = 1 << 22


def why_not(graph: fx.GraphModule) -> str | None:
    """Why such a graph cannot run from a plan, whatever its ops are."""
    return _why_shared(graph) or _why_numbers(graph)


def _why_shared(graph: fx.GraphModule) -> str | None:
    """A plan returns copies. The code after it may write to a tensor and see that in another."""
    outputs = dict.fromkeys(_outputs(graph))
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
