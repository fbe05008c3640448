"""Another weight in the same memory: the next call reads what is there now."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

SHAPE = (4, 4, 3, 3)


@pytest.fixture
def module(named):
    return named(conv=nn.Conv2d(4, 4, 3), relu=nn.ReLU())


@pytest.fixture
def x():
    return torch.randn(2, 4, 8, 8)


@pytest.fixture
def memory():
    """As an allocator hands it out again."""
    return bytearray(torch.Size(SHAPE).numel() * 4)


def weight_in(memory: bytearray, shape=SHAPE, dtype=torch.float32) -> nn.Parameter:
    """A new parameter there, with random values."""
    tensor = torch.frombuffer(memory, dtype=dtype)[: torch.Size(shape).numel()].view(shape)
    return nn.Parameter(tensor.copy_(torch.randn(shape)))


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_another_parameter_at_the_same_address(mode, module, x, memory, tuned, close):
    module.conv.weight = weight_in(memory)
    model = tuned(module, x, mode, "hand")
    addresses = set()
    for _ in range(4):
        model.conv.weight = None  # the allocator has the memory back
        model.conv.weight = weight_in(memory)
        addresses.add(model.conv.weight.data_ptr())
        close(model(x), copy.deepcopy(model.reference)(x))
        assert model.last_call().how == "planned"
    assert len(addresses) == 1


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_other_data_at_the_same_address(mode, module, x, memory, tuned, close):
    module.conv.weight = weight_in(memory)
    model = tuned(module, x, mode, "hand")
    model(x)
    for _ in range(3):
        model.conv.weight.data = weight_in(memory).data
        model.refresh()  # no version moves
        close(model(x), copy.deepcopy(model.reference)(x))


@pytest.mark.filterwarnings("ignore::plantune.UnplannedCall")
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_another_shape_at_the_same_address(mode, module, x, memory, tuned, close):
    module.conv.weight = weight_in(memory)
    model = tuned(module, x, mode, "hand")
    model(x)
    model.conv.weight = weight_in(memory, (4, 4, 1, 1))
    model.refresh()
    close(model(x), copy.deepcopy(model.reference)(x))


@pytest.mark.filterwarnings("ignore::plantune.UnplannedCall")
def test_another_dtype_at_the_same_address(module, x, memory, tuned, close):
    module.conv.weight = weight_in(memory)
    model = tuned(module, x, "infer", "hand")
    model(x)
    model.conv.weight = weight_in(memory, dtype=torch.bfloat16)
    model.conv.bias = nn.Parameter(model.conv.bias.bfloat16())
    model.refresh()
    wide = copy.deepcopy(model.reference)(x.bfloat16())
    found = model(x.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wide, rtol=0.05, atol=0.05)
