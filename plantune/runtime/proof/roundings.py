"""What the framework's results would be after other roundings: no plan is blamed for what differs.

It is asked only where a first bound refuses a plan, since it takes many passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plantune.base.tolerances import HALF, tolerance
from plantune.devices.cuda.flags import float32_precisions
from plantune.graph.graph import Graph, Node
from plantune.graph.layouts import MEMORY_FORMATS, strictly_in_layout
from plantune.graph.nested import mapped
from plantune.kernels.torch_ops import errs_in_channels_last, may_misread_pixels, viewed
from plantune.runtime.proof.cases import (
    Called,
    Case,
    Change,
    exact_of_graph,
    op_by_op,
    rounded,
    rounded_again,
)
from plantune.runtime.proof.distances import Results
from plantune.runtime.watched.copies import copied

# The framework's results, and what they would be without roundings.
Pair = tuple[Results, Results]
PRODUCTS = frozenset(("conv2d", "conv2d_dgrad", "conv2d_wgrad", "matmul"))


def other_roundings(
    network: Called, graph: Graph, case: Case, random: torch.Generator, times: int
) -> Iterator[Pair]:
    """The framework's ops one by one, in either layout; then so many times the same with roundings
    after each op, and the network with inputs and weights that differ by a rounding.

    Of what a graph makes, the exact results are also those of its ops: a graph that is not the
    network's excuses nothing.
    """
    given = network, graph, case.inputs, case.seeds
    exact = exact_of_graph(*given)
    on_gpu = case.inputs[0].is_cuda
    errs = any(map(errs_in_channels_last, graph.nodes))
    errs |= on_gpu and any(may_misread_pixels(node, graph.types) for node in graph.nodes)
    layouts = [layout for layout in MEMORY_FORMATS if layout == "nchw" or not errs]
    for layout in reversed(layouts):
        yield op_by_op(*given, layout), exact
    shake = _shaking(graph, case.inputs[0].device, random)
    for _ in range(times):
        if not is_wide(graph):
            yield exact_of_graph(*given, shake), exact
            continue
        for layout in reversed(layouts):
            yield op_by_op(*given, layout, shake), exact
        yield rounded_again(network, graph, case, random), case.exact


def eager_again(
    module: nn.Module, given: Any, random: torch.Generator, times: int
) -> Iterator[tuple[nn.Module, Any]]:
    """Copies of the module and of the tensors that it is called with: in channels_last, then so
    many times in either layout with weights and inputs that differ by a rounding; by one to tf32
    where that is allowed, since then torch's choice between its kernels decides which it is.
    """
    tf32 = "tf32" in float32_precisions()
    for turn in range(times + 1):
        for layout in MEMORY_FORMATS if turn else ("nhwc",):

            def changed(x: Any, turn: int = turn, layout: str = layout) -> Any:
                if not isinstance(x, Tensor) or not x.is_floating_point():
                    return x
                x = rounded(x.detach(), random) if turn else x.detach()
                if turn and tf32 and x.is_cuda and x.dtype == torch.float32 and x.dim() > 1:
                    x = x + x * HALF * torch.empty_like(x).uniform_(-1, 1, generator=random)
                return strictly_in_layout(x, layout) if x.dim() == 4 else x

            made = copied(module)
            for parameter in made.parameters():
                parameter.data = changed(parameter)
            yield made, mapped(changed, given)


def is_wide(graph: Graph) -> bool:
    return all(type_.torch_dtype.itemsize >= 4 for _, type_ in graph.parameters)


def _shaking(graph: Graph, device: torch.device, random: torch.Generator) -> Change:
    """Moves what each op makes by as much as its step's tolerance allows. What that becomes in the
    results follows from what the network does with it: a norm of few numbers that are almost equal
    divides by next to nothing.

    In wide products it is a part of the whole result's size, since sums may cancel; else of each
    element, so that zeros of a ReLU stay.
    """
    tf32 = device.type == "cuda" and "tf32" in float32_precisions()

    def change(node: Node, name: str, value: Tensor) -> Tensor:
        type_ = graph.types[name]
        if not type_.is_float or not value.numel() or viewed(node) is not None:
            return value
        noise = torch.empty_like(value).uniform_(-1, 1, generator=random)
        if type_.torch_dtype.itemsize == 2:
            return value + value * noise * tolerance("step", type_.torch_dtype)
        multiplies = node.op in PRODUCTS
        part = HALF if tf32 and multiplies else tolerance("step", type_.torch_dtype) / 2
        size = value.square().mean().sqrt() if multiplies else value
        return value + size * noise * part

    return change
