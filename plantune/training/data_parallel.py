"""A training step that several processes take together, each with its part of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plantune.training.groups import Group, before_shutdown, from_first
from plantune.training.loss_scale import LossScale
from plantune.training.ranks import Ranks
from plantune.training.reduce import Reducer, described
from plantune.training.update import FlatGradients
from plantune.training.watch import Watch


class DataParallel:
    """One rank's part in it. `drop` gives up what was captured, without waiting for the GPU."""

    def __init__(self, group: Group, wire: torch.dtype | None, deadline_s: float) -> None:
        self.ranks = Ranks(group, deadline_s)
        self._wire = wire
        self._described: list[str] = []
        self._watch: Watch | None = None

    def start(
        self,
        device: torch.device,
        modules: Iterable[nn.Module],
        settings: Sequence[str],
        drop: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        """Compares the settings of all ranks, and gives all of them rank 0's weights."""
        self._watch = Watch(self.ranks, device, drop)
        before_shutdown(self.ranks.group, close)
        self.ranks.must_agree("the training steps", settings)
        tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        from_first([t for t in tensors if t.device.type == device.type], self.ranks.group)

    def turn(self) -> AbstractContextManager[None]:
        """Inside, a step is taken."""
        assert self._watch is not None
        return self._watch.step()

    def reducer(self, gradients: FlatGradients, device: torch.device, *, overlaps: bool) -> Reducer:
        lines = [*described(gradients)]
        if lines != self._described:
            self.ranks.must_agree("the parameters", lines)
            self._described = lines
        return Reducer(self.ranks, gradients, device, self._wire, overlaps=overlaps)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self.ranks.leave("closed its training step", self.ranks.call)
        self.ranks.forget()


def settings_of(optimizer: Optimizer, scale: LossScale | None, **others: Any) -> Iterator[str]:
    """What must be the same on all ranks."""
    yield f"optimizer {type(optimizer).__name__}"
    for at, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name == "params":
                yield f"group {at} with {len(value)} parameters"
            elif not callable(value):
                yield f"{name}={_plain(value)} in group {at}"
    yield f"scale={None if scale is None else scale.state_dict()}"
    for name, value in others.items():
        yield f"{name}={value}"


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
