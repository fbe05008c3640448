"""The generators from which torch draws random numbers: one for each device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor

# Far from small seeds, which people take.
_apart = count(1 << 32)


def state_on(device: torch.device) -> Tensor:
    """What the next numbers follow from."""
    return _generator(device).get_state()


@contextmanager
def kept_numbers(device: torch.device) -> Iterator[None]:
    """Afterwards the device draws what it would have drawn without what happens inside."""
    generator = _generator(device)
    before = generator.get_state()
    try:
        yield
    finally:
        # After it was set, torch makes another state for dropout in recurrent layers of a GPU.
        if not torch.equal(generator.get_state(), before):
            generator.set_state(before)


@contextmanager
def numbers_of(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, the device draws the numbers of a seed; afterwards as if it had not."""
    with kept_numbers(device):
        _generator(device).manual_seed(seed)
        yield


@contextmanager
def numbers_of_its_own(device: torch.device) -> Iterator[None]:
    """Inside, the device draws what no one else does, here or after another seed; afterwards as if
    it had not.
    """
    with numbers_of(device, (_generator(device).initial_seed() + next(_apart)) % (1 << 63)):
        yield


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
