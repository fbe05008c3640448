"""Guard bands: each of their bytes counts, wherever a buffer begins and ends."""

from __future__ import annotations

import pytest
import torch

from plantune.measure.trial import GUARD_BYTES, NANS, NUMBERS, Buffer, not_surrounded


@pytest.mark.parametrize("pattern", [NUMBERS, NANS])
@pytest.mark.parametrize(("size", "offset"), [(64, 0), (1001, 0), (4, 4), (6, 2), (0, 1)])
def test_a_changed_byte_is_seen(pattern, size, offset):
    buffer = Buffer(size, torch.device("cpu"), offset)
    last = buffer.memory.numel() - 1
    for place in (0, GUARD_BYTES - 1, buffer.start - 1, buffer.end, buffer.end + 9, last):
        buffer.surround(pattern)
        buffer.content.fill_(7)
        assert not_surrounded({"x": buffer}, pattern) is None
        buffer.memory[place] = pattern ^ 1
        assert not_surrounded({"x": buffer}, pattern) == "x"


def test_the_other_pattern_is_another_one():
    buffer = Buffer(8, torch.device("cpu"))
    buffer.surround(NUMBERS)
    assert not_surrounded({"x": buffer}, NANS) == "x"


def test_of_several_the_first_is_named_after_one_wait_for_each_kind_of_part(
    monkeypatch,
):
    buffers = {name: Buffer(1001, torch.device("cpu"), 3) for name in "abcd"}
    for buffer in buffers.values():
        buffer.surround(NUMBERS)
    waits, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: waits.append(x.dtype) or tolist(x))
    assert not_surrounded(buffers, NUMBERS) is None
    assert sorted(map(str, waits)) == ["torch.int64", "torch.uint8"]
    buffers["d"].memory[5] = buffers["b"].memory[-1] = 0
    assert not_surrounded(buffers, NUMBERS) == "b"
    assert not_surrounded({}, NUMBERS) is None
