"""From a torch module to a layer graph: torch traces it into ATen ops, each of which is read."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from plantune.graph.graph import Graph
from plantune.graph.operators.scans import RecurrentLayers
from plantune.graph.outputs import Outputs
from plantune.graph.passes.rewrite import (
    fold_scales,
    round_constants_once,
    with_space_to_depth,
    without_dead_nodes,
    without_spreads,
)
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.eager_strides import calls_of
from plantune.graph.tracing.extraction import Extraction, no_scans
from plantune.graph.tracing.own_backward import read_own_backward
from plantune.graph.tracing.trace import trace
from plantune.graph.types import TensorType


def extract(
    module: nn.Module,
    *inputs: TensorType,
    fold: bool | None = None,
    derives: bool | None = None,
    scans: Callable[[RecurrentLayers], bool] = no_scans,
) -> Graph:
    """The layer graph of `module` for inputs of these types, in the training mode that each of its
    submodules has.

    `fold` puts the scales of batch norms into the weights before them; it changes what a backward
    pass would differentiate, so it defaults to true only where the module is not training.
    `derives` is a trace's. `scans` says which recurrent layers of torch's are read as scans
    (plantune/space/recurrent.py). Raises
    UnsupportedModule naming the place in the module that torch cannot trace, or that has no graph.
    """
    arguments = Arguments(inputs)
    return extract_with_outputs(module, arguments, fold=fold, derives=derives, scans=scans)[0]


def extract_with_outputs(
    module: nn.Module,
    arguments: Arguments,
    *,
    fold: bool | None = None,
    derives: bool | None = None,
    scans: Callable[[RecurrentLayers], bool] = no_scans,
) -> tuple[Graph, Outputs]:
    """As `extract`, for any call, with what the module makes of the graph's outputs."""
    traced = trace(module, arguments, derives=derives)
    graph = Extraction(module, arguments.types, traced, read_own_backward, scans).run()
    graph = without_dead_nodes(with_space_to_depth(without_spreads(without_dead_nodes(graph))))
    if not module.training if fold is None else fold:
        graph = without_dead_nodes(round_constants_once(without_dead_nodes(fold_scales(graph))))
    return graph, Outputs.like(traced.made, calls_of(traced))


def lines_of(module: nn.Module, arguments: Arguments, *, derives: bool) -> dict[str, str]:
    """The line of the user's code that each node is from, by the node's name; rewrites may have
    made others.
    """
    traced = trace(module, arguments, derives=derives)
    extraction = Extraction(module, arguments.types, traced, read_own_backward)
    extraction.run()
    return extraction.lines
