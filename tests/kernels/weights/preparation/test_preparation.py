"""One launch for all constants: its jobs, what torch does, and what follows from weights."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from plantune.devices.cuda.build import compile_cuda
from plantune.graph.graph import Graph
from plantune.kernels.patterns.derived import derived_values
from plantune.kernels.weights import jobs as jobs_module
from plantune.kernels.weights.constants import (
    Constant,
    Room,
    as_it_is,
    by_pixels,
    flat,
)
from plantune.kernels.weights.jobs import SPLIT, Job, table_of
from plantune.kernels.weights.preparation import FEW_JOBS, MANY_JOBS, SOME_JOBS, Preparation, source
from plantune.plans.workload import Workload
from plantune.space.arch import load_arch

CPU = torch.device("cpu")
DTYPES = ["float16", "bfloat16", "float32"]


def batch_norms(builder_of, dtype: str, channels: tuple[int, ...] = (8, 40)) -> Graph:
    """What each batch norm scales by and adds: four tensors and a number."""

    def emit(b):
        results = []
        for c in channels:
            gamma, beta, mean, variance = (b.w(c) for _ in range(4))
            scale = b("mul", gamma, b("rsqrt", variance, eps=1e-5))
            results += [scale, b("sub", beta, b("mul", mean, scale))]
        return tuple(results)

    return builder_of(emit, dtype)


@pytest.fixture
def builder_of(step_of):
    """A graph of what `emit` adds."""

    def make(emit, dtype: str) -> Graph:
        step = step_of(emit, dtype)
        outputs = tuple(name for name, _ in step.outputs)
        return Graph((), step.inputs, (), step.nodes, outputs)

    return make


def weights_of(graph: Graph) -> dict[str, Tensor]:
    return {
        name: (torch.rand(type_.shape) + 0.5).to(type_.torch_dtype)
        for name, type_ in graph.parameters
    }


def wanted(graph: Graph, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each result in float64."""
    known = {name: tensor.double() for name, tensor in weights.items()}
    for node in graph.nodes:
        known |= zip(
            node.outputs,
            node.evaluate([known[name] for name in node.inputs], torch.float64),
            strict=True,
        )
    return {name: known[name] for name in graph.outputs}


def close(constant: Constant, right: Tensor) -> None:
    """One rounding beside float32."""
    error = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}
    torch.testing.assert_close(
        constant.memory.double(), right, rtol=error[constant.memory.dtype], atol=1e-6
    )


@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_of_batch_norms_take_one_launch(emulated, builder_of, dtype, to):
    graph = batch_norms(builder_of, dtype)
    weights, derived = weights_of(graph), derived_values(graph)
    constants = [
        Constant({}, name, torch.empty(graph.types[name].shape, dtype=to)) for name in graph.outputs
    ]
    preparation = emulated(constants, weights, derived)
    preparation.fill()
    assert (preparation.launched, preparation.by_torch) == ([4], 0)
    for constant in constants:
        close(constant, wanted(graph, weights)[constant.name])
    for weight in weights.values():
        weight.mul_(1.5)
    preparation.launch(0)
    for constant in constants:
        close(constant, wanted(graph, weights)[constant.name])


def test_all_batch_norms_of_a_network_take_one_launch(emulated):
    graph = Workload("resnet18", 8, 3, "infer", "float16", "sm90").graph
    weights = {
        name: (torch.rand(type_.shape) + 0.5).to(type_.torch_dtype)
        for name, type_ in (*graph.parameters, *graph.buffers)
    }
    derived = derived_values(graph)
    constants = [Constant({}, name, torch.empty(graph.types[name].numel), flat) for name in derived]
    preparation = emulated(constants, weights, derived)
    preparation.fill()
    assert (preparation.launched, preparation.by_torch) == ([len(derived)], 0)
    known = {name: tensor.double() for name, tensor in weights.items()}
    for node in graph.nodes:
        if node.name in derived:
            made = node.evaluate([known[name] for name in node.inputs], torch.float64)
            known.update(zip(node.outputs, made, strict=True))
    for constant in constants:
        close(constant, known[constant.name].flatten())


