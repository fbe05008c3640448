"""Norms of samples, with what follows them, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from plantune.graph import Attrs, Node, Step, TensorType
from plantune.graph.ops.functions import FUNCTIONS
from plantune.kernels.chips import measured_chip
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.family import Binding, Frame, Parts
from plantune.kernels.legality import READ_OUTSIDE, first_reason, refuse
from plantune.kernels.patterns.expression import Chain

COLLECTED = 32  # elements of weight and bias that a block of the second launch collects


@dataclass(frozen=True)
class OfNorm(Parts):
    """A step with a norm, or with the gradient of one."""

    norm: Node

    @property
    def type(self) -> TensorType:
        return self.norm.types[0]

    @property
    def width(self) -> int:
        """Neighbours that a thread reads at once."""
        return vector_kernel.width(self.type)

    def elements(self, **operands: str | None) -> dict[str, str]:
        """The element type of each operand in C++, by the words of headers; of what is not there
        any does.
        """
        dtypes = {word: self.dtype_of(name) for word, name in operands.items()}
        return {word: vector_kernel.ELEMENTS[dtype] for word, dtype in dtypes.items()}

    def dtype_of(self, name: str | None) -> str:
        return self.type.dtype if name is None else self.step.types[name].dtype


def row_work_us(
    cost: Mapping[str, float], moved: float, size: int, held: int, lanes: int, turns: float = 1.0
) -> float:
    """Of rows of `size` elements, of which each lane has `held`: lanes that have nothing to do in
    the last of their vectors wait, too; what a thread holds it reads and adds one after the other,
    in so many `turns`.
    """
    moving = moved / cost["bytes_per_us"] / (size / (held * lanes))
    return moving + turns * held * cost["element_us"]


class RowsOfNorm(OfNorm):
    """One that makes rows of the last axes; lanes of a block share a row."""

    @property
    def size(self) -> int:
        """Elements of a row."""
        return math.prod(self.type.shape[-self.norm.attrs["axes"] :])

    @property
    def rows(self) -> int:
        return self.type.numel // self.size

    @property
    def vector(self) -> int:
        return math.gcd(self.size, self.width)

    def held(self, lanes: int) -> int:
        """Elements that a thread holds."""
        return -(-self.size // self.vector // lanes) * self.vector

    def why_not(self, config: Attrs, most: int) -> str | None:
        """Why no block takes rows so, where a thread has room for so many elements."""
        lanes, threads = int(config["lanes"]), int(config["threads"])
        held = self.held(lanes)
        idle = lanes > 4 and held == self.held(lanes // 2)  # half of them would do as well
        return first_reason(
            {
                f"a block of {threads} threads has no {lanes} for a row": lanes > threads,
                f"a thread would hold {held} elements, {most} fit": held > most,
                f"{lanes} lanes are more than a row has vectors": idle,
            }
        )


class GroupsOfNorm(OfNorm):
    """One of groups of channels."""

    @property
    def channels(self) -> int:
        return self.type.shape[1]

    @property
    def pixels(self) -> int:
        return math.prod(self.type.shape[2:])

    @property
    def of_group(self) -> int:
        """Channels of a group."""
        return int(self.channels // self.norm.attrs["groups"])

    def blocks(self, config: Attrs) -> int:
        return int(self.type.shape[0] * self.norm.attrs["groups"] // config["groups"])

    def why_not(self, config: Attrs, vector: int) -> str | None:
        """Why no block takes groups so, where it reads so many neighbours at once."""
        groups, nhwc = int(config["groups"]), config["layout"] == "nhwc"
        columns = groups * self.of_group // vector
        return first_reason(
            {
                "only images have the layout nhwc": nhwc and len(self.type.shape) != 4,
                "groups are apart in nchw": not nhwc and groups > 1,
                f"{groups} do not divide the groups": self.norm.attrs["groups"] % groups,
                f"{columns} vectors of a pixel are too many": nhwc
                and columns > int(config["threads"]),
            }
        )

    def moving_us(self, moved: float, config: Attrs, cost: Mapping[str, float]) -> float:
        """The time to move data: short rows waste bandwidth, few blocks do not saturate it, and
        each takes so many elements of large images in a time.
        """
        row_bytes = cost["row_bytes"]
        if config["layout"] == "nhwc":
            row_bytes = self.of_group * config["groups"] * self.type.torch_dtype.itemsize
        used = min(1.0, row_bytes / cost["row_bytes"]) ** 0.6
        filled = min(1.0, self.blocks(config) / cost["blocks"]) ** 0.5
        memory_us = moved / cost["bytes_per_us"] / used / filled
        waves = max(self.blocks(config) / measured_chip().multiprocessors, 1.0)
        elements = self.of_group * config["groups"] * self.pixels * 256 / config["threads"]
        rate = cost[f"{config['layout']}_elements_per_us"]
        return float(max(memory_us, waves * elements / rate))


class GradientOfNorm(OfNorm):
    """The gradients of x, and of the first `sums` of weight and bias."""

    @property
    def sums(self) -> int:
        return int(self.norm.attrs["affine"])

    @property
    def width(self) -> int:
        """Neighbours that a thread reads of dy and of x at once."""
        return min(vector_kernel.width(self.step.types[name]) for name in self.norm.inputs[:2])

    @property
    def types(self) -> dict[str, str]:
        """The element types of a header."""
        dy, x, mean, _, *weight = self.norm.inputs
        made = dict(self.step.outputs)
        dx, *sums = (name if name in made else None for name in self.norm.outputs)
        named = {"Sum": next((name for name in sums if name), None), "Statistic": mean}
        return self.elements(Dy=dy, X=x, Dx=dx, Weight=next(iter(weight), None), **named)

    @property
    def entries(self) -> str:
        """The ends of a source: a second launch collects sums."""
        return vector_kernel.ENTRIES + (vector_kernel.COLLECT if self.sums else "")

    def require_alone(self) -> None:
        """Raises IllegalCandidate for what no kernel of such gradients takes."""
        step = self.step
        made = [name for name, _ in step.outputs]
        weights = step.phase == "refresh" or not step.constants.isdisjoint(self.norm.inputs[:4])
        _, _, mean, rstd, *_ = self.norm.inputs
        sums = [step.types[v].dtype for v in self.norm.outputs[1:] if v in dict(step.outputs)]
        known = (*(step.types[v].dtype for v in self.norm.inputs), *map(self.dtype_of, made))
        refuse(
            {
                **vector_kernel.not_an_element(*known),
                "there is nothing to normalise": self.type.numel == 0,
                "weights are in nchw": weights,
                "statistics, or sums, have two dtypes": len({*sums}) > 1
                or self.dtype_of(mean) != self.dtype_of(rstd),
            }
        )

    def bind(
        self, frame: Frame, blocks: int, threads: int, width: int, ends: Sequence[int]
    ) -> Binding:
        """Launches a kernel that leaves sums of `width` elements, and one that collects them;
        `ends` are the last of their arguments.
        """
        kernels = [vector_kernel.VectorKernel(frame.built, blocks, threads)]
        if self.sums:
            columns = -(-self.sums * width // COLLECTED)
            kernels += [vector_kernel.VectorKernel(frame.built, columns, threads, name="collect")]
        inputs, outputs = self.norm.inputs, self.norm.outputs
        given = (*inputs, *(None,) * (5 - len(inputs)), *outputs, *(None,) * (3 - len(outputs)))
        arguments, read = (*given, frame.scratch, *ends), (*inputs[:2], *inputs[4:])
        return vector_kernel.bound(kernels, self.step, frame, arguments, read)


@dataclass(frozen=True)
class NormParts(OfNorm):
    """y = chain of (x - mean) * rstd * weight + bias."""

    chain: Chain
    residual: str | None

    @property
    def width(self) -> int:
        """Neighbours that a thread reads of x at once."""
        return vector_kernel.width(self.step.types[self.norm.inputs[0]])

    @property
    def types(self) -> dict[str, str]:
        """The element types of a header."""
        x, *weight = self.norm.inputs
        y, statistic = self.step.nodes[-1].name, self.norm.outputs[1]
        added = {"Residual": self.residual, "Weight": next(iter(weight), None)}
        return self.elements(X=x, Y=y, Statistic=statistic, **added)

    @property
    def affine(self) -> dict[str, bool]:
        """Whether there is a weight and a bias, in the words of headers."""
        return {"kWeight": len(self.norm.inputs) > 1, "kBias": len(self.norm.inputs) > 2}

    def bind(self, frame: Frame, blocks: int, threads: int, *more: int) -> Binding:
        """Launches a kernel whose arguments are plantune::NormArguments and `more`."""
        kernel = vector_kernel.VectorKernel(frame.built, blocks, threads)
        x, *affine = self.norm.inputs
        read = (x, *affine, *(None,) * (2 - len(affine)), self.residual)
        arguments = (x, self.step.nodes[-1].name, *read[1:], *self.norm.outputs[1:], *more)
        names = [name for name in read if name is not None]
        return vector_kernel.bound([kernel], self.step, frame, arguments, names)


N = TypeVar("N", bound=NormParts)


def norm_parts(kind: type[N], step: Step, op: str) -> N:
    """Reads a step that starts with `op`; raises IllegalCandidate with the reason."""
    norm = step.nodes[0]
    refuse({f"the step starts with {norm.op}, not with a {op}": norm.op != op})
    chain, residual = what_follows(step)
    parts = kind(step, norm, chain, residual)
    x, *affine = norm.inputs
    known = (x, *affine, *norm.outputs[1:], step.nodes[-1].name)
    pairs = ([*map(parts.dtype_of, names)] for names in (affine, norm.outputs[1:]))
    refuse(
        {
            "there is nothing to normalise": step.types[norm.name].numel == 0,
            **vector_kernel.not_an_element(*map(parts.dtype_of, known), parts.dtype_of(residual)),
            "weight and bias, or the statistics, have two dtypes": any(
                len({*pair}) > 1 for pair in pairs
            ),
        }
    )
    return parts


def what_follows(step: Step) -> tuple[Chain, str | None]:
    """The chain after a norm, and the residual in it; raises IllegalCandidate."""
    norm, *rest = step.nodes
    chain: list[str] = []
    residual, last = None, norm.name
    for node in rest:
        others = [value for value in node.inputs if value != last]
        adds = node.op == "add" and len(others) == 1 and residual is None
        same = adds and step.types[others[0]].shape == step.types[norm.name].shape
        refuse({f"{node.op} at {node.name!r} has no place": not same and node.op not in FUNCTIONS})
        if same:
            residual = others[0]
        chain.append("residual" if same else node.op)
        last = node.name
    leaving = {name for name, _ in step.outputs}
    early = leaving - {last, *norm.outputs[1:]}
    refuse(
        {
            **vector_kernel.not_an_element(step.types[norm.name].dtype),
            READ_OUTSIDE: early,
            "the statistics are read alone": last not in leaving,
            "weights are in nchw": step.phase == "refresh" or norm.inputs[0] in step.constants,
        }
    )
    return tuple(chain), residual
