"""A product of matrices as the 1x1 convolution that it is, for kernels written for images."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from plantune.canonical import Attrs
from plantune.graph.graph import Node
from plantune.graph.ops import op_named
from plantune.graph.ops.pointwise import ChannelOp
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.legality import refuse

ONE_PIXEL = Attrs(stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)
Typed = Callable[[str, TensorType], TensorType]


@dataclass(frozen=True)
class StepOfRows(Step):
    """`asked` as a convolution: each row of its matrices is an image of one pixel."""

    asked: Step

    @property
    def layouts(self) -> dict[str, str]:
        """Rows are one after the other, however many axes count them."""
        values = (*self.asked.inputs, *self.asked.outputs)
        return {name: "nchw" for name, type_ in values if len(type_.shape) == 4}


def as_convolution(step: Step) -> Step:
    """A step that begins with a product of rows and a weight, as one over images. Any other step is
    given back; raises IllegalCandidate for other products.
    """
    product = step.nodes[0]
    if product.op != "matmul":
        return step
    flags = (product.attrs["transpose_a"], product.attrs["transpose_b"])
    refuse(
        {"rows of both matrices must be contiguous along the inner axis": flags != (False, True)}
    )
    nodes = _without_reshapes(step)
    image = _images(step, product)
    read = {name for node in nodes for name in node.inputs}
    return StepOfRows(
        nodes=tuple(_over_images(node, image) for node in nodes),
        inputs=tuple((name, image(name, type_)) for name, type_ in step.inputs if name in read),
        outputs=tuple((name, image(name, type_)) for name, type_ in step.outputs),
        constants=step.constants,
        phase=step.phase,
        asked=step,
    )


def _images(step: Step, product: Node) -> Typed:
    """The type of each value if rows are images."""
    rows, columns = product.types[0].shape

    def typed(name: str, type_: TensorType) -> TensorType:
        if name in product.inputs:
            return TensorType((*type_.shape, 1, 1), type_.dtype)
        whole = type_.shape[-1:] == (columns,) and type_.numel == rows * columns
        if name in step.constants or not whole:
            return type_
        return TensorType((rows, columns, 1, 1), type_.dtype)

    return typed


def _over_images(node: Node, image: Typed) -> Node:
    types = tuple(image(node.name, type_) for type_ in node.types)
    attrs = node.attrs
    if node.op == "matmul":
        return Node(node.name, "conv2d", node.inputs, types, ONE_PIXEL)
    if isinstance(op_named(node.op), ChannelOp):
        last = attrs["axis"] == len(node.types[0].shape) - 1
        refuse({f"{node.name!r} is not one value of each column": not last})
        attrs = Attrs(axis=1)
    return Node(node.name, node.op, node.inputs, types, attrs)


def _without_reshapes(step: Step) -> tuple[Node, ...]:
    """A reshape of whole rows moves nothing: what it reads takes its name."""
    columns = step.nodes[0].types[0].shape[1]
    names: dict[str, str] = {}
    for before, node in itertools.pairwise(step.nodes):
        if node.op == "reshape":
            whole = node.inputs == (before.name,) and node.types[0].shape[-1:] == (columns,)
            refuse({f"{node.name!r} is not a reshape of the rows before it": not whole})
            names[before.name] = node.name
    leaving = {name for name, _ in step.outputs}
    refuse({"a value before the end of the step is read outside of it": leaving & names.keys()})
    return tuple(_renamed(node, names) for node in step.nodes if node.op != "reshape")


def _renamed(node: Node, names: dict[str, str]) -> Node:
    def last(name: str) -> str:
        while name in names:
            name = names[name]
        return name

    inputs = tuple(map(last, node.inputs))
    return Node(last(node.name), node.op, inputs, node.types, node.attrs)
