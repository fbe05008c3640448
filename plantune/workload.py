"""A reference network at one shape, as the command line asks for it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from plantune.models.registry import network

if TYPE_CHECKING:
    from torch import nn

    from plantune.graph.graph import Graph
    from plantune.problem import Problem

# In the order of the JSON that `bench` writes; a network is a model there.
FIELDS = ("arch", "batch", "mode", "dtype", "in_channels")


@dataclass(frozen=True)
class Workload:
    """What decides the layer graph of a reference network."""

    network: str = "se_resnet9_fixup"
    batch: int = 8
    in_channels: int = 3
    mode: str = "infer"
    dtype: str = "float32"
    arch: str = "cpu"

    @staticmethod
    def on(arch: str | None, dtype: str | None, **given: Any) -> Workload:
        """What options mean: what they leave open follows from this machine."""
        if arch is None:
            from plantune.gpus import best_arch

            arch = best_arch()
        return Workload(arch=arch, dtype=dtype or _dtype_on(arch), **given)

    @staticmethod
    def of(problem: Problem) -> Workload:
        """For the problem of a reference network, which takes one image, if its call was kept."""
        (_, image), *_ = problem.tensors
        named = (problem.mode, problem.dtype, problem.arch)
        return Workload(problem.network, problem.batch, image.shape[1], *named)

    @cached_property
    def problem(self) -> Problem:
        from plantune.problem import Problem

        return Problem.of(self.graph, self.arch, self.network)

    @cached_property
    def graph(self) -> Graph:
        """The graph that a module made by `load_model` with these arguments asks a plan for."""
        from plantune.graph.differentiate import differentiate

        # On a GPU weights are read in place, so nothing is folded into them.
        graph = self.extracted(fold=self.mode == "infer" and self.arch == "cpu")
        return differentiate(graph) if self.mode == "train" else graph

    def extracted(self, *, fold: bool) -> Graph:
        """The network's layers, with the scales of its norms in the weights if they are folded."""
        from plantune.graph.extract import extract
        from plantune.graph.types import TensorType

        shape = network(self.network).input_shape(self.batch, self.in_channels)
        return extract(self.module(), TensorType(shape, self.dtype), fold=fold)

    def module(self) -> nn.Module:
        """The network, freshly initialised on the CPU."""
        from plantune.graph.types import DTYPES

        module = network(self.network).build(self.in_channels).to(DTYPES[self.dtype])
        return module.train(self.mode == "train")

    def to_json(self) -> dict[str, Any]:
        return {"model": self.network, **{name: getattr(self, name) for name in FIELDS}}

    def arguments(self) -> str:
        """The options that mean this; defaults are left out, but for the batch."""
        usual = Workload.on(None, None)
        plain = {**vars(usual), "batch": None, "dtype": _dtype_on(self.arch)}
        named = {
            "model" if field.name == "network" else field.name.replace("_", "-"): value
            for field in fields(Workload)
            if (value := getattr(self, field.name)) != plain[field.name]
        }
        return " ".join(f"--{name} {value}" for name, value in named.items())

    def __str__(self) -> str:
        channels = "" if self.in_channels == 3 else f", {self.in_channels} channels"
        text = f"{self.network}, batch {self.batch}{channels}"
        return f"{text}, {self.mode}, {self.dtype}, {self.arch}"


def _dtype_on(arch: str) -> str:
    return "float32" if arch == "cpu" else "float16"
