"""Values that follow from weights place by place, such as what a batch norm scales by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.errors import IllegalCandidate
from plantune.graph import Graph, Node, Step
from plantune.graph.contraction import contracted
from plantune.graph.free_casts import rounding_casts, rounds
from plantune.graph.types import DTYPES
from plantune.kernels.patterns.pointwise_chain import NONE, Operand, expression_of, rounded

ELEMENTS = ("float32", "float16", "bfloat16")
INPUTS_MAX = 4


@dataclass(frozen=True)
class Derived:
    """`lines` of C++ make `result` from in[0], in[1], ..., elements of the operands."""

    shape: tuple[int, ...]
    operands: tuple[Operand, ...]
    lines: tuple[str, ...]
    result: str
    step: Step  # says the same by the meaning of its ops, but for
    dtype: str | None = None  # that to which the user's code rounds the result

    @property
    def expression(self) -> tuple[tuple[str, ...], str]:
        """What it computes, wherever the operands come from."""
        return self.lines, self.result

    def evaluate(self, sources: Mapping[str, Tensor]) -> Tensor:
        """The value by torch, in float32 as in C++."""
        wide = {operand.name: sources[operand.name].float() for operand in self.operands}
        (name, _), *_ = self.step.outputs
        value = self.step.evaluate(wide, torch.float32)[name]
        return value if self.dtype is None else value.to(DTYPES[self.dtype]).float()

    def spread(self, sources: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, str]]:
        """Each operand as it is broadcast to the shape of the value, and its name."""
        for operand in self.operands:
            source = sources[operand.name]
            strides = [0] * len(self.shape)
            for axis, stride in zip(operand.axes, source.stride(), strict=True):
                if axis != NONE:
                    strides[axis] = stride
            yield source.as_strided(self.shape, strides, source.storage_offset()), operand.name


def derived_values(graph: Graph) -> dict[str, Derived]:
    """The constants of a graph that are one expression over parameters and buffers."""
    makers = {node.name: node for node in graph.nodes if graph.constants.issuperset(node.outputs)}
    found = {}
    for name in makers:
        try:
            found[name] = _derived(graph, name, makers)
        except IllegalCandidate:
            continue
    return found


def _derived(graph: Graph, name: str, makers: Mapping[str, Node]) -> Derived:
    """Raises IllegalCandidate if the value is something else."""
    needed: dict[str, Node] = {}
    leaves: dict[str, None] = {}
    open_ = [name]
    while open_:
        value = open_.pop()
        if value in makers and value not in needed:
            needed[value] = makers[value]
            open_ += makers[value].inputs
        elif value not in makers:
            leaves[value] = None
    types = graph.types
    if any(types[value].dtype not in ELEMENTS for value in (*needed, *leaves)):
        raise IllegalCandidate(f"{name!r} follows from a value that is not a float")
    last = makers[name]
    # Whoever reads the value may keep it in float32.
    is_rounded = last.op == "cast" and rounds(last, types[last.inputs[0]])
    dtype = types[name].dtype if is_rounded else None
    made = name if dtype is None else last.inputs[0]
    nodes = tuple(n for n in graph.nodes if n.name in needed and (n is not last or made == name))
    inputs = tuple((leaf, types[leaf]) for leaf in leaves)
    whole = Step(nodes, inputs, ((made, types[made]),), frozenset(leaves), "refresh")
    if rounding_casts(whole):
        raise IllegalCandidate(f"{name!r} follows from what is rounded")
    step = contracted(whole)
    expression = expression_of(step)
    if len(expression.operands) > INPUTS_MAX:
        raise IllegalCandidate(f"{name!r} follows from more than {INPUTS_MAX} tensors")
    shape, (result,) = types[name].shape, expression.results
    result = result if dtype is None else rounded(dtype).format(result)
    return Derived(shape, expression.operands, expression.lines, result, step, dtype)
