"""How far estimates of kernels' times are off, by family, from a policy's images to 64 of 224x224.

python tools/studies/estimates.py --json estimates.json       # the config that estimates choose
python tools/studies/estimates.py --every --families pool     # every config of a family
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plantune.devices.machine import arch_of, environment_of
from plantune.graph.builder import GraphBuilder
from plantune.graph.step import Step, make_step
from plantune.graph.types import TensorType
from plantune.kernels.build import build_all
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates, estimate_us, resolve
from plantune.measure.inputs import draw_inputs
from plantune.measure.step_alone import TimedStep
from plantune.space.search_space import SearchSpace, load_search_space

Emit = Callable[[GraphBuilder, TensorType], str | tuple[str, ...]]
# Images of a policy, of small networks in training, and of classifiers at their sizes.
SMALL = ((256, 32, 20, 20), (128, 64, 16, 16), (2048, 64, 8, 8))
LARGE = ((10, 480, 224, 224), (10, 96, 112, 112), (64, 64, 112, 112), (64, 64, 224, 224))
MIDDLE = ((32, 256, 56, 56), (64, 512, 28, 28), (10, 672, 112, 112), (32, 960, 7, 7))
SHAPES = (*SMALL, *MIDDLE, *LARGE)
DTYPES = ("float16", "float32")
REPLAYED_US, MOST_CALLS, ROUNDS = 1500.0, 50, 7
COPIED_BYTES_PER_US = 4.2e6  # of an H200


def pool(op: str, size: int, stride: int) -> Emit:
    window = {"kernel": (size, size), "stride": (stride, stride), "padding": (size // 2,) * 2}
    more = {"count_padding": True} if op == "avg_pool2d" else {}

    def emit(b: GraphBuilder, image: TensorType) -> str | tuple[str, ...]:
        made = b.emit(op, b.input("x", image), **window, **more)
        return made if op == "max_pool2d_taps" else made[0]

    return emit


def pool_gradient(b: GraphBuilder, image: TensorType) -> str:
    window = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "shape": image.shape}
    n, c, h, w = image.shape
    pooled = (n, c, (h + 1) // 2, (w + 1) // 2)
    dy, taps = (
        b.input(name, TensorType(pooled, dtype))
        for name, dtype in (("dy", image.dtype), ("taps", "uint8"))
    )
    return b.emit("max_pool2d_taps_grad", dy, taps, **window)[0]


def depthwise(size: int, stride: int) -> Emit:
    def emit(b: GraphBuilder, image: TensorType) -> str:
        c = image.shape[1]
        x, w = b.input("x", image), b.parameter("w", TensorType((c, 1, size, size), image.dtype))
        how: dict[str, Any] = {"stride": (stride, stride), "padding": (size // 2,) * 2}
        return b.emit("conv2d", x, w, **how, dilation=(1, 1), groups=c)[0]

    return emit


def concatenation(b: GraphBuilder, image: TensorType) -> str:
    n, c, h, w = image.shape
    parts = (c // 2, c // 4, c - c // 2 - c // 4)
    x = [b.input(f"x{i}", TensorType((n, part, h, w), image.dtype)) for i, part in enumerate(parts)]
    arguments = {"tensors": [{"tensor": at} for at in range(len(x))], "dim": 1}
    return b.emit("aten.cat.default", *x, arguments=json.dumps(arguments))[0]


def norm(op: str) -> Emit:
    def emit(b: GraphBuilder, image: TensorType) -> tuple[str, ...]:
        x, row = b.input("x", image), TensorType((image.shape[1],), "float32")
        rows = [b.parameter(name, row) for name in ("weight", "bias")]
        rows += [b.input(name, row) for name in ("mean", "var")]
        y, _, _, *new = b.emit(op, x, *rows, eps=1e-5, momentum=0.1)
        return (b.emit("relu", y)[0], *new)

    return emit


def group_norm(b: GraphBuilder, image: TensorType) -> str:
    x, row = b.input("x", image), TensorType((image.shape[1],), image.dtype)
    rows = [b.parameter(name, row) for name in ("weight", "bias")]
    return b.emit("group_norm", x, *rows, groups=16, eps=1e-5)[0]


def cast(b: GraphBuilder, image: TensorType) -> str:
    other = "float32" if image.dtype == "float16" else "float16"
    return b.emit("cast", b.input("x", image), dtype=other)[0]


def sum_of_two(b: GraphBuilder, image: TensorType) -> str:
    x = b.input("x", image)
    return b.emit("relu", b.emit("add", x, b.input("y", image))[0])[0]


CASES: tuple[tuple[str, str, Emit], ...] = (
    ("pool", "max 3x3", pool("max_pool2d", 3, 1)),
    ("pool", "max 3x3, stride 2", pool("max_pool2d", 3, 2)),
    ("pool", "max 3x3, stride 2, taps", pool("max_pool2d_taps", 3, 2)),
    ("pool", "average 3x3", pool("avg_pool2d", 3, 1)),
    ("pool_grad", "max 3x3, stride 2", pool_gradient),
    ("depthwise_conv", "3x3", depthwise(3, 1)),
    ("depthwise_conv", "3x3, stride 2", depthwise(3, 2)),
    ("depthwise_conv", "5x5", depthwise(5, 1)),
    ("concat", "of three", concatenation),
    ("batch_norm", "and ReLU", norm("batch_norm")),
    ("group_norm", "of 16", group_norm),
    ("cast", "", cast),
    ("pointwise", "add, ReLU", sum_of_two),
)


@dataclass(frozen=True)
class Row:
    family: str
    case: str
    shape: tuple[int, ...]
    dtype: str
    config: dict[str, Any]
    least_us: float  # to move its bytes
    estimate_us: float
    us: float

    @property
    def told(self) -> str:
        config = " ".join(f"{key}={value}" for key, value in self.config.items())
        images = "x".join(map(str, self.shape))
        return (
            f"{self.family:15} {self.case:24} {images:16} {self.dtype:8} {self.us:8.1f} us, "
            f"estimated {self.estimate_us:8.1f}, bytes {self.least_us:8.1f}  {config}"
        )


def step_of(emit: Emit, image: TensorType) -> Step:
    builder = GraphBuilder()
    made = emit(builder, image)
    graph = builder.build((made,) if isinstance(made, str) else made)
    return make_step(graph, [node.name for node in graph.nodes])


def median_us(timed: TimedStep, guess_us: float) -> float:
    """Of one of some launches in a CUDA graph."""
    calls = max(1, min(MOST_CALLS, int(REPLAYED_US / guess_us)))
    timed.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            timed.launch()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return statistics.median(times[1:])


def chosen(step: Step, family: str, space: SearchSpace, every: bool) -> list[Candidate]:
    """The candidate that estimates choose, or all."""
    legal = candidates(step, space, (family,))
    first = sorted(legal, key=partial(estimate_us, step, arch=space.arch))
    return first if every else first[:1]


def wanted(given: argparse.Namespace, space: SearchSpace) -> Iterator[tuple[str, Step, Candidate]]:
    for family, case, emit in CASES:
        if given.families and family not in given.families:
            continue
        for shape in SHAPES:
            for dtype in DTYPES:
                step = step_of(emit, TensorType(shape, dtype))
                for candidate in chosen(step, family, space, given.every):
                    yield case, step, candidate


def measured(found: Iterable[tuple[str, Step, Candidate]], space: SearchSpace) -> Iterator[Row]:
    known, data = None, {}
    for case, step, candidate in found:
        if step is not known:
            data = draw_inputs(step, torch.Generator("cuda").manual_seed(0))
            known = step
        timed = TimedStep(resolve(step, candidate), space.arch, data)
        guess = estimate_us(step, candidate, space.arch)
        us = median_us(timed, guess)
        type_ = step.nodes[0].types[0]
        image = max((t for _, t in step.inputs), key=lambda t: t.numel)
        shape = image.shape if candidate.family != "concat" else type_.shape
        least = step.traffic_bytes / COPIED_BYTES_PER_US
        config = dict(candidate.config)
        yield Row(candidate.family, case, shape, image.dtype, config, least, guess, us)


def table(rows: Iterable[Row]) -> str:
    """By family: what was measured as a part of what was estimated."""
    by_family: dict[str, list[float]] = {}
    for row in rows:
        by_family.setdefault(row.family, []).append(row.us / row.estimate_us)
    lines = ["| family | kernels | median | from | to |", "| --- | --- | --- | --- | --- |"]
    for family, parts in by_family.items():
        figures = (statistics.median(parts), min(parts), max(parts))
        told = " | ".join(f"{figure:.2f}" for figure in figures)
        lines.append(f"| {family} | {len(parts)} | {told} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--every", action="store_true", help="every config, not the first alone")
    parser.add_argument("--families", nargs="*", default=())
    given = parser.parse_args()
    device = torch.device("cuda", 0)
    space = load_search_space(arch_of(device))
    found = [*wanted(given, space)]
    build_all([resolve(step, candidate) for _, step, candidate in found], space.arch)
    rows = []
    for row in measured(found, space):
        rows.append(row)
        print(row.told, flush=True)
    print(table(rows))
    if given.json is not None:
        told = {"environment": environment_of(device).to_json(), "rows": [*map(asdict, rows)]}
        given.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