def test_equal_arithmetic_is_compiled_once(emulated, builder_of):
    graph = batch_norms(builder_of, "float16", (8, 40, 8))
    preparation = emulated([], weights_of(graph), derived_values(graph))
    # What is rsqrt(variance), scale, mean * scale, and what is added.
    assert len(preparation._expressions) == 4


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_filter_that_is_scaled_is_derived_in_any_order(emulated, builder_of, layout):
    graph = builder_of(lambda b: b("mul", b.w(6, 4, 3, 3), b.w(6, 1, 1, 1)), "float16")
    weights = weights_of(graph)
    weights["w0"] = weights["w0"].contiguous(memory_format=layout)
    constant = Constant({}, "mul", torch.empty(6, 3, 3, 4).half(), by_pixels)
    preparation = emulated([constant], weights, derived_values(graph))
    preparation.fill()
    assert preparation.by_torch == 0
    close(constant, wanted(graph, weights)["mul"].permute(0, 2, 3, 1))


def test_a_filter_of_which_each_element_is_changed_is_not_merely_turned(emulated, builder_of):
    graph = builder_of(lambda b: b("affine", b.w(6, 8, 3, 3), alpha=2.0, beta=1.0), "float16")
    weights = weights_of(graph)
    constant = Constant({}, "affine", torch.empty(6, 3, 3, 8).half(), by_pixels)
    preparation = emulated([constant], weights, derived_values(graph))
    preparation.fill()
    assert preparation.by_torch == 0
    close(constant, wanted(graph, weights)["affine"].permute(0, 2, 3, 1))


@pytest.mark.parametrize("by", ["kernel", "torch"])
def test_a_derived_value_may_be_packed(emulated, builder_of, by):
    """Torch computes it first: the kernel packs what is in one tensor."""
    graph = builder_of(lambda b: b("mul", b.w(6, 4), b.w(1)), "float16")
    weights, derived = weights_of(graph), derived_values(graph)

    def order(weight: Tensor) -> Tensor:
        wide = weight.new_zeros(8, 8)
        wide[:6, :4] = weight
        return wide.t()

    constant = Constant({}, "mul", torch.empty(8, 8).half(), order, packs=True)
    preparation = (
        emulated([constant], weights, derived)
        if by == "kernel"
        else Preparation([constant], weights, derived, load_arch("sm90"), CPU)
    )
    preparation.place()
    preparation.launch(0)
    close(constant, order(wanted(graph, weights)["mul"]))


def test_without_a_gpu_torch_computes_what_is_derived(builder_of):
    graph = batch_norms(builder_of, "bfloat16")
    weights = weights_of(graph)
    constants = [Constant({}, name, torch.empty(graph.types[name].shape)) for name in graph.outputs]
    preparation = Preparation(constants, weights, derived_values(graph), load_arch("sm90"), CPU)
    preparation.place()
    preparation.launch(0)
    for constant in constants:
        close(constant, wanted(graph, weights)[constant.name])


def test_torch_fills_after_the_kernel(emulated, builder_of):
    """What it reads may be what the kernel made."""
    graph = builder_of(lambda b: b("mul", b.w(6), b.w(1)), "float32")
    weights, values = weights_of(graph), {"mul": torch.zeros(6)}

    class ByTorch(Constant):
        by_torch = True

    kept = Constant(values, "mul", values["mul"], as_it_is)
    last = ByTorch(values, "mul", torch.empty(6))
    preparation = emulated([last, kept], weights, derived_values(graph))
    preparation.fill()
    assert preparation.by_torch == 1
    close(last, wanted(graph, weights)["mul"])


