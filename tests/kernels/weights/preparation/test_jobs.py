"""Jobs that fill constants: every stride, dtype and size, against torch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from plantune.kernels.weights.constants import Constant, as_it_is, by_pixels, flat
from plantune.kernels.weights.jobs import (
    AXES,
    CHUNK,
    COUNT_MAX,
    TURN,
    Job,
    extent_of,
    job_of,
    table_of,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = [torch.float16, torch.bfloat16]


def aligned(shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def filter_(*sizes: int) -> Tensor:
    return torch.randn(sizes)


LAYOUTS = {
    "nchw": lambda: filter_(6, 10, 3, 3),
    "channels_last": lambda: filter_(6, 10, 3, 3).contiguous(memory_format=torch.channels_last),
    "turned": lambda: filter_(10, 6, 3, 3).transpose(0, 1),
    "part": lambda: filter_(9, 13, 5, 4)[2:8, 1:11, :3, :3],
    "stepped": lambda: filter_(12, 20, 3, 6)[::2, ::2, :, ::2],
    "expanded": lambda: filter_(1, 10, 3, 3).expand(6, 10, 3, 3),
    "with an offset": lambda: filter_(1 + 540)[1:].view(6, 10, 3, 3),
}
KINDS = list(LAYOUTS)


def strided(kind: str, dtype: torch.dtype) -> Tensor:
    """A filter of 6x10x3x3 with one of many kinds of strides."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = LAYOUTS[kind]()
    whole = torch.empty(0, dtype=found.dtype).set_(found.untyped_storage()).to(dtype)
    return whole.as_strided(found.shape, found.stride(), found.storage_offset())


def filled(emulated: type, source: Tensor, memory: Tensor, order=as_it_is, **options: bool):
    """Fills memory from a value by one job, and holds it against torch."""
    values = {"w": source}
    preparation = emulated([Constant(values, "w", memory, order, **options)], values)
    preparation.fill()
    assert torch.equal(memory, order(source).to(memory.dtype).expand(memory.shape))
    return preparation


@pytest.mark.parametrize("to", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_filter_is_filled_whatever_its_strides(emulated, kind, dtype, to):
    preparation = filled(emulated, strided(kind, dtype), aligned((6, 3, 3, 10), to), by_pixels)
    assert preparation.by_torch == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_a_filter_is_packed_whatever_its_strides(emulated, kind, dtype):
    """Padded with zeros, and in an order of its own."""

    def order(weight: Tensor) -> Tensor:
        wide = weight.new_zeros(8, 3, 3, 16)
        wide[:6, :, :, :10] = weight.permute(0, 2, 3, 1)
        return wide.view(2, 4, 9, 16).permute(3, 0, 2, 1)

    memory = aligned((16, 2, 9, 4), dtype)
    preparation = filled(emulated, strided(kind, dtype), memory, order, packs=True)
    assert preparation.by_torch == 0
    assert memory.count_nonzero() == strided(kind, dtype).count_nonzero()


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((6, 16, 3, 3), 6),
        ((6, 8, 1, 2), 6),
        ((3, 256, 3, 3), 3),
        ((3, 264, 3, 3), 6),
        ((3, 1000, 3, 3), 12),
        ((2, 72, 17, 16), 18),  # 8 channels of 272 taps at once
        ((2, 512, 2, 1), 2),
    ],
    ids=str,
)
def test_filters_turn_by_whole_words(emulated, shape, blocks, dtype):
    o, c, r, s = shape
    preparation = filled(
        emulated, torch.randn(shape).to(dtype), aligned((o, r, s, c), dtype), by_pixels
    )
    (job,) = preparation.jobs
    assert (job.expression, preparation._tables[0].blocks) == (TURN, blocks)


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(6, 12, 3, 3).half(),  # no whole words of channels
        torch.randn(6, 16, 3, 3),
        torch.randn(6, 16, 17, 17).half(),  # too many taps
        torch.randn(1 + 864).half()[1:].view(6, 16, 3, 3),
        torch.randn(6, 16, 3, 4).half()[..., :3],
        torch.randn(6, 16, 3, 3).half().transpose(2, 3),
        torch.randn(1, 16, 3, 3).half(),
        torch.randn(6, 16, 1, 1).half(),
        torch.randn(1, 16, 3, 3).half().expand(6, 16, 3, 3),
    ],
    ids=lambda weight: f"{tuple(weight.shape)} {weight.stride()} {weight.dtype}",
)
def test_other_filters_do_not_turn(emulated, weight):
    o, c, r, s = weight.shape
    preparation = filled(emulated, weight, aligned((o, r, s, c), weight.dtype), by_pixels)
    assert [job.expression for job in preparation.jobs] == [0]


