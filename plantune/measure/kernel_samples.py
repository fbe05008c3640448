"""A cheap kernel of each CUDA family, to see whether they compile here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from plantune.base.canonical import canonical
from plantune.graph import Graph, Step, TensorType
from plantune.graph.builder import GraphBuilder
from plantune.graph.fusions import all_fusions
from plantune.graph.ops.overload import CONCAT, MATMUL, SOFTMAX
from plantune.graph.partition import alternatives
from plantune.graph.passes.differentiate import differentiate
from plantune.kernels.cuda.cuda_family import CudaFamily
from plantune.kernels.family import Candidate
from plantune.kernels.registry import all_families, candidates, estimate_us
from plantune.space.search_space import SearchSpace

# Every family has a step in one of these, or in the layers of other people's networks.
NETWORKS = (("se_resnet9_fixup", "infer"), ("resnet18", "infer"), ("se_resnet9_fixup", "train"))
CHANNELS, GROUPS, HIDDEN = 32, (32, 4), 128


def samples(space: SearchSpace) -> Iterator[tuple[Step, Candidate]]:
    """For each CUDA family of an arch its smallest step, with the config that is guessed best."""
    for name, family in all_families().items():
        if isinstance(family, CudaFamily) and name in space.families:
            found = _sample(family, space)
            if found is not None:
                yield found


def _sample(family: CudaFamily[Any], space: SearchSpace) -> tuple[Step, Candidate] | None:
    fits = (step for step in _steps(space.arch.name) if family.why_not_step(step) is None)
    for step in sorted(fits, key=lambda step: (len(step.nodes), step.flops)):
        legal = [c for c in candidates(step, space) if c.family == family.name]
        if legal:
            return step, min(legal, key=lambda c: estimate_us(step, c, space.arch))
    return None


@cache
def _steps(arch: str) -> tuple[Step, ...]:
    from plantune.plans.workload import Workload

    workloads = (Workload(name, 1, 3, mode, "float16", arch) for name, mode in NETWORKS)
    others = (_other_layers(), _of_float32(), _translation(), _sequences())
    graphs = (*(workload.graph for workload in workloads), *others)
    fusions = tuple(all_fusions())
    return tuple(step for graph in graphs for step in alternatives(graph, fusions))


def _translation() -> Graph:
    from plantune.graph.tracing.extract import extract
    from plantune.models.gru_translator import Sizes, gru_translator

    sizes = Sizes(source_words=8, target_words=8, embedding=128, hidden=256)
    return extract(gru_translator(sizes).eval(), TensorType((1, 1), "int64"))


def _sequences() -> Graph:
    """Recurrent layers, and their gradients."""
    builder, made = GraphBuilder(), []
    for name, gates, states in (("gru_scan", 3, 1), ("lstm_scan", 4, 2)):
        width, types = gates * HIDDEN, [TensorType((1, HIDDEN), "float16")] * states
        inputs = [TensorType((2, 1, width), "float16"), *types]
        given = [builder.input(f"{name} {at}", type_) for at, type_ in enumerate(inputs)]
        for shape in ((width, HIDDEN), (width,)):
            parameter = f"{name} {len(shape)}d"
            given.append(builder.parameter(parameter, TensorType(shape, "float16")))
        made.append(builder.emit(name, *given, resets=0)[0])
    return differentiate(builder.build(tuple(made)))


def _other_layers() -> Graph:
    builder = GraphBuilder()
    image = builder.input("x", TensorType((1, CHANNELS, 8, 8), "float16"))
    geometry: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    for groups in GROUPS:
        type_ = TensorType((CHANNELS, CHANNELS // groups, 3, 3), "float16")
        weight = builder.parameter(f"weight of {groups}", type_)
        (image,) = builder.emit("conv2d", image, weight, **geometry, groups=groups)
    image = _residual_block(builder, image, {**geometry, "groups": 1})
    before = image
    image, *moments = builder.emit("group_norm", image, groups=4, eps=1e-5)
    norm_of_groups: dict[str, Any] = {"groups": 4, "eps": 1e-5, "affine": 0}
    image = builder.emit("group_norm_grad", image, before, *moments, **norm_of_groups)[0]
    joined = canonical({"tensors": [{"tensor": 0}, {"tensor": 0}], "dim": 1})
    image = builder.emit(CONCAT, image, arguments=joined)[0]
    along = canonical({"self": {"tensor": 0}, "dim": -1})
    image = builder.emit(SOFTMAX, image, arguments=along)[0]
    rows, *statistics = builder.emit("layer_norm", image, axes=1, eps=1e-5)
    (dx,) = builder.emit("layer_norm_grad", rows, image, *statistics, axes=1, eps=1e-5, affine=0)
    return builder.build((rows, dx, _attention(builder), *_batch_norm(builder, rows)))


def _of_float32() -> Graph:
    """Convolutions of an image that is cast to float32, and their gradients."""
    builder = GraphBuilder()
    image = builder.input("x", TensorType((1, HIDDEN, 8, 8), "float16"))
    (image,) = builder.emit("cast", image, dtype="float32")
    geometry: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    for name in ("first", "second"):
        weight = builder.parameter(f"{name} weight", TensorType((HIDDEN, HIDDEN, 3, 3)))
        (image,) = builder.emit("conv2d", image, weight, **geometry, groups=1)
    return differentiate(builder.build((image,)))


def _residual_block(builder: GraphBuilder, image: str, geometry: dict[str, Any]) -> str:
    made = image
    for name in ("first", "second"):
        type_ = TensorType((CHANNELS, CHANNELS, 3, 3), "float16")
        weight = builder.parameter(f"{name} weight", type_)
        (made,) = builder.emit("relu", made)
        (made,) = builder.emit("conv2d", made, weight, **geometry)
    return builder.emit("add", image, made)[0]


def _attention(builder: GraphBuilder) -> str:
    """Attention of one head, whose queries, keys and values are the same; its rows are windows."""
    heads = builder.input("heads", TensorType((1, 1, 16, HIDDEN // 2), "float16"))
    product = canonical({"self": {"tensor": 0}, "other": {"tensor": 1}})
    (keys,) = builder.emit("permute", heads, dims=(0, 1, 3, 2))
    (scores,) = builder.emit(MATMUL, heads, keys, arguments=product)
    along = canonical({"self": {"tensor": 0}, "dim": -1})
    (weights,) = builder.emit(SOFTMAX, scores, arguments=along)
    (read,) = builder.emit(MATMUL, weights, heads, arguments=product)
    (windows,) = builder.emit("reshape", read, shape=(1, 2, 2, 2, 2, HIDDEN // 2))
    (image,) = builder.emit("permute", windows, dims=(0, 1, 3, 2, 4, 5))
    return builder.emit("reshape", image, shape=(1, 4, 4, HIDDEN // 2))[0]


def _batch_norm(builder: GraphBuilder, image: str) -> tuple[str, ...]:
    """A batch norm in training, and its gradients."""
    channels = builder.types[image].shape[1]
    weight, bias, mean, var = (
        builder.parameter(name, TensorType((channels,), "float16"))
        for name in ("weight", "bias", "mean", "var")
    )
    y, *statistics = builder.emit(
        "batch_norm", image, weight, bias, mean, var, eps=1e-5, momentum=0.1
    )
    return y, *builder.emit("batch_norm_grad", y, image, weight, *statistics[:2])
