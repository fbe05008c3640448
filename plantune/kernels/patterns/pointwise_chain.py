"""Reads steps as one expression over elements, and finds each element of each input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plantune.errors import IllegalCandidate
from plantune.graph import Node, Step
from plantune.graph.ops import op_named
from plantune.graph.ops.cast import INSERTED
from plantune.graph.ops.functions import FunctionOp
from plantune.graph.ops.pointwise import BroadcastOp, ChannelOp
from plantune.kernels.cuda import vector_kernel

# Which axis of the result each axis of a value runs along; NONE if it is broadcast.
AxisMap = tuple[int, ...]
NONE = -1
# Ops in C++ that are not functions of the table, as csrc/cuda/arithmetic.h has them.
EXPRESSIONS = {
    "cast": "{0}",
    "add": "{0} + {1}",
    "add_apart": "plantune::add_apart({0}, {1}, {step}, {least})",
    "apart_grad": "plantune::apart_grad({0}, {1}, {2})",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "add_channel": "{0} + {1}",
    "mul_channel": "{0} * {1}",
    "affine": "{0} * {alpha} + {beta}",
    "rsqrt": "plantune::rsqrt({0}, {eps})",
    "broadcast_to": "{0}",
}

ROUNDED = {"float16": "__half", "bfloat16": "__nv_bfloat16"}
# What may lie in memory; it is float between.
CXX_ELEMENTS = {**ROUNDED, "float32": "float", "uint8": "unsigned char"}


@dataclass(frozen=True)
class Operand:
    """An input, and how it is broadcast to the result."""

    name: str
    axes: AxisMap


@dataclass(frozen=True)
class Expression:
    """`lines` of C++ make `results` from in[0], in[1], ..., which are the operands' elements."""

    operands: tuple[Operand, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]


def not_elements(step: Step) -> dict[str, bool]:
    """The reasons that a chain does not compute with the dtypes of a step, and whether each holds;
    of bytes it makes floats.
    """
    made = {type_.dtype for node in step.nodes for type_ in node.types}
    read = {type_.dtype for _, type_ in step.inputs} - {"uint8"}
    return vector_kernel.not_an_element(*made, *read)


def rounded(dtype: str) -> str:
    """In C++ a float as one of fewer digits has it."""
    return f"plantune::rounded<{ROUNDED[dtype]}>({{}})"


def cxx_of(name: str) -> str | None:
    """An op in C++, None if it does not work place by place."""
    op = op_named(name)
    return op.cxx if isinstance(op, FunctionOp) else EXPRESSIONS.get(name)


def expression_of(step: Step) -> Expression:
    """Reads a step; raises IllegalCandidate with the reason."""
    shape = step.outputs[-1][1].shape
    for node in step.nodes:
        if cxx_of(node.op) is None:
            raise IllegalCandidate(f"{node.op} at {node.name!r} does not work place by place")
    for name, type_ in step.outputs:
        if type_.shape != shape:
            raise IllegalCandidate(f"{name!r} leaves as {type_.shape}, beside {shape}")
    writer = _Writer(step)
    results = tuple(writer.element(name, whole(shape)) for name, _ in step.outputs)
    return Expression(tuple(writer.operands), tuple(writer.lines), results)


class _Writer:
    """Writes each value once for each way in which it is broadcast to the result."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.makers = {node.name: node for node in step.nodes}
        self.read = {value for node in step.nodes for value in node.inputs}
        self.operands: dict[Operand, str] = {}
        self.lines: list[str] = []
        self.made: dict[Operand, str] = {}

    def element(self, value: str, axes: AxisMap) -> str:
        """What one element of a value is called in C++."""
        key = Operand(value, axes)
        if value not in self.makers:
            return self.operands.setdefault(key, f"in[{len(self.operands)}]")
        if key not in self.made:
            node = self.makers[value]
            inputs = [self.element(*read) for read in self.reads(node, axes)]
            numbers = {name: _literal(node.attrs[name]) for name in _numbers(node)}
            name = f"v{len(self.made)}"
            text = self.text(node).format(*inputs, **numbers)
            self.lines.append(f"const float {name} = {text};")
            self.made[key] = name
        return self.made[key]

    def text(self, node: Node) -> str:
        """A node in C++. Floats are float32 here; a cast to fewer digits rounds, if not a store.
        What is of the user's code may be read by what follows the chain, as a sum.
        """
        dtype = node.types[0].dtype
        stays = node.name in self.read or self.step.types[node.name].dtype != dtype
        stays = stays or INSERTED not in node.attrs
        if node.op != "cast" or not stays or dtype not in ROUNDED or not self.is_float(node):
            return cxx_of(node.op) or ""
        return rounded(dtype).format("{0}")

    def is_float(self, cast: Node) -> bool:
        return self.step.types[cast.inputs[0]].is_float

    def reads(self, node: Node, axes: AxisMap) -> list[tuple[str, AxisMap]]:
        """Each input of a node with its axes, if those of the result are known."""
        op, shapes = op_named(node.op), [self.step.types[name].shape for name in node.inputs]
        axes_of = [axes] * len(node.inputs)
        if isinstance(op, ChannelOp):
            axes_of[1] = _kept(shapes[1], (axes[node.attrs["axis"]],))
        elif isinstance(op, BroadcastOp) or node.op == "broadcast_to":
            axes_of[-1] = _kept(shapes[-1], axes[len(axes) - len(shapes[-1]) :])
        return list(zip(node.inputs, axes_of, strict=True))


def whole(shape: tuple[int, ...]) -> AxisMap:
    """The axes of what is not broadcast."""
    return _kept(shape, tuple(range(len(shape))))


def _kept(shape: tuple[int, ...], axes: AxisMap) -> AxisMap:
    """Axes of one element run along none."""
    return tuple(NONE if size == 1 else axis for size, axis in zip(shape, axes, strict=True))


def _numbers(node: Node) -> tuple[str, ...]:
    named = {"affine": ("alpha", "beta"), "rsqrt": ("eps",), "add_apart": ("step", "least")}
    return named.get(node.op, ())


def _literal(number: float) -> str:
    return f"{float(number)!r}f"


@dataclass(frozen=True)
class Geometry:
    """The axes of the result from the outermost in, merged where every operand allows it.

    `strides` says for each operand how far apart neighbours are along each axis, in elements.
    `width` neighbours along the innermost axis may be read at once.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    width: int


