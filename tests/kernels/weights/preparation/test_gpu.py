"""The kernel itself against torch, launched and replayed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from plantune.devices.machine import arch_of
from plantune.graph.builder import GraphBuilder
from plantune.graph.types import TensorType
from plantune.kernels.family import Frame
from plantune.kernels.patterns.derived import Derived, derived_values
from plantune.kernels.weights.constants import Arrangement, Constant, as_it_is, by_pixels
from plantune.kernels.weights.jobs import TURN
from plantune.kernels.weights.preparation import FEW_JOBS, MANY_JOBS, SOME_JOBS, Preparation
from plantune.space.arch import load_arch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Values = dict[str, Tensor]


class Counted(Preparation):
    """Counts the launches of its kernels."""

    def __init__(
        self,
        constants: list[Constant],
        sources: Values,
        derived: Mapping[str, Derived] | None = None,
    ) -> None:
        arch = load_arch(arch_of(torch.device("cuda", torch.cuda.current_device())))
        super().__init__(constants, sources, derived or {}, arch, CUDA)

    @property
    def tables(self) -> list[int]:
        """The jobs of each launch."""
        return [table.jobs.count for table in self._tables]

    @property
    def expressions(self) -> list[int]:
        """Of each job."""
        tables = [table.jobs for table in self._tables]
        return [job.expression for table in tables for job in table.jobs[: table.count]]

    @property
    def by_torch(self) -> int:
        return len(self._others)

    def run(self) -> None:
        self.launch(torch.cuda.current_stream().cuda_stream)


def spoil(constants: list[Constant]) -> None:
    for constant in constants:
        constant.memory.fill_(torch.nan)


def right(constants: list[Constant]) -> None:
    torch.cuda.synchronize()
    for constant in constants:
        wanted = constant.ordered().to(constant.memory.dtype).expand(constant.memory.shape)
        assert torch.equal(constant.memory, wanted)


def random_views(count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A value with any strides, and memory of the same shape with any order of axes."""
    rng = random.Random(seed)
    for _ in range(count):
        rank = rng.randint(0, 4)
        shape = tuple(rng.choice((1, 2, 3, 8, 17, 32)) for _ in range(rank))
        turn = rng.sample(range(rank), rank)
        back = [turn.index(axis) for axis in range(rank)]
        steps = [rng.choice((1, 1, 2, 3)) for _ in shape]
        broad = [rng.random() < 0.2 for _ in shape]
        sizes = [1 if b else n * step for n, step, b in zip(shape, steps, broad, strict=True)]
        whole = torch.randn([sizes[axis] for axis in turn], device=CUDA).to(rng.choice(DTYPES))
        cut = tuple(slice(None, None, step) for step in steps)
        turned = tuple(shape[axis] for axis in turn)
        memory = torch.empty(turned, dtype=rng.choice(DTYPES), device=CUDA).permute(back)
        yield whole.permute(back)[cut].expand(shape), memory


