"""When a kernel reads a weight where it lies, and what it is given elsewhere."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from plantune.devices.cuda.build import compile_cuda
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.family import Frame
from plantune.kernels.weights.constants import (
    Constant,
    Parameter,
    Room,
    channel_values,
    conv_weight,
    flat,
    floats,
    in_rows,
)
from plantune.space.arch import load_arch

CPU = torch.device("cpu")
CHANNELS_LAST = torch.channels_last
FILTER = TensorType((4, 8, 3, 3), "float16")


def step_with(name: str, shape: tuple[int, ...], dtype: str = "float16") -> Step:
    """A step that reads a constant of that name."""
    return Step((), ((name, TensorType(shape, dtype)),), (), frozenset({name}), "forward")


def placed(tensor: Tensor, offset: int) -> Tensor:
    """The same with the same strides, `offset` elements after an aligned address."""
    memory = tensor.new_zeros(tensor.untyped_storage().nbytes() // tensor.element_size() + offset)
    assert memory.data_ptr() % 64 == 0
    return memory.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor)


def filter_constant(weight: Tensor, **changed: object) -> Constant:
    step = step_with("w", tuple(changed.get("shape", weight.shape)))
    return conv_weight(step.types["w"]).of("w", Frame({"w": weight}))


def filter_(o: int = 4, c: int = 8, r: int = 3, s: int = 3) -> Tensor:
    return torch.randn(o, c, r, s).half()


IN_PLACE = {
    "channels_last": filter_().contiguous(memory_format=CHANNELS_LAST),
    "1x1 in any format": filter_(r=1, s=1),
    "one channel in any format": filter_(c=1),
    "a part of whole filters": filter_(8).contiguous(memory_format=CHANNELS_LAST)[2:6],
    "strides of an axis of one element mean nothing": filter_(r=1, s=1).as_strided(
        (4, 8, 1, 1), (8, 1, 77, 5)
    ),
    "8 elements of 2 bytes further on": placed(
        filter_().contiguous(memory_format=CHANNELS_LAST), 8
    ),
}
FILLED = {
    "nchw": filter_(),
    "every second filter": filter_(8).contiguous(memory_format=CHANNELS_LAST)[::2],
    "some of the channels": filter_(c=16).contiguous(memory_format=CHANNELS_LAST)[:, :8],
    "one filter for all": filter_(1).contiguous(memory_format=CHANNELS_LAST).expand(4, 8, 3, 3),
    "turned": filter_().transpose(2, 3),
    "off the alignment": placed(filter_().contiguous(memory_format=CHANNELS_LAST), 3),
    "another dtype": filter_().contiguous(memory_format=CHANNELS_LAST).float(),
    "another dtype of the same size": filter_()
    .contiguous(memory_format=CHANNELS_LAST)
    .to(torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_filter_is_read_in_place(name: str) -> None:
    weight = IN_PLACE[name]
    constant = filter_constant(weight)
    assert constant.is_in_place()
    assert constant.tensor.data_ptr() == weight.data_ptr()
    assert constant.tensor.is_contiguous()
    assert torch.equal(constant.tensor, weight.permute(0, 2, 3, 1))


@pytest.mark.parametrize("name", FILLED)
def test_a_filter_is_filled(name: str) -> None:
    weight = FILLED[name]
    constant = filter_constant(weight)
    assert not constant.is_in_place()
    constant.fill()
    assert constant.tensor.dtype == torch.float16
    assert constant.tensor.data_ptr() != weight.data_ptr()
    assert constant.tensor.is_contiguous()
    assert torch.equal(constant.tensor, weight.half().permute(0, 2, 3, 1))


def test_a_filter_of_another_shape_is_not_read_in_place() -> None:
    weight = filter_(2).contiguous(memory_format=CHANNELS_LAST)
    assert not filter_constant(weight, shape=(4, 8, 3, 3)).is_in_place()


def test_an_empty_filter_needs_nothing() -> None:
    constant = filter_constant(torch.empty(0, 8, 3, 3).half())
    constant.fill()
    assert constant.tensor.shape == (0, 3, 3, 8)


def test_a_weight_that_moved_is_looked_at_again() -> None:
    values = {"w": filter_()}
    constant = conv_weight(FILTER).of("w", Frame(values))
    constant.fill()
    memory = constant.tensor
    values["w"] = filter_().contiguous(memory_format=CHANNELS_LAST)
    assert constant.tensor.data_ptr() == values["w"].data_ptr()
    values["w"] = filter_()
    constant.fill()
    assert constant.tensor is memory
    assert torch.equal(memory, values["w"].permute(0, 2, 3, 1))


def test_memory_is_made_only_for_what_is_filled() -> None:
    constant = filter_constant(IN_PLACE["channels_last"])
    constant.ordered(), constant.tensor, constant.is_in_place()
    assert isinstance(constant._memory, Room)


@pytest.mark.parametrize("shape", [(), (7,), (1,), (3, 1, 5), (2, 8, 3, 3)])
def test_rows_are_read_in_place_if_they_lie_so(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).half()
    step, values = step_with("w", shape), {"w": value}
    constant = in_rows(step.types["w"]).of("w", Frame(values))
    assert constant.tensor.data_ptr() == value.data_ptr()
    values["w"] = placed(value, 1)
    constant.fill()
    assert constant.tensor.data_ptr() != values["w"].data_ptr()
    assert torch.equal(constant.tensor, value)


def test_an_image_in_channels_last_does_not_lie_in_rows() -> None:
    value = filter_().contiguous(memory_format=CHANNELS_LAST)
    constant = in_rows(FILTER).of("w", Frame({"w": value}))
    constant.fill()
    assert constant.tensor.is_contiguous()
    assert torch.equal(constant.tensor, value)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(6).half(),
        torch.randn(12).bfloat16()[::2],
        torch.randn(1, 6, 1, 1),
        torch.randn(6, 1, 1).double(),
        torch.randn(()).half(),
        torch.randn(1).half(),
    ],
    ids=lambda value: f"{tuple(value.shape)} {value.dtype}",
)
def test_a_vector_is_float32_whatever_it_is_given(value: Tensor) -> None:
    constant = floats(6).of("b", Frame({"b": value}))
    assert not constant.is_in_place()
    constant.fill()
    assert constant.tensor.dtype == torch.float32
    assert torch.equal(constant.tensor, value.float().flatten().expand(6))


def test_a_vector_of_float32_is_read_by_its_copy() -> None:
    """Kernels read whole vectors of it: only a copy is as long as they take it to be."""
    values = {"b": torch.randn(6)}
    constant = Constant(values, "b", torch.zeros(64)[:6], flat)
    assert not constant.is_in_place()
    constant.fill()
    assert torch.equal(constant.tensor, values["b"])


def test_a_value_that_is_not_there_yet_is_not_in_place() -> None:
    constant = Constant({}, "later", Room((3,), torch.float16, CPU), in_place=True)
    assert not constant.is_in_place()
    assert constant.tensor.shape == (3,)


def read_by(parameter: Parameter, count: int, dtype: torch.dtype) -> Tensor:
    """What `load_parameter` of csrc/cuda/parameter.h reads for a kernel of this dtype."""
    dtype = torch.float32 if parameter.is_float else dtype
    size = ((count - 1) * parameter.stride + 1) * dtype.itemsize
    raw = (ctypes.c_char * size).from_address(parameter.from_)
    return torch.frombuffer(raw, dtype=dtype).as_strided((count,), (parameter.stride,)).float()


PARAMETERS = {
    "one of each channel": (torch.randn(6).half(), True),
    "an axis of each image": (torch.randn(1, 6, 1, 1).half(), True),
    "off the alignment": (torch.randn(7).half()[1:], True),
    "one for all": (torch.randn(1).half(), True),
    "a number": (torch.randn(()).half(), True),
    "in float32": (torch.randn(6), True),
    "one in float32": (torch.randn(1, 1, 1), True),
    "every second": (torch.randn(12).half()[::2], False),
    "expanded": (torch.randn(1).half().expand(6), False),
    "the other 16 bits": (torch.randn(6).bfloat16(), False),
    "in float64": (torch.randn(6).double(), False),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_kernel_reads_channel_values_as_the_parameter_has_them(name: str) -> None:
    value, in_place = PARAMETERS[name]
    step = step_with("b", tuple(value.shape))
    constant = channel_values(step.types["b"], 6).of("b", Frame({"b": value}))
    assert constant.is_in_place() == in_place
    if not in_place:
        constant.fill()
    parameter = constant.parameter()
    assert (parameter.from_ == value.data_ptr()) == in_place
    wanted = value.float().flatten().expand(6)
    assert torch.equal(read_by(parameter, 6, torch.float16), wanted)


def test_values_of_one_channel_are_one_for_all() -> None:
    value = torch.randn(1).bfloat16()
    constant = channel_values(TensorType((1,), "bfloat16"), 1).of("b", Frame({"b": value}))
    assert torch.equal(read_by(constant.parameter(), 1, torch.bfloat16), value.float())


def test_values_of_other_channels_are_not_read_in_place() -> None:
    step = step_with("b", (6,))
    constant = channel_values(step.types["b"], 6).of("b", Frame({"b": torch.randn(4).half()}))
    assert not constant.is_in_place()


def test_a_copy_is_never_read_in_place() -> None:
    """An order that has to copy makes memory that is gone before the kernel reads it."""
    values = {"b": torch.randn(4, 6).half().t()}
    constant = Constant(values, "b", Room((24,), torch.float16, CPU), in_place=True)
    assert not constant.is_in_place()


def test_the_parameter_struct_is_that_of_the_header() -> None:
    source = f"""#include "cuda/parameter.h"
using plantune::Parameter;
static_assert(sizeof(Parameter) == {ctypes.sizeof(Parameter)}, "");
static_assert(__INTADDR__(&((Parameter*)0)->from) == {Parameter.from_.offset}, "");
static_assert(__INTADDR__(&((Parameter*)0)->stride) == {Parameter.stride.offset}, "");
static_assert(__INTADDR__(&((Parameter*)0)->is_float) == {Parameter.is_float.offset}, "");
extern "C" __global__ void run() {{}}
"""
    compile_cuda(source, load_arch("sm90"))
