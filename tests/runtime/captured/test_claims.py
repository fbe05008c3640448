"""Inputs of a captured step that kernels read in the caller's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from plantune.runtime.captured.claims import Claim, claim, claimed, moving_input

EXECUTABLE = SimpleNamespace()


@pytest.fixture
def told():
    """The addresses that kernels were told."""
    return []


@pytest.fixture
def own():
    return torch.zeros(4, 3, 2, 2)


@pytest.fixture
def find(told):
    return lambda executable: [SimpleNamespace(move=told.append)]


def unaligned(tensor):
    memory = torch.empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


def test_a_tensor_is_read_where_it_is_and_told_once(own, find, told):
    moving = moving_input(own, [Claim(own.detach(), find)], EXECUTABLE)
    first, second = torch.randn_like(own), torch.randn_like(own)
    for tensor in (first, first, second):
        moving.take(tensor)
    assert told == [first.data_ptr(), second.data_ptr()]
    assert moving._copy is None


@pytest.mark.parametrize(
    "other",
    [
        unaligned,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:1].expand(4, 3, 2, 2),
    ],
    ids=["unaligned", "another order", "one sample in many places"],
)
def test_what_kernels_cannot_read_in_place_is_copied(own, find, told, other):
    moving = moving_input(own, [Claim(own, find)], EXECUTABLE)
    first, second = torch.randn_like(own), other(torch.randn_like(own))
    moving.take(second)
    copy = moving._copy
    moving.take(first)
    assert told == [copy.data_ptr(), first.data_ptr()]
    assert torch.equal(copy, second)
    assert copy.stride() == own.stride()
    assert not copy.data_ptr() % 16


def test_after_a_failure_kernels_are_told_again(own, told):
    def move(address):
        told.append(address)
        if len(told) == 1:
            raise RuntimeError("the driver refused")

    moving = moving_input(own, [Claim(own, lambda _: [SimpleNamespace(move=move)])], EXECUTABLE)
    tensor = torch.randn_like(own)
    with pytest.raises(RuntimeError, match="refused"):
        moving.take(tensor)
    moving.take(tensor)
    assert told == [tensor.data_ptr()] * 2


def test_none_moves_that_others_may_read(own, find):
    part = Claim(own[:2], find)
    alone = Claim(own, find)
    for claims in ([], [part], [alone, alone], [alone, part], [Claim(torch.zeros_like(own), find)]):
        assert moving_input(own, claims, EXECUTABLE) is None
    assert moving_input(own, [alone], None) is None
    assert moving_input(own, [Claim(own, lambda _: [])], EXECUTABLE) is None
    trained = own.clone().requires_grad_()
    assert moving_input(trained, [Claim(trained, find)], EXECUTABLE) is None


def test_claims_are_those_of_one_capture(own, find):
    claims: list[Claim] = []
    claim(own, find)
    with claimed(claims):
        claim(own, find)
    claim(own, find)
    assert [each.tensor is own for each in claims] == [True]
