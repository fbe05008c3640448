"""Steps as other steps over the same memory, for kernels written for images of many channels.

A product of matrices is a 1x1 convolution; of images laid flat too, if the weight's columns come in
the order of their pixels. A convolution that steps over whole pixels reads so many
neighbours as one wide pixel: nothing moves, neither in nhwc images nor in the filter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from plantune.devices.cuda.flags import float32_precisions
from plantune.graph import Attrs, Node, Step, TensorType
from plantune.graph.ops import op_named
from plantune.graph.ops.pointwise import ChannelOp
from plantune.kernels.legality import READ_OUTSIDE, refuse
from plantune.kernels.weights.constants import Arrangement, by_pixels, conv_weight

EIGHT = 8  # channels, without which most of these kernels run no pixel
# Channels of which one moves four at once. What is odd it moves one by one.
FOUR = 4
ONE_PIXEL = Attrs(stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1)
Typed = Callable[[str, TensorType], TensorType]


@dataclass(frozen=True)
class OtherStep(Step):
    """`asked` in other words. Its images are in `layout`."""

    asked: Step
    layout: str

    @property
    def layouts(self) -> dict[str, str]:
        """The layout of each image of the step that was asked for, but weights."""
        inputs = (pair for pair in self.asked.inputs if pair[0] not in self.constants)
        values = (*inputs, *self.asked.outputs)
        return {name: self.layout for name, type_ in values if len(type_.shape) == 4}

    @staticmethod
    def of(asked: Step, layout: str = "nhwc", **others: Any) -> OtherStep:
        """The step that is asked for, with these fields in place of its own."""
        own = {item.name: getattr(asked, item.name) for item in fields(Step)}
        return OtherStep(**{**own, **others}, asked=asked, layout=layout)


def float32_precision(step: Step) -> str:
    """What torch rounds float32 factors of a step to: products of matrices have a setting of their
    own, whatever kernel computes them.
    """
    conv, matmul, _ = float32_precisions()
    asked = step.asked if isinstance(step, OtherStep) else step
    return matmul if "matmul" in asked.ops else conv


def as_convolution(step: Step) -> Step:
    """A step that begins with a product of rows, or of images laid flat, and a weight, or with a
    convolution of few channels that steps over whole pixels, as a convolution of more. Any other
    step is given back; raises IllegalCandidate for other products.
    """
    first = step.nodes[0]
    if first.op == "matmul":
        return _of_rows(step, first)
    if first.op == "reshape":
        return _of_flat_images(step, first)
    return _of_wide_pixels(step, first) if _can_widen(step, first) else step


def _of_flat_images(step: Step, flat: Node) -> Step:
    """An image in nhwc is a row already if it is flattened."""
    (x,), rest = flat.inputs, step.nodes[1:]
    image, row = step.types[x].shape, flat.types[0].shape
    is_image = len(image) == 4 and row == (image[0], math.prod(image[1:]))
    refuse(
        {
            "only images laid flat for a product": not is_image
            or not rest
            or rest[0].op != "matmul",
            "a flat image of single pixels is a row": is_image and image[2:] == (1, 1),
            "the product does not read the flat image": rest[:1] and rest[0].inputs[0] != flat.name,
            "something else reads the flat image": any(
                name == flat.name for name, _ in step.outputs
            )
            or any(flat.name in node.inputs for node in rest[1:]),
            "weights are in nchw": x in step.constants or step.phase == "refresh",
        }
    )
    product = replace(rest[0], inputs=(x, rest[0].inputs[1]))
    types = {x: TensorType(row, step.types[x].dtype)}
    rows = replace(
        step,
        nodes=(product, *rest[1:]),
        inputs=tuple((name, types.get(name, type_)) for name, type_ in step.inputs),
    )
    return replace(_of_rows(rows, product), asked=step, layout="nhwc")


def _can_widen(step: Step, conv: Node) -> bool:
    """Whether pixels of too few channels for these kernels make whole wide ones."""
    if conv.op != "conv2d" or conv.attrs["groups"] != 1 or conv.attrs["dilation"] != (1, 1):
        return False
    (_, channels, _, columns), width = step.types[conv.inputs[0]].shape, conv.attrs["stride"][1]
    taps, padding = step.types[conv.inputs[1]].shape[3], conv.attrs["padding"][1]
    whole = not any(size % width for size in (columns, taps, padding))
    wanted = FOUR if channels % 2 else EIGHT
    return bool(width > 1 and whole and channels % EIGHT and channels * width % wanted == 0)


def _of_wide_pixels(step: Step, conv: Node) -> Step:
    """Neighbours along a row that a stride steps over are one pixel of all their channels."""
    width = conv.attrs["stride"][1]

    def wide(name: str, type_: TensorType) -> TensorType:
        if name not in conv.inputs:
            return type_
        n, c, h, w = type_.shape
        return TensorType((n, c * width, h, w // width), type_.dtype)

    (rows, _), (above, beside) = conv.attrs["stride"], conv.attrs["padding"]
    attrs = Attrs(conv.attrs, stride=(rows, 1), padding=(above, beside // width))
    return OtherStep.of(
        step,
        nodes=(replace(conv, attrs=attrs), *step.nodes[1:]),
        inputs=tuple((name, wide(name, type_)) for name, type_ in step.inputs),
    )


def filter_arrangement(step: Step, name: str) -> Arrangement:
    """A convolution's weight as (O, R, S, C), as the step that was asked for has it."""
    products = (node.types[0].torch_dtype for node in step.nodes if name in node.inputs[1:])
    dtype = next(products, step.types[name].torch_dtype)
    arrangement = replace(conv_weight(step.types[name]), dtype=dtype)
    if not isinstance(step, OtherStep) or step.asked.types[name] == step.types[name]:
        return arrangement

    first = step.asked.nodes[0]
    if first.op == "reshape":
        _, *image = step.asked.types[first.inputs[0]].shape
        rows, columns = image[1:]
        return replace(
            arrangement,
            shape=(arrangement.shape[0], rows, columns, image[0]),
            order=lambda weight: weight.unflatten(1, image).permute(0, 2, 3, 1),
        )

    def order(weight: Tensor) -> Tensor:
        return by_pixels(weight).reshape(arrangement.shape)

    return replace(arrangement, order=order, packs=True)


def _of_rows(step: Step, product: Node) -> OtherStep:
    flags = (product.attrs["transpose_a"], product.attrs["transpose_b"])
    refuse(
        {"rows of both matrices must be contiguous along the inner axis": flags != (False, True)}
    )
    nodes = _without_reshapes(step)
    image = _images(step, product)
    read = {name for node in nodes for name in node.inputs}
    return OtherStep.of(
        step,
        "nchw",  # rows are one after the other, however many axes count them
        nodes=tuple(_over_images(node, image) for node in nodes),
        inputs=tuple((name, image(name, type_)) for name, type_ in step.inputs if name in read),
        outputs=tuple((name, image(name, type_)) for name, type_ in step.outputs),
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
    refuse({READ_OUTSIDE: leaving & names.keys()})
    return tuple(_renamed(node, names) for node in step.nodes if node.op != "reshape")


def _renamed(node: Node, names: dict[str, str]) -> Node:
    def last(name: str) -> str:
        while name in names:
            name = names[name]
        return name

    inputs = tuple(map(last, node.inputs))
    return Node(last(node.name), node.op, inputs, node.types, node.attrs)