def constants_for(count: int, seed: int = 0) -> tuple[Values, list[Constant]]:
    pairs = list(random_views(count, seed))
    values = {f"w{i}": value for i, (value, _) in enumerate(pairs)}
    return values, [
        Constant(values, f"w{i}", memory, as_it_is) for i, (_, memory) in enumerate(pairs)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_random_strides(seed):
    values, constants = constants_for(150, seed)
    preparation = Counted(constants, values)
    preparation.place()
    spoil(constants)
    preparation.run()
    assert (preparation.tables, preparation.by_torch) == ([150], 0)
    right(constants)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_large_filter(layout, dtype):
    weight = torch.randn(512, 512, 3, 3, device=CUDA).to(dtype).contiguous(memory_format=layout)
    values = {"w": weight}
    constants = [
        Constant(values, "w", torch.empty(512, 3, 3, 512, dtype=to, device=CUDA), by_pixels)
        for to in DTYPES
    ]
    preparation = Counted(constants, values)
    preparation.place()
    spoil(constants)
    preparation.run()
    assert preparation.tables == [3]
    turns = layout == torch.contiguous_format and dtype != torch.float32
    assert preparation.expressions.count(TURN) == turns
    right(constants)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_planes(layout):
    """As torch makes them."""
    weight = torch.randn(72, 40, 3, 3, device=CUDA).contiguous(memory_format=layout)
    values = {"w": weight}
    how = Arrangement((72, 3, 3, 40), torch.bfloat16, by_pixels, planes=3)
    constant = how.of("w", Frame(values, device=CUDA))
    preparation = Counted([constant], values)
    preparation.place()
    spoil([constant])
    preparation.run()
    assert preparation.by_torch == 0
    made = constant.memory.clone()
    constant.fill()
    assert torch.equal(constant.memory, made)
    assert torch.equal(made.double().sum(0), constant.ordered().double())


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("taps", [(1, 2), (3, 3), (5, 5), (7, 7), (11, 11), (16, 18)], ids=str)
def test_filters_turn_by_whole_words(taps, dtype):
    """As many channels as a block takes, more, and fewer in the last block; others among them."""
    values: Values = {}
    constants = []
    for channels in (8, 24, 64, 256, 264, 520):
        name, shape = f"w{channels}", (3, channels, *taps)
        values[name] = torch.randn(shape, device=CUDA).to(dtype)
        memory = torch.empty(3, *taps, channels, dtype=dtype, device=CUDA)
        constants.append(Constant(values, name, memory, by_pixels))
        values[f"b{channels}"] = torch.randn(channels, device=CUDA)
        room = torch.empty(channels, dtype=dtype, device=CUDA)
        constants.append(Constant(values, f"b{channels}", room))
    preparation = Counted(constants, values)
    preparation.place()
    assert preparation.expressions.count(TURN) == 6
    spoil(constants)
    preparation.run()
    right(constants)


def padded(weight: Tensor) -> Tensor:
    """With other sizes and in an order of its own."""
    wide = weight.new_zeros(72, 3, 3, 16)
    wide[:70, :, :, :10] = weight.permute(0, 2, 3, 1)
    return wide.view(9, 8, 9, 16).permute(2, 0, 3, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [slice(None), slice(3, 73), slice(0, 140, 2)])
def test_packs(cut, dtype):
    count = 70 if cut == slice(None) else 140
    values = {"w": torch.randn(count, 10, 3, 3, device=CUDA).to(dtype)[cut]}
    memory = torch.empty(9, 9, 16, 8, dtype=torch.float16, device=CUDA)
    constants = [Constant(values, "w", memory, padded, packs=True)]
    preparation = Counted(constants, values)
    preparation.place()
    spoil(constants)
    preparation.run()
    assert preparation.tables == [1]
    right(constants)


def test_what_a_replay_finds_is_what_it_fills():
    values, constants = constants_for(60)
    values["odd"] = torch.randn(8, device=CUDA).double()  # by torch
    constants.append(Constant(values, "odd", torch.empty(8, device=CUDA)))
    preparation = Counted(constants, values)
    preparation.place()
    preparation.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        preparation.run()
    assert preparation.by_torch == 1
    for turn in range(3):
        for value in values.values():
            value.copy_(torch.randn_like(value) * (turn + 1)) if not overlaps(value) else None
        spoil(constants)
        graph.replay()
        right(constants)


def overlaps(value: Tensor) -> bool:
    """Whether it was expanded, so that torch writes nothing into it."""
    return any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True))


@pytest.mark.parametrize(
    ("count", "tables"),
    [
        (FEW_JOBS, [FEW_JOBS]),
        (FEW_JOBS + 1, [FEW_JOBS + 1]),
        (SOME_JOBS + 1, [SOME_JOBS + 1]),
        (MANY_JOBS + 5, [MANY_JOBS, 5]),
        (2 * MANY_JOBS + FEW_JOBS + 1, [MANY_JOBS, MANY_JOBS, FEW_JOBS + 1]),
    ],
)
def test_more_jobs_than_a_table_holds_take_more_launches(count, tables):
    """With a driver of CUDA 12.1 or later."""
    values, constants = constants_for(count)
    preparation = Counted(constants, values)
    preparation.place()
    spoil(constants)
    preparation.run()
    assert preparation.tables == tables
    right(constants)


