"""What a search is for: a network at one shape, on one arch, in one mode."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from plantune.canonical import digest
from plantune.graph.differentiate import differentiate
from plantune.graph.extract import extract
from plantune.graph.graph import Graph
from plantune.graph.types import DTYPES, TensorType
from plantune.models.registry import network


@dataclass(frozen=True)
class Problem:
    """A known network with everything that decides its layer graph."""

    network: str
    batch: int
    in_channels: int = 3
    mode: str = "infer"
    dtype: str = "float32"
    arch: str = "cpu"

    @property
    def key(self) -> str:
        return digest(asdict(self))

    @cached_property
    def graph(self) -> Graph:
        """The graph that a module made by `load_model` with these arguments asks a plan for."""
        spec = network(self.network)
        module = spec.build(self.in_channels).to(DTYPES[self.dtype]).train(self.mode == "train")
        shape = spec.input_shape(self.batch, self.in_channels)
        # On a GPU weights are read in place, so nothing is folded into them.
        folds = self.mode == "infer" and self.arch == "cpu"
        graph = extract(module, TensorType(shape, self.dtype), fold=folds)
        return differentiate(graph) if self.mode == "train" else graph

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
