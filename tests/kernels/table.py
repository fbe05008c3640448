"""One table of steps: every op alone, chains of them, and what some networks offer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from plantune.graph.fusions import all_fusions
from plantune.graph.partition import alternatives
from plantune.graph.passes.differentiate import differentiate
from plantune.graph.step import Step
from plantune.graph.tracing.extract import extract
from plantune.graph.types import TensorType
from plantune.layers import SpaceToDepth
from plantune.models.resnet import BasicBlock, Bottleneck
from plantune.models.se_resnet9 import FixupBlock

from .conftest import Builder, step_of
from .singles import SINGLES, geometry, product

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Conv:
    """The sizes of one convolution."""

    x: Shape
    w: Shape
    stride: Shape = (1, 1)
    padding: Shape = (0, 0)
    dilation: Shape = (1, 1)
    groups: int = 1

    @property
    def attrs(self):
        return geometry(self.stride, self.padding, self.dilation, self.groups)

    @property
    def y(self) -> Shape:
        return step_of(self.forward).outputs[0][1].shape

    def forward(self, b: Builder) -> str:
        return b("conv2d", b.x(*self.x), b.w(*self.w), **self.attrs)

    def dgrad(self, b: Builder) -> str:
        return b("conv2d_dgrad", b.x(*self.y), b.w(*self.w), **self.attrs, shape=self.x)

    def wgrad(self, b: Builder) -> str:
        return b("conv2d_wgrad", b.x(*self.y), b.x(*self.x), **self.attrs, shape=self.w)


CONVS: dict[str, Conv] = {
    "3x3": Conv((2, 16, 8, 8), (16, 16, 3, 3), padding=(1, 1)),
    "3x3 odd": Conv((3, 5, 7, 9), (7, 5, 3, 3), padding=(1, 1)),
    "3x3 one image": Conv((1, 3, 6, 4), (8, 3, 3, 3), padding=(1, 1)),
    "3x3 one channel": Conv((1, 1, 4, 4), (1, 1, 3, 3), padding=(1, 1)),
    "3x3 stride 2": Conv((2, 16, 8, 8), (32, 16, 3, 3), (2, 2), (1, 1)),
    "3x3 stride 2 odd": Conv((2, 3, 7, 5), (5, 3, 3, 3), (2, 2), (1, 1)),
    "3x3 no padding": Conv((2, 4, 5, 6), (6, 4, 3, 3)),
    "3x3 on 2x2": Conv((2, 32, 2, 2), (32, 32, 3, 3), padding=(1, 1)),
    "3x3 on 1x1": Conv((2, 4, 1, 1), (6, 4, 3, 3), padding=(1, 1)),
    "5x5 on 2x2": Conv((2, 3, 2, 2), (4, 3, 5, 5), padding=(2, 2)),
    "3x3 much padding": Conv((1, 2, 3, 3), (3, 2, 3, 3), padding=(3, 2)),
    "7x7 stride 2": Conv((1, 3, 13, 11), (16, 3, 7, 7), (2, 2), (3, 3)),
    "1x1": Conv((3, 8, 7, 5), (12, 8, 1, 1)),
    "1x1 odd": Conv((1, 3, 1, 1), (1, 3, 1, 1)),
    "1x1 stride 2": Conv((2, 8, 6, 6), (16, 8, 1, 1), (2, 2)),
    "1x1 padded": Conv((2, 8, 3, 3), (4, 8, 1, 1), padding=(1, 1)),
    "1x3": Conv((2, 6, 5, 7), (6, 6, 1, 3), (2, 1), (0, 1)),
    "groups": Conv((2, 8, 6, 6), (12, 2, 3, 3), (1, 1), (1, 1), groups=4),
    "1x1 groups": Conv((2, 8, 5, 5), (8, 4, 1, 1), groups=2),
    "depthwise": Conv((2, 9, 6, 6), (9, 1, 3, 3), (1, 1), (1, 1), groups=9),
    "dilation": Conv((2, 4, 9, 9), (4, 4, 3, 3), (1, 1), (2, 2), (2, 2)),
    "dilation stride": Conv((1, 4, 9, 8), (6, 4, 3, 3), (2, 2), (2, 1), (2, 1)),
}


@dataclass(frozen=True)
class Epilogue:
    """Which parts follow a convolution."""

    scale: str = ""
    bias: str = ""
    residual: str = ""
    relu: bool = False
    offset: bool = False

    def __str__(self) -> str:
        named = [self.scale and f"{self.scale} scale", self.bias and f"{self.bias} bias"]
        named += [self.residual and f"residual {self.residual}", self.relu and "relu"]
        return ", ".join(filter(None, (*named, self.offset and "offset"))) or "nothing"

    def emit(self, b: Builder, conv: Conv) -> str:
        y, channels = conv.forward(b), conv.w[0]
        for op, kind in (("mul", self.scale), ("add", self.bias)):
            if kind == "scalar":
                y = b(op, y, b.w(1))
            elif kind == "channel":
                y = b(f"{op}_channel", y, b.w(channels), axis=1)
        if self.residual:
            other = b.x(*conv.y)
            y = b("add", *((y, other) if self.residual == "after" else (other, y)))
        if self.relu:
            y = b("relu", y)
        return b("add", y, b.w(1)) if self.offset else y


KINDS = ("", "scalar", "channel"), ("", "scalar", "channel"), ("", "after", "before")
ENDS = ((False, False), (True, False), (True, True))
# By a share of which any three parts meet in every way.
EPILOGUES: dict[int, list[Epilogue]] = {0: [], 1: [], 2: []}
for at in itertools.product(range(3), repeat=4):
    scale, bias, residual = (kinds[i] for kinds, i in zip(KINDS, at, strict=False))
    EPILOGUES[sum(at) % 3].append(Epilogue(scale, bias, residual, *ENDS[at[3]]))
ALL_PARTS = Epilogue("channel", "channel", "after", True, True)
SOME_PARTS = Epilogue("scalar", "scalar", "", True, True)


def every_value(b: Builder) -> tuple[str, ...]:
    first = b("affine", b.x(2, 3, 4, 5), alpha=2.0, beta=1.0)
    second = b("sigmoid", first)
    return first, second, b("mul", second, first)


CHAINS: dict[str, Callable[[Builder], str | tuple[str, ...]]] = {
    "scaled bytes": lambda b: pixels(b, "uint8"),
    "scaled floats": lambda b: pixels(b, "float32"),
    "scaled halves": lambda b: pixels(b, "float16"),
    "linear": lambda b: linear(b, b.x(5, 7), 9),
    "linear relu": lambda b: b("relu", linear(b, b.x(3, 16), 8)),
    "linear sigmoid": lambda b: b("sigmoid", linear(b, b.x(3, 16), 33)),
    "linear of one row": lambda b: b("relu", linear(b, b.x(1, 5), 1)),
    "matmul a^T, bias": lambda b: b(
        "add_channel", b("matmul", b.x(7, 5), b.w(7, 9), **product(True, False)), b.w(9), axis=1
    ),
    "linear, product read outside": lambda b: both(
        b, b("matmul", b.x(5, 7), b.w(9, 7), **product())
    ),
    "squeeze and excite": lambda b: squeeze_excite(b, (2, 19, 5, 7), 3),
    "masked_dgrad": lambda b: masked_dgrad(b, CONVS["3x3"]),
    "masked_dgrad stride 2": lambda b: masked_dgrad(b, CONVS["3x3 stride 2 odd"]),
    "pointwise_sum": lambda b: b(
        "sum",
        b("mul", b("relu_grad", b.x(3, 5, 4, 4), b.x(3, 5, 4, 4)), b.x(3, 5, 4, 4)),
        dims=(0, 2, 3),
        keepdim=False,
    ),
    "pointwise_sum to a scalar": lambda b: b(
        "sum_to", b("mul", b("mul", b.x(3, 5, 4, 4), b.w(1)), b.x(3, 5, 4, 4)), shape=(1,)
    ),
    "pointwise chain with all values read": every_value,
    **{
        f"epilogue with scalars of shape {shape}": lambda b, shape=shape: scalars(b, shape)
        for shape in ((), (1, 1, 1, 1))
    },
    "two residuals": lambda b: b("add", *[CONVS["3x3"].forward(b)] * 2),
}


def pixels(b: Builder, dtype: str) -> str:
    """Images as numbers of the network, by mean and deviation of each channel."""
    y = b("affine", b("cast", b.x(2, 3, 8, 4, dtype=dtype), dtype=b.dtype), alpha=1 / 255, beta=0.0)
    y = b("div", b("sub", y, b.w(1, 3, 1, 1)), b.w(3, 1, 1))
    return b("relu", b("space_to_depth", y, block=4))


def linear(b: Builder, x: str, columns: int) -> str:
    rows = b.graph.types[x].shape[1]
    return b("add_channel", b("matmul", x, b.w(columns, rows), **product()), b.w(columns), axis=1)


def squeeze_excite(b: Builder, shape: Shape, hidden: int) -> str:
    x, channels = b.x(*shape), shape[1]
    y = b("relu", linear(b, b("mean", x, dims=(2, 3), keepdim=False), hidden))
    gates = b("reshape", b("sigmoid", linear(b, y, channels)), shape=(*shape[:2], 1, 1))
    return b("relu", b("add", b("mul", x, gates), b.x(*shape)))


def scalars(b: Builder, shape: Shape) -> str:
    y = b("add", b("mul", CONVS["1x1"].forward(b), b.w(*shape)), b.w(*shape))
    return b("add", b("relu", y), b.w(*shape))


def both(b: Builder, y: str) -> tuple[str, str]:
    return y, b("relu", y)


def masked_dgrad(b: Builder, conv: Conv) -> str:
    dx = b("add", conv.dgrad(b), b.x(*conv.x))
    return b("mul", b("relu_grad", dx, b.x(*conv.x)), b.w(1))


class Heads(nn.Module):
    """A pooled linear head after a max pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(SpaceToDepth(2), nn.Conv2d(12, 8, 1), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(self.pool(self.stem(x)).mean((2, 3)))


NETWORKS: dict[str, tuple[nn.Module, Shape]] = {
    "fixup": (FixupBlock(16, 16, 1), (2, 16, 6, 6)),
    "fixup stride 2": (FixupBlock(16, 32, 2), (3, 16, 6, 8)),
    "basic": (BasicBlock(8, 8, 1), (2, 8, 5, 5)),
    "basic stride 2": (BasicBlock(4, 8, 2), (1, 4, 8, 8)),
    "bottleneck": (Bottleneck(16, 4, 1), (2, 16, 3, 5)),
    "heads": (Heads(), (2, 3, 8, 8)),
}


def network_steps() -> Iterator[tuple[str, Step]]:
    """Every fused step that the shipped fusions offer for some blocks, forward and backward."""
    for (name, (module, shape)), mode in itertools.product(NETWORKS.items(), ("infer", "train")):
        graph = extract(module.train(mode == "train"), TensorType(shape))
        if mode == "train":
            graph = differentiate(graph, ["x", *(name for name, _ in graph.parameters)])
        fused = (step for step in alternatives(graph, all_fusions()) if len(step.nodes) > 1)
        for step in fused:
            yield f"{name} {mode}: {step.name} +{len(step.nodes) - 1}", step


def conv_steps(dtype: str) -> Iterator[tuple[str, Step]]:
    """Every geometry: in float32 all ways and parts of it, in other dtypes these take turns."""
    ways, all_parts = ("forward", "dgrad", "wgrad"), (ALL_PARTS, SOME_PARTS)
    turns = dtype != "float32"
    for at, (name, conv) in enumerate(CONVS.items(), dtype == "float64"):
        for way in ways[at % 3 : at % 3 + 1] if turns else ways:
            yield f"{way} {name} {dtype}", step_of(getattr(conv, way), dtype)
        for parts in all_parts[at % 2 : at % 2 + 1] if turns else all_parts:
            step = step_of(lambda b, conv=conv, parts=parts: parts.emit(b, conv), dtype)
            yield f"{name}, {parts} {dtype}", step


def all_steps() -> dict[str, Step]:
    """The table: every step once, by a name for people."""
    steps: dict[str, Step] = {}
    for dtype in ("float32", "bfloat16", "float64"):
        steps |= {f"{name} {dtype}": step_of(emit, dtype) for name, emit in SINGLES.items()}
        steps |= {f"{name} {dtype}": step_of(emit, dtype) for name, emit in CHAINS.items()}
        steps.update(conv_steps(dtype))
    for share, name in enumerate(("3x3 one image", "1x1")):
        for parts in EPILOGUES[share]:
            steps[f"{name}, {parts}"] = step_of(
                lambda b, name=name, parts=parts: parts.emit(b, CONVS[name])
            )
    steps.update(network_steps())
    unique = {step.signature: name for name, step in reversed(steps.items())}
    return {name: step for name, step in steps.items() if unique[step.signature] == name}