def geometry_of(step: Step, expression: Expression, layout: str, width: int) -> Geometry:
    """The addresses of all elements if images are in `layout`; `width` is the largest to use."""
    type_ = step.outputs[-1][1]
    order = (0, 2, 3, 1) if layout == "nhwc" else tuple(range(len(type_.shape)))
    axes = [axis for axis in order if type_.shape[axis] > 1] or [NONE]
    rows = [_strides(step, operand, layout, len(type_.shape)) for operand in expression.operands]
    dense = list(type_.strides(layout))
    merged: list[tuple[int, list[int]]] = []
    for axis in axes:
        size = 1 if axis == NONE else type_.shape[axis]
        here = [0 if axis == NONE else row[axis] for row in (dense, *rows)]
        if merged and [stride * size for stride in here] == merged[-1][1]:
            size *= merged.pop()[0]
        merged.append((size, here))
    sizes = tuple(size for size, _ in merged)
    strides = tuple(zip(*(here[1:] for _, here in merged), strict=True))
    while not _fits(sizes, strides, width):
        width //= 2
    return Geometry(sizes, strides, width)


MEMBERS = """  using Inputs = plantune::Types<{read}>;
  using Outputs = plantune::Types<{made}>;
  static constexpr int kInputs = {inputs}, kOutputs = {outputs}, kAxes = {axes};
  static constexpr Index kSizes[] = {{{sizes}}};
  static constexpr Index kStrides[][kAxes] = {{{strides}}};
"""
EVALUATE = """  static __device__ __forceinline__ void evaluate(const float (&in)[kInputs],
                                                  float (&out)[kOutputs]) {{
    {lines}
  }}
"""


def evaluate(expression: Expression) -> str:
    """The function that makes the results, of a struct that has their number."""
    made = (f"out[{i}] = {name};" for i, name in enumerate(expression.results))
    return EVALUATE.format(lines="\n    ".join((*expression.lines, *made)))


def members(
    expression: Expression, geometry: Geometry, read: Sequence[str], made: Sequence[str]
) -> str:
    """What a struct with an Index says of a chain in C++: see csrc/cuda/pointwise.h. Its operands
    are `read` and its results `made` of these dtypes.
    """
    return MEMBERS.format(
        read=", ".join(CXX_ELEMENTS[dtype] for dtype in read),
        made=", ".join(CXX_ELEMENTS[dtype] for dtype in made),
        inputs=len(expression.operands),
        outputs=len(expression.results),
        axes=len(geometry.sizes),
        # The outermost size is what the count of elements says.
        sizes=", ".join(map(str, (1, *geometry.sizes[1:]))),
        strides=", ".join(f"{{{', '.join(map(str, row))}}}" for row in geometry.strides),
    ) + evaluate(expression)


def _strides(step: Step, operand: Operand, layout: str, rank: int) -> list[int]:
    """An operand's strides along the axes of the result."""
    type_ = step.types[operand.name]
    image = len(type_.shape) == 4 and operand.name not in step.constants
    own = type_.strides(layout if image else "nchw")
    strides = [0] * rank
    for axis, stride in zip(operand.axes, own, strict=True):
        if axis != NONE:
            strides[axis] = stride
    return strides


def _fits(sizes: tuple[int, ...], strides: tuple[tuple[int, ...], ...], width: int) -> bool:
    """Whether vectors end where the innermost axis does, and begin at multiples of their size."""
    if len(sizes) == 1:
        return True
    begins = [stride for row in strides if row[-1] == 1 for stride in row[:-1]]
    return all(place % width == 0 for place in (sizes[-1], *begins))