def test_what_is_read_in_place_is_not_a_job(emulated):
    values = {"a": torch.randn(8).half(), "b": torch.randn(8).half()}
    read = Constant(values, "a", Room((8,), torch.float16, CPU), as_it_is, in_place=True)
    copied = Constant(values, "b", torch.empty(8))
    preparation = emulated([read, copied], values)
    preparation.fill()
    assert (len(preparation.jobs), preparation.launches, preparation.moved_bytes) == (1, 1, 32)
    assert isinstance(read._memory, Room)
    values["a"] = torch.randn(16).half()[::2]
    preparation.fill()
    assert (len(preparation.jobs), preparation.moved_bytes) == (2, 48)
    assert torch.equal(read.tensor, values["a"])


def test_nothing_to_fill_launches_nothing_unless_it_orders(emulated):
    preparation = emulated([], {})
    preparation.place()
    preparation._fence.fill_(1)
    preparation.launch(0)
    assert preparation._fence == 1
    preparation.launch(0, orders=True)
    assert preparation._fence == 0
    assert preparation.launched == []  # a kernel that has to be loaded breaks a capture


def test_one_launch_orders(emulated):
    values = {"a": torch.randn(8)}
    preparation = emulated([Constant(values, "a", torch.empty(8))], values)
    preparation.place()
    preparation.launch(0, orders=True)
    assert preparation.launched == [1]


@pytest.mark.parametrize(
    ("count", "most", "launched"),
    [
        (FEW_JOBS, MANY_JOBS, [FEW_JOBS]),
        (FEW_JOBS + 1, MANY_JOBS, [FEW_JOBS + 1]),
        (SOME_JOBS + 1, MANY_JOBS, [SOME_JOBS + 1]),
        (FEW_JOBS + 1, FEW_JOBS, [FEW_JOBS, 1]),
        (2 * MANY_JOBS + 3, MANY_JOBS, [MANY_JOBS, MANY_JOBS, 3]),
    ],
)
def test_more_jobs_than_a_table_holds_take_more_launches(emulated, count, most, launched):
    values = {f"w{i}": torch.randn(i % 7 + 1) for i in range(count)}
    constants = [Constant(values, name, torch.empty(v.shape).half()) for name, v in values.items()]
    preparation = emulated(constants, values, most=most)
    preparation.fill()
    assert preparation.launched == launched
    sizes = [table.size for table in preparation._tables]
    for jobs, size in zip(launched, sizes, strict=True):
        assert size == min(n for n in (FEW_JOBS, SOME_JOBS, MANY_JOBS) if n >= jobs)
    for constant in constants:
        assert torch.equal(constant.memory, values[constant.name].half())


@pytest.mark.parametrize(
    "make",
    [
        lambda: (torch.randn(4).double(), torch.empty(4), {}),
        lambda: (torch.randn(4), torch.empty(4).double(), {}),
        lambda: (torch.arange(4), torch.empty(4), {}),
        lambda: (torch.randn(4).double(), torch.empty(4).half(), {"packs": True}),
        lambda: (torch.randn(4), torch.empty(8)[::2], {"packs": True}),
    ],
)
def test_other_dtypes_and_places_are_left_to_torch(emulated, make):
    value, memory, options = make()
    values = {"w": value}
    preparation = emulated([Constant(values, "w", memory, flat, **options)], values)
    preparation.fill()
    assert preparation.by_torch == 1
    assert torch.equal(memory, value.to(memory.dtype))


def test_an_order_that_copies_is_done_again_in_each_pass(emulated):
    """A job would read the copy that was made when it was placed."""
    values = {"w": torch.randn(4, 6).t()}
    preparation = emulated([Constant(values, "w", memory := torch.empty(24))], values)
    preparation.fill()
    values["w"].mul_(2)
    preparation.launch(0)
    assert torch.equal(memory, values["w"].flatten())


