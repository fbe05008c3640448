"""Reads steps as a norm and what follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plantune.graph.graph import Node
from plantune.graph.ops.functions import FUNCTIONS
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels import vector_kernel
from plantune.kernels.constants import Constants
from plantune.kernels.family import Parts
from plantune.kernels.legality import refuse
from plantune.kernels.patterns.expression import Chain


@dataclass(frozen=True)
class NormParts(Parts):
    """y = chain of (x - mean) * rstd * weight + bias."""

    norm: Node
    chain: Chain
    residual: str | None

    @property
    def type(self) -> TensorType:
        return self.norm.types[0]

    @property
    def y(self) -> str:
        return self.step.nodes[-1].name

    @property
    def vector(self) -> int:
        """Elements of one vector."""
        return vector_kernel.VECTOR_BYTES // self.type.torch_dtype.itemsize

    @property
    def affine(self) -> dict[str, bool]:
        """Whether there is a weight and a bias."""
        return {"weight": len(self.norm.inputs) > 1, "bias": len(self.norm.inputs) > 2}

    def read(self, constants: Constants) -> list[Tensor]:
        """What a launch reads: x, then what there is of weight, bias and residual."""
        residual = () if self.residual is None else (self.residual,)
        return [constants.tensor(name) for name in (*self.norm.inputs, *residual)]

    def addresses(self, constants: Constants, values: Any) -> list[int]:
        """The first members of the kernels' arguments; 0 for what there is not."""
        x, *affine = (constants.tensor(name).data_ptr() for name in self.norm.inputs)
        weight, bias = (*affine, *(0,) * (2 - len(affine)))
        residual = constants.tensor(self.residual).data_ptr() if self.residual else 0
        leaving = dict(self.step.outputs)
        statistics = (
            values[name].data_ptr() if name in leaving else 0 for name in self.norm.outputs[1:]
        )
        return [x, values[self.y].data_ptr(), weight, bias, residual, *statistics]


def norm_parts(step: Step, op: str) -> NormParts:
    """Reads a step that starts with `op`; raises IllegalCandidate with the reason."""
    norm = step.nodes[0]
    refuse({f"the step starts with {norm.op}, not with a {op}": norm.op != op})
    chain, residual = what_follows(step)
    last = step.nodes[-1].name
    early = {name for name, _ in step.outputs} - {last, *norm.outputs[1:]}
    refuse(
        {
            **vector_kernel.not_an_element(step.types[norm.name].dtype),
            "there is nothing to normalise": step.types[norm.name].numel == 0,
            "a value before the end of the step is read outside of it": early,
            "the statistics are read alone": last not in dict(step.outputs),
            "weights are in nchw": step.phase == "refresh" or norm.inputs[0] in step.constants,
        }
    )
    return NormParts(step, norm, chain, residual)


def what_follows(step: Step) -> tuple[Chain, str | None]:
    """The chain after the first node, and the residual in it; raises IllegalCandidate."""
    norm, *rest = step.nodes
    chain: list[str] = []
    residual, last = None, norm.name
    for node in rest:
        others = [value for value in node.inputs if value != last]
        adds = node.op == "add" and len(others) == 1 and residual is None
        same = adds and step.types[others[0]] == step.types[norm.name]
        refuse({f"{node.op} at {node.name!r} has no place": not same and node.op not in FUNCTIONS})
        if same:
            residual = others[0]
        chain.append("residual" if same else node.op)
        last = node.name
    return tuple(chain), residual