def test_what_orders_is_captured_without_a_kernel_that_was_loaded_before():
    preparation = Counted([], {})
    preparation.place()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        preparation.launch(torch.cuda.current_stream().cuda_stream, orders=True)
    graph.replay()
    torch.cuda.synchronize()


def test_empty_values_beside_others():
    values = {"none": torch.empty(0, 4, device=CUDA), "a": torch.randn(9, device=CUDA)}
    constants = [
        Constant(values, "none", torch.empty(0, 4, device=CUDA), as_it_is),
        Constant(values, "a", torch.empty(9, device=CUDA).half()),
        Constant(values, "none", torch.empty(0, 4, device=CUDA), as_it_is, packs=True),
    ]
    preparation = Counted(constants, values)
    preparation.place()
    preparation.run()
    right(constants)


def test_all_that_fits_into_no_job_is_filled_by_torch_in_a_graph_too():
    five = torch.randn(2, 3, 2, 3, 2, 2, device=CUDA)[..., 0].permute(4, 2, 0, 3, 1)
    values = {"five": five, "double": torch.randn(5, device=CUDA).double()}
    constants = [
        Constant(values, "five", torch.empty(five.shape, device=CUDA), as_it_is),
        Constant(values, "double", torch.empty(5, device=CUDA)),
    ]
    preparation = Counted(constants, values)
    preparation.place()
    assert (preparation.tables, preparation.by_torch) == ([], 2)
    preparation.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        preparation.run()
    for value in values.values():
        value.mul_(3)
    graph.replay()
    right(constants)


Emit = Callable[[GraphBuilder, str], tuple[str, ...]]


def batch_norm(b: GraphBuilder, dtype: str) -> tuple[str, ...]:
    gamma, beta, mean, variance = (
        b.parameter(name, TensorType((96,), dtype)) for name in ("g", "b", "m", "v")
    )
    (root,) = b.emit("rsqrt", variance, eps=1e-5)
    (scale,) = b.emit("mul", gamma, root)
    (moved,) = b.emit("mul", mean, scale)
    return (scale, *b.emit("sub", beta, moved))


def scaled_filter(b: GraphBuilder, dtype: str) -> tuple[str, ...]:
    weight = b.parameter("w", TensorType((24, 16, 3, 3), dtype))
    gain = b.parameter("g", TensorType((24, 1, 1, 1), dtype))
    (gate,) = b.emit("sigmoid", gain)
    return b.emit("mul", weight, gate)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("emit", [batch_norm, scaled_filter], ids=lambda emit: emit.__name__)
def test_derived_values_against_float64(emit, dtype):
    """Replayed with other weights; the filter in channels_last and in another order."""
    builder = GraphBuilder()
    graph = builder.build(emit(builder, dtype))
    weights = {n: (torch.rand(t.shape) + 0.5).to(t.torch_dtype) for n, t in graph.parameters}
    if "w" in weights:
        weights["w"] = weights["w"].contiguous(memory_format=torch.channels_last)
    weights = {name: tensor.to(CUDA) for name, tensor in weights.items()}
    orders = {name: by_pixels if len(graph.types[name].shape) == 4 else as_it_is
              for name in graph.outputs}  # fmt: skip
    constants = [
        Constant({}, name, memory_of(order, graph.types[name].shape), order)
        for name, order in orders.items()
    ]
    preparation = Counted(constants, weights, derived_values(graph))
    preparation.place()
    assert (preparation.tables, preparation.by_torch) == ([len(constants)], 0)
    preparation.run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        preparation.run()
    for weight in weights.values():
        weight.mul_(1.25)
    spoil(constants)
    captured.replay()
    known = {name: tensor.double() for name, tensor in weights.items()}
    for node in graph.nodes:
        made = node.evaluate([known[name] for name in node.inputs], torch.float64)
        known.update(zip(node.outputs, made, strict=True))
    for constant in constants:
        wanted = constant.order(known[constant.name])
        torch.testing.assert_close(constant.memory.double(), wanted, rtol=2e-6, atol=2e-6)


def memory_of(order: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.empty(order(torch.empty(shape)).shape, device=CUDA)
