"""Reads steps as a norm and what follows it."""

from __future__ import annotations

from dataclasses import dataclass

from plantune.graph import Node, Step, TensorType
from plantune.graph.ops.functions import FUNCTIONS
from plantune.kernels import vector_kernel
from plantune.kernels.constants import rows_of
from plantune.kernels.family import Binding, Frame, Parts
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
    def affine(self) -> dict[str, bool]:
        """Whether there is a weight and a bias, in the words of headers."""
        return {"kWeight": len(self.norm.inputs) > 1, "kBias": len(self.norm.inputs) > 2}

    def bind(self, frame: Frame, blocks: int, threads: int, *more: int) -> Binding:
        """Launches a kernel whose arguments are plantune::NormArguments and `more`."""
        kernel = vector_kernel.VectorKernel(frame.built, blocks, threads)
        constants, values = rows_of(self.step, frame), frame.values
        leaving = dict(self.step.outputs)
        written = [self.step.nodes[-1].name, *self.norm.outputs[1:]]
        affine = self.norm.inputs[1:]
        read = [self.norm.inputs[0], *affine, *(None,) * (2 - len(affine)), self.residual]

        def launch(stream: int) -> None:
            tensors = [constants.tensor(name) if name else None for name in read]
            x, *others = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
            y, *statistics = (values[n].data_ptr() if n in leaving else 0 for n in written)
            arguments = vector_kernel.members(x, y, *others, *statistics, *more)
            kernel.launch(stream, arguments, [tensor for tensor in tensors if tensor is not None])

        return Binding(launch, constants=constants.all)


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