def test_a_filter_that_turns_is_not_rounded(emulated):
    weight = torch.randn(6, 16, 3, 3).half()
    preparation = filled(emulated, weight, aligned((6, 3, 3, 16), torch.bfloat16), by_pixels)
    assert preparation.jobs[0].expression == 0


def test_turning_jobs_stand_among_others(emulated):
    """Each counts its blocks in a way of its own."""
    rng = random.Random(1)
    shapes = [(rng.randint(2, 5), 8 * rng.randint(1, 40), 3, 3) for _ in range(6)]
    values: dict[str, Tensor] = {}
    constants = []
    for i, (o, c, r, s) in enumerate(shapes):
        values[f"w{i}"], values[f"b{i}"] = torch.randn(o, c, r, s).half(), torch.randn(c)
        constants.append(Constant(values, f"w{i}", aligned((o, r, s, c)), by_pixels))
        constants.append(Constant(values, f"b{i}", torch.empty(c), flat))
    preparation = emulated(constants, values)
    preparation.fill()
    assert {job.expression for job in preparation.jobs} == {0, TURN}
    for constant in constants:
        assert torch.equal(constant.memory, constant.ordered())


@pytest.mark.parametrize("to", DTYPES, ids=str)
def test_a_scalar_becomes_one_of_every_channel(emulated, to):
    filled(emulated, torch.randn(1), aligned((37,), to), flat)
    filled(emulated, torch.randn(()), aligned((37,), to), flat)


@pytest.mark.parametrize(
    ("memory", "width"),
    [
        (torch.empty(64).half(), 8),
        (torch.empty(64).bfloat16(), 8),
        (torch.empty(64), 4),
        (torch.empty(60).half(), 1),
        (torch.empty(60), 4),
        (torch.empty(62), 1),
        (torch.empty(65).half()[1:], 1),  # off the alignment
        (torch.empty(72).half()[8:], 8),
        (torch.empty(5, 20).half()[:, :16], 1),  # rows begin off the alignment
        (torch.empty(5, 24).half()[:, :16], 8),
        (torch.empty(128).half()[::2], 1),
        (torch.empty(16, 8).half().t(), 8),
        (torch.empty(1).half(), 1),
    ],
    ids=lambda value: f"{tuple(value.shape)} {value.dtype}" if torch.is_tensor(value) else None,
)
def test_neighbours_leave_as_one_word_where_they_can(emulated, memory, width):
    preparation = filled(emulated, torch.randn(memory.shape), memory)
    (job,) = preparation.jobs
    assert job.width == width


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_words_are_made_of_elements_that_lie_apart(emulated, dtype):
    """Strides of inputs are odd, those of the memory are not."""
    source = torch.randn(16, 7, 3).to(dtype)[:, 2:5, 1].t()
    preparation = filled(emulated, source, aligned((3, 16), torch.float16))
    assert preparation.jobs[0].width == 8


def test_random_views_of_random_memory(emulated):
    rng = random.Random(0)
    for _ in range(150):
        rank = rng.randint(0, 4)
        shape = tuple(rng.choice((1, 2, 3, 8, 16)) for _ in range(rank))
        turn = rng.sample(range(rank), rank)
        steps = [rng.choice((1, 1, 2, 3)) for _ in shape]
        broad = [rng.random() < 0.2 for _ in shape]
        sizes = [1 if b else n * step for n, step, b in zip(shape, steps, broad, strict=True)]
        whole = torch.randn([sizes[axis] for axis in turn]).to(rng.choice(DTYPES))
        back = [turn.index(axis) for axis in range(rank)]
        cut = tuple(slice(None, None, step) for step in steps)
        source = whole.permute(back)[cut].expand(shape)
        memory = aligned(tuple(shape[axis] for axis in turn), rng.choice(DTYPES)).permute(back)
        preparation = filled(emulated, source, memory)
        assert preparation.by_torch == 0


