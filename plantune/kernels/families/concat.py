"""Concatenations of images along their channels with what follows them: `csrc/cuda/concat.h`."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from plantune.devices.cuda.structs import fields
from plantune.graph import Node, Step, TensorType
from plantune.graph.ops.functions import FUNCTIONS
from plantune.graph.ops.overload import CONCAT, joined
from plantune.graph.ops.overload_backward import WANTED
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, Parts, refuse
from plantune.kernels.legality import not_the_end_alone
from plantune.kernels.patterns.expression import Chain, expression, functors
from plantune.kernels.rendering import struct
from plantune.kernels.weights.constants import Arrangement, Constants, Parameter, channel_values
from plantune.kernels.weights.pitch import pitch_of

# A kernel takes 4096 bytes of arguments, twelve for each image.
SOURCES_MAX = 128
CHANNEL_OPS = {"mul_channel": "scale", "add_channel": "bias"}


@dataclass(frozen=True)
class ConcatParts(Parts):
    """y = chain of the images `x`, one after the other, * scale + bias."""

    x: tuple[str, ...]
    scale: str | None
    bias: str | None
    chain: Chain

    @property
    def type(self) -> TensorType:
        return self.step.nodes[0].types[0]

    @property
    def y(self) -> str:
        return self.step.nodes[-1].name

    @property
    def begins(self) -> tuple[int, ...]:
        """The first channel of each image, and their count."""
        sizes = (self.step.types[name].shape[1] for name in self.x)
        return tuple(itertools.accumulate(sizes, initial=0))

    @property
    def vector(self) -> int:
        """Channels that are read at once."""
        width = max(vector_kernel.width(self.step.types[name]) for name in self.x)
        return math.gcd(width, *self.begins)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the images: that of the first, and another one if there are two."""
        return tuple(dict.fromkeys(self.step.types[name].dtype for name in self.x))

    @property
    def pixels(self) -> int:
        return self.type.numel // self.type.shape[1]

    def grid(self, config: Attrs) -> tuple[int, int]:
        """Blocks along pixels and channels."""
        threads, columns = int(config["threads"]), self.begins[-1] // self.vector
        lanes = threads // min(columns, threads)
        return -(-self.pixels // (lanes * int(config["vectors"]))), -(-columns // threads)


class Concat(CudaFamily[ConcatParts]):
    """Config: a thread of a block takes its channels of so many pixels: `vectors`."""

    name: ClassVar = "concat"
    mixes_types: ClassVar = True
    image_layout = "nhwc"

    def read(self, step: Step) -> ConcatParts:
        node = step.nodes[0]
        refuse({f"the step starts with {node.op}, not with a concatenation": node.op != CONCAT})
        axis, x = joined(node.attrs, node.inputs)
        rank, dtypes = len(node.types[0].shape), sorted({step.types[name].dtype for name in x})
        refuse(
            {
                **vector_kernel.not_an_element(*dtypes, step.types[step.nodes[-1].name].dtype),
                "only images, along their channels": rank != 4 or axis % rank != 1,
                f"it takes {SOURCES_MAX} images at most": len(x) > SOURCES_MAX,
                "weights are in nchw": step.constants.intersection(x) or step.phase == "refresh",
                "autograd is to remember it": WANTED in node.attrs,
                f"images of two types at most, got {', '.join(dtypes)}": len(dtypes) > 2,
                "an image has nothing to add": any(not step.types[name].numel for name in x),
            }
        )
        named, chain = _following(step)
        return ConcatParts(step, x, named.get("scale"), named.get("bias"), chain)

    def reads_slices(self, parts: ConcatParts, config: Attrs) -> frozenset[str]:
        return frozenset(parts.x)

    def source(self, parts: ConcatParts, config: Attrs, arch: Arch) -> str:
        join = struct(
            "Join",
            T=vector_kernel.ELEMENTS[parts.dtypes[0]],
            Other=vector_kernel.ELEMENTS[parts.dtypes[-1]],
            Y=vector_kernel.ELEMENTS[parts.step.types[parts.y].dtype],
            kMixed=len(parts.dtypes) > 1,
            kOther=[parts.step.types[name].dtype != parts.dtypes[0] for name in parts.x],
            Expression=expression(parts.chain),
            kSources=len(parts.x),
            kBegins=parts.begins,
            kVector=parts.vector,
            kVectors=config["vectors"],
            kThreads=config["threads"],
            kScale=parts.scale is not None,
            kBias=parts.bias is not None,
        )
        before, threads = functors(parts.chain) + join, config["threads"]
        return vector_kernel.source(self.name, "Concat<Join>", threads, before)

    def bind(self, parts: ConcatParts, config: Attrs, frame: Frame) -> Binding:
        values, kind = frame.values, _arguments(len(parts.x))
        constants = Constants(frame, _constants(parts))
        threads = int(config["threads"])
        kernel = vector_kernel.VectorKernel(frame.built, parts.grid(config), threads)

        def launch(stream: int) -> None:
            read = [values[name] for name in parts.x]
            pitches = [pitch_of(tensor) for tensor in read]
            places = (ctypes.c_void_p * len(read))(*(tensor.data_ptr() for tensor in read))
            pitch = (ctypes.c_int * len(read))(*pitches)
            arguments = constants.into(
                kind, {"y": parts.y}, x=places, pitch=pitch, pixels=parts.pixels
            )
            whole = not any(pitch % parts.vector for pitch in pitches)
            kernel.launch(stream, arguments, read, whole=whole)

        return Binding(launch, constants=constants.all)


def _following(step: Step) -> tuple[dict[str, str], Chain]:
    """What each node after the first does to the value before it."""
    named: dict[str, str] = {}
    chain: list[str] = []
    for before, node in itertools.pairwise(step.nodes):
        part = CHANNEL_OPS.get(node.op)
        refuse({f"{node.op} at {node.name!r} has no place": not _may_follow(part, node, chain)})
        refuse({f"{node.name!r} reads another value": node.inputs[0] != before.name})
        if part is None:
            chain.append(node.op)
            continue
        again = part in named or (part == "scale" and "bias" in named)
        refuse({f"{node.op} at {node.name!r} comes too late": again})
        refuse({f"the {part} is not constant": node.inputs[1] not in step.constants})
        named[part] = node.inputs[1]
    refuse(not_the_end_alone(step))
    return named, tuple(chain)


def _may_follow(part: str | None, node: Node, chain: list[str]) -> bool:
    if part is None:
        return node.op in FUNCTIONS
    return not chain and node.attrs["axis"] == 1


def _constants(parts: ConcatParts) -> Mapping[str, tuple[str | None, Arrangement]]:
    found = {"scale": parts.scale, "bias": parts.bias}
    return {
        part: (name, channel_values(parts.step.types[parts.x[0]], parts.type.shape[1]))
        for part, name in found.items()
        if name is not None
    }


@cache
def _arguments(sources: int) -> type[ctypes.Structure]:
    """plantune::Concat::Arguments for so many images."""

    class Arguments(ctypes.Structure):
        _fields_ = fields(
            f"x:void_p[{sources}] pitch:int[{sources}] y pixels:longlong scale:one bias:one",
            one=Parameter,
        )

    return Arguments


FAMILY = Concat()
