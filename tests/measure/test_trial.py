"""Guard bands: each of their bytes counts, wherever a buffer begins and ends."""

from __future__ import annotations

import pytest
import torch

from plantune.measure.trial import GUARD_BYTES, NANS, NUMBERS, Buffer


@pytest.mark.parametrize("pattern", [NUMBERS, NANS])
@pytest.mark.parametrize(("size", "offset"), [(64, 0), (1001, 0), (4, 4), (6, 2), (0, 1)])
def test_a_changed_byte_is_seen(pattern, size, offset):
    buffer = Buffer(size, torch.device("cpu"), offset)
    last = buffer.memory.numel() - 1
    for place in (0, GUARD_BYTES - 1, buffer.start - 1, buffer.end, buffer.end + 9, last):
        buffer.surround(pattern)
        buffer.content.fill_(7)
        assert buffer.is_surrounded(pattern)
        buffer.memory[place] = pattern ^ 1
        assert not buffer.is_surrounded(pattern)


def test_the_other_pattern_is_another_one():
    buffer = Buffer(8, torch.device("cpu"))
    buffer.surround(NUMBERS)
    assert not buffer.is_surrounded(NANS)