def test_blocks_divide_a_large_value(emulated):
    sizes = (CHUNK, CHUNK + 1, 3 * CHUNK - 8, 5)
    values = {f"w{n}": torch.randn(n).half() for n in sizes}
    constants = [Constant(values, f"w{n}", aligned((n,), torch.bfloat16)) for n in sizes]
    preparation = emulated(constants, values)
    preparation.fill()
    for constant in constants:
        assert torch.equal(constant.memory, values[constant.name].bfloat16())
    (table,) = preparation._tables
    assert [job.count for job in preparation.jobs] == [CHUNK, 5, CHUNK + 1, 3 * CHUNK - 8]
    assert list(table.jobs.first_blocks[:4]) == [0, 1, 2, 4]
    assert (table.jobs.singles, table.blocks) == (2, 7)


def test_a_value_that_nothing_is_in_takes_no_block(emulated):
    values = {"a": torch.randn(8), "none": torch.empty(0, 5), "b": torch.randn(8)}
    constants = [
        Constant(values, name, torch.empty_like(t), as_it_is) for name, t in values.items()
    ]
    constants.append(Constant(values, "none", torch.empty(0, 5), as_it_is, packs=True))
    emulated(constants, values).fill()
    assert torch.equal(constants[0].memory, values["a"])
    assert torch.equal(constants[2].memory, values["b"])


def test_nothing_but_an_empty_value(emulated):
    values = {"none": torch.empty(0)}
    emulated([Constant(values, "none", torch.empty(0), as_it_is)], values).fill()


def test_five_axes_that_cannot_be_merged_are_left_to_torch(emulated):
    source = torch.randn(2, 3, 2, 3, 2, 2)[..., 0].permute(4, 2, 0, 3, 1)
    assert job_of(torch.empty(source.shape), [source]) is None
    preparation = filled(emulated, source, torch.empty(source.shape))
    assert (len(preparation.jobs), preparation.by_torch) == (0, 1)


def test_axes_of_one_element_are_none():
    memory = torch.empty(2, 1, 3, 1, 5, 1, 7)
    job = job_of(memory, [torch.randn(7, 5, 3, 2).permute(3, 2, 1, 0).view(2, 1, 3, 1, 5, 1, 7)])
    assert list(job.sizes) == [2, 3, 5, 7]
    assert len(job.sizes) == job.axes == AXES


def test_what_is_stored_alike_everywhere_has_one_axis():
    """And needs no division to be found."""
    job = job_of(torch.empty(4, 3, 2), [torch.randn(4, 3, 2), torch.randn(1).expand(4, 3, 2)])
    assert (job.axes, list(job.sizes)) == (1, [1, 1, 1, 24])
    broadcast = job_of(torch.empty(4, 3), [torch.randn(3)])
    assert (broadcast.axes, list(broadcast.sizes)) == (2, [1, 1, 4, 3])


def test_what_is_too_far_apart_for_32_bits_is_left_to_torch():
    """Each stride alone would fit."""
    meta = torch.empty(1, device="meta")
    far = meta.as_strided((4, 2), (1 << 30, 1))
    assert extent_of(far) > COUNT_MAX
    assert job_of(torch.empty(4, 2), [far]) is None
    near = meta.as_strided((2, 2), (1 << 30, 1))
    assert extent_of(near) <= COUNT_MAX


def test_blocks_of_a_table_follow_each_other():
    jobs = [Job(count=count) for count in (1, 0, CHUNK, CHUNK + 1, 7)]
    table = table_of(jobs, 24)
    assert [job.count for job in table.jobs.jobs[:5]] == [1, CHUNK, 7, 0, CHUNK + 1]
    assert list(table.jobs.first_blocks[:5]) == [0, 1, 2, 3, 3]
    assert (table.jobs.count, table.jobs.singles, table.size, table.blocks) == (5, 3, 24, 5)
    assert len(table.jobs.jobs) == 24
