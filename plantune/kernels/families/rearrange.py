"""Windows of images and back, rolled or not, in one pass: `csrc/cuda/rearrange.h`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from plantune.graph import Node, Step, TensorType
from plantune.graph.ops.overload import ARGUMENTS, ROLL
from plantune.graph.ops.overload_backward import WANTED
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, refuse
from plantune.kernels.family import Binding, Frame, Parts
from plantune.kernels.legality import not_the_end_alone
from plantune.kernels.rendering import cxx_bool

# The axes of an image cut into windows. What moves fewer may be a layout, which costs nothing where
# neighbours have it too.
AXES_OF_WINDOWS = 6
SOURCE = (
    """#include "cuda/rearrange.h"
struct Map {{
  using T = {element};
  using Index = {index};
  static constexpr int kWidth = {width}, kVectors = {vectors}, kThreads = {threads};
  static constexpr bool kAdds = {adds};

  /// Where x has element `i` of the result.
  static __device__ __forceinline__ Index place(Index i) {{
    Index rest, found;{moves}
    return i;
  }}
}};
using Kernel = plantune::Rearrange<Map>;"""
    + vector_kernel.ENTRIES
)


@dataclass(frozen=True)
class Move:
    """Element (c0, c1, ...) of `sizes` was at the sum of ((c + shift) % size) * stride."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    shifts: tuple[int, ...]


@dataclass(frozen=True)
class RearrangeParts(Parts):
    """y = x in another order, plus `other`; the last of `moves` is the first that is undone."""

    x: str
    other: str | None
    moves: tuple[Move, ...]

    @property
    def type(self) -> TensorType:
        return self.step.outputs[0][1]

    @property
    def width(self) -> int:
        """Elements that stay beside each other, as many as a thread moves at once."""
        last = (move.sizes[-1] for move in self.moves)
        return math.gcd(vector_kernel.width(self.type), *last)

    def blocks(self, config: Attrs) -> int:
        at_once = self.width * int(config["threads"]) * int(config["vectors"])
        return -(-self.type.numel // at_once)


class Rearrange(CudaFamily[RearrangeParts]):
    """Config: a thread of a block moves so many `vectors`."""

    name: ClassVar = "rearrange"
    image_layout = "nchw"  # elements are counted in rows

    def read(self, step: Step) -> RearrangeParts:
        nodes = step.nodes
        adds = nodes[-1].op == "add"
        x, moves = nodes[0].inputs[0], list(_moves(step, nodes[: len(nodes) - adds]))
        last = nodes[-1]
        rest = [name for name in last.inputs if len(nodes) > 1 and name != nodes[-2].name]
        other = rest[0] if adds and len(rest) == 1 else None
        alike = other is None or step.types[other] == last.types[0]
        refuse(
            {
                **vector_kernel.not_an_element(last.types[0].dtype),
                "there is nothing to move": last.types[0].numel == 0,
                "the order stays as it is": not moves,
                **not_the_end_alone(step),
                "what is added has another shape": adds and (other is None or not alike),
                "weights are in nchw": step.phase == "refresh",
            }
        )
        return RearrangeParts(step, x, other, tuple(moves))

    def estimate_us(self, parts: RearrangeParts, config: Attrs, arch: Arch) -> float:
        """Like a chain of pointwise ops, whose costs it shares; narrow words waste bandwidth."""
        cost = arch.cost("pointwise")
        used = min(1.0, parts.width * parts.type.torch_dtype.itemsize / 8)
        moved = parts.step.traffic_bytes / cost["bytes_per_us"] / used
        return cost["launch_us"] + moved * self.slowdown(parts, arch)

    def source(self, parts: RearrangeParts, config: Attrs, arch: Arch) -> str:
        return SOURCE.format(
            element=vector_kernel.ELEMENTS[parts.type.dtype],
            index=vector_kernel.index_of(parts.type.numel),
            width=parts.width,
            vectors=config["vectors"],
            threads=config["threads"],
            adds=cxx_bool(parts.other is not None),
            moves="".join(map(_undone, reversed(parts.moves))),
        )

    def bind(self, parts: RearrangeParts, config: Attrs, frame: Frame) -> Binding:
        blocks, threads = parts.blocks(config), int(config["threads"])
        kernel = vector_kernel.VectorKernel(frame.built, blocks, threads)
        names = [name for name in (parts.x, parts.other) if name is not None]
        arguments = (parts.x, parts.other, parts.step.outputs[0][0], parts.type.numel)
        return vector_kernel.bound([kernel], parts.step, frame, arguments, names)


def _moves(step: Step, nodes: Sequence[Node]) -> Iterator[Move]:
    """What changes the order of elements, from the first on; raises IllegalCandidate."""
    value = nodes[0].inputs[0] if nodes else ""
    for node in nodes:
        follows = bool(node.inputs) and node.inputs[0] == value and WANTED not in node.attrs
        refuse({f"{node.op} at {node.name!r} has no place": not follows})
        sizes, value = step.types[node.inputs[0]].shape, node.name
        if node.op == "permute":
            dims = node.attrs["dims"]
            refuse(
                {
                    f"{len(dims)} axes may be a layout": len(dims) < AXES_OF_WINDOWS,
                    "neighbours are moved apart": dims[-1] != len(dims) - 1,
                }
            )
            dense = TensorType(sizes).strides("nchw")
            to = tuple(sizes[axis] for axis in dims)
            yield Move(to, tuple(dense[axis] for axis in dims), (0,) * len(dims))
        elif node.op == ROLL:
            yield _rolled(node, sizes)
        else:
            refuse({f"{node.op} at {node.name!r} has no place": node.op != "reshape"})


def _rolled(node: Node, sizes: tuple[int, ...]) -> Move:
    given = json.loads(node.attrs[ARGUMENTS])
    shifts = [0] * len(sizes)
    refuse({"it is rolled as one row": not given.get("dims")})
    for axis, shift in zip(given["dims"], given["shifts"], strict=True):
        shifts[axis] -= shift
    refuse({"neighbours are moved apart": shifts[-1] % max(sizes[-1], 1) != 0})
    return Move(sizes, TensorType(sizes).strides("nchw"), tuple(shifts))


def _undone(move: Move) -> str:
    """C++ that goes from the place of an element after a move to the one before it."""
    lines = ["rest = i, found = 0;"]
    axes = list(zip(move.sizes, move.strides, move.shifts, strict=True))
    for size, stride, shift in reversed(axes):
        at = f"rest % {size}u"
        at = f"(({at} + {shift % size}u) % {size}u)" if shift % size else at
        lines.append(f"found += {at} * {stride}u, rest /= {size}u;")
    lines.append("i = found;")
    return "".join(f"\n    {line}" for line in lines)


FAMILY = Rearrange()