def test_more_expressions_than_a_byte_counts_are_left_to_torch(emulated, builder_of):
    """Numbers from 253 on say that a job splits, turns or packs."""

    def emit(b):
        w = b.w(8)
        return tuple(b("affine", w, alpha=1.0 + i, beta=0.0) for i in range(SPLIT + 3))

    graph = builder_of(emit, "float32")
    weights = weights_of(graph)
    constants = [Constant({}, name, torch.empty(8)) for name in graph.outputs]
    preparation = emulated(constants, weights, derived_values(graph))
    preparation.fill()
    assert preparation.by_torch == 4
    for constant in constants:
        close(constant, wanted(graph, weights)[constant.name])


def test_weights_that_moved_are_found_by_placing_again(emulated):
    values = {"a": torch.randn(8), "p": torch.randn(8)}
    constants = [
        Constant(values, "a", torch.empty(8).half()),
        Constant(values, "p", torch.empty(2, 8).half(), lambda w: torch.stack([w, w]), packs=True),
    ]
    preparation = emulated(constants, values)
    preparation.fill()
    for name in values:
        values[name] = torch.randn(16)[::2]
    preparation.fill()
    assert torch.equal(constants[0].memory, values["a"].half())
    assert torch.equal(constants[1].memory, values["p"].half().expand(2, 8))


LAYOUT = """
using plantune::Job;
static_assert(sizeof(Job) == {size} && alignof(Job) == {alignment}, "");
{fields}
static_assert(sizeof(plantune::JobTable<{few}>) == {few_bytes}, "");
static_assert(sizeof(plantune::JobTable<{many}>) == {many_bytes}, "");
static_assert({jobs_place} == {jobs_at}, "");
static_assert(plantune::kPrepareThreads == {threads} && plantune::kPrepareChunk == {chunk}, "");
static_assert(plantune::kPack == {pack} && plantune::kJobInputs == {inputs}, "");
static_assert(plantune::kTurn == {turn} && plantune::kTurned == {turned}, "");
static_assert({first_blocks_place} == {first_blocks_at}, "");
static_assert({singles_place} == {singles_at}, "");
static_assert(plantune::kJobAxes == {axes}, "");
static_assert(plantune::kFloat32 == 0 && plantune::kFloat16 == 1 && plantune::kBfloat16 == 2, "");
"""


def place(struct: str, member: str) -> str:
    """What `offsetof` is, which NVRTC has only beside other headers."""
    return f"__INTADDR__(&(({struct}*)0)->{member})"


def test_structs_are_those_of_the_header():
    names = {"inputs_at": "in"}
    fields = "\n".join(
        f"static_assert({place('Job', names.get(name, name))} == {getattr(Job, name).offset} && "
        f'sizeof(Job::{names.get(name, name)}) == {getattr(Job, name).size}, "");'
        for name, _ in Job._fields_
    )
    few, many = (table_of([], size).jobs for size in (FEW_JOBS, MANY_JOBS))
    text = LAYOUT.format(
        size=ctypes.sizeof(Job),
        alignment=ctypes.alignment(Job),
        fields=fields,
        few=FEW_JOBS,
        many=MANY_JOBS,
        few_bytes=ctypes.sizeof(few),
        many_bytes=ctypes.sizeof(many),
        jobs_place=place(f"plantune::JobTable<{MANY_JOBS}>", "jobs"),
        first_blocks_place=place(f"plantune::JobTable<{MANY_JOBS}>", "first_blocks"),
        first_blocks_at=type(many).first_blocks.offset,
        singles_place=place(f"plantune::JobTable<{MANY_JOBS}>", "singles"),
        singles_at=type(many).singles.offset,
        jobs_at=type(many).jobs.offset,
        **{name: getattr(jobs_module, name.upper()) for name in WORDS},
    )
    compile_cuda(source((), FEW_JOBS) + text, load_arch("sm90"))


WORDS = ("threads", "chunk", "pack", "turn", "turned", "inputs", "axes")


def test_a_table_fits_into_the_arguments_of_a_launch():
    few, many = (ctypes.sizeof(table_of([], size).jobs) for size in (FEW_JOBS, MANY_JOBS))
    assert few <= 4096
    assert many <= 32764
