"""Torch's modes of this thread, as a trace leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch.autograd import forward_ad


@contextmanager
def modes_as_before() -> Iterator[None]:
    """A graph that Dynamo captured switches modes by calls, of which one that is refused ran only
    the first ones: torch would keep casts of weights for as long as it is inside of autocast.
    """
    grad, depth, functorch = torch.is_grad_enabled(), _autocast_depth(), torch._C._functorch
    transforms, dual = functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level >= 0
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > transforms:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(transforms)
            with suppress(RuntimeError):  # there may be no such level; more than one cannot be
                if not dual:
                    torch._C._exit_dual_level(level=0)
        torch.set_grad_enabled(grad)
        for _ in range(depth, _autocast_depth()):
            torch.autocast_decrement_nesting()


def _autocast_depth() -> int:
    deeper = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return int(deeper) - 1
