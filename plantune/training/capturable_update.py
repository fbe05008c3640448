"""On a GPU: an optimizer's own step, where torch can capture it, in a training step's graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from plantune.base.warning import warn
from plantune.errors import PlantuneWarning
from plantune.kernels.weights.copies import Snapshots
from plantune.runtime.program.program import current_stream
from plantune.space.arch import Arch
from plantune.training.captured_step import UncapturedStep
from plantune.training.rules import has_hooks
from plantune.training.update import FlatGradients, Rules, TorchUpdate

# To capture a step takes as long as hundreds of them: what moves more often is left out of it.
MOST_CHANGES = 4


class RecapturedStep(PlantuneWarning):
    """A number that is a part of a captured training step changed."""


def can_be_captured(optimizer: Optimizer) -> bool:
    """Whether torch can capture its step, and nothing of it is Python that each step must run."""
    groups = optimizer.param_groups
    return not has_hooks(optimizer) and all(
        group.get("capturable") and not group.get("differentiable") for group in groups
    )


@dataclass(frozen=True)
class Baked:
    """What a captured step has read once: plain values by their names, and where tensors are."""

    values: tuple[tuple[str, Any], ...]
    tensors: tuple[Tensor, ...]

    def has_tensors_of(self, other: Baked) -> bool:
        pairs = len(self.tensors) == len(other.tensors)
        return pairs and all(map(is_, self.tensors, other.tensors))

    def moved(self, now: Baked) -> str | None:
        """The first value that is another one now, in words."""
        before = dict(self.values)
        found = ((name, value) for name, value in now.values if before.get(name, value) != value)
        return next((f"{name} changed from {before[name]} to {now}" for name, now in found), None)


class CapturableUpdate(TorchUpdate):
    """`run` takes the step as ever, and `enqueue` without waiting for the device: the rates are
    tensors there, and a step that overflows is taken back.
    """

    inside = True

    def __init__(
        self, optimizer: Optimizer, gradients: FlatGradients, rules: Rules, arch: Arch
    ) -> None:
        super().__init__(optimizer, gradients, rules)
        groups = optimizer.param_groups
        self._rates = [torch.zeros((), device=self._device) for _ in groups]
        self._set: list[float | None] = [None for _ in groups]
        self._snapshots = Snapshots(arch, self._device)
        # By which parameters had a gradient: the optimizer makes its state in its first step.
        self._stepped: dict[tuple[bool, ...], Baked] = {}
        self._changes, self._is_reported = 0, False

    def follow(self) -> None:
        """The rates as they are now."""
        for at, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            if not _is_beside(rate, self._device) and float(rate) != self._set[at]:
                self._set[at] = float(rate)
                self._rates[at].fill_(float(rate))
        # What schedulers ask: whether the optimizer was stepped before they are.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def run(self) -> None:
        super().run()
        if self._rules.scale is None or not self.found_inf:
            present = self._gradients.present
            now = self.baked(present)
            if now is not None:
                self._stepped[tuple(present)] = now
            if self._rules.scale is not None:
                self._snapshots.load(self._written(), self.found_inf)

    def is_ready(self, present: Sequence[bool]) -> bool:
        """Whether a step now would find all of the optimizer's state in its place."""
        stepped = self._stepped.get(tuple(present))
        now = self.baked(present)
        return now is None or (stepped is not None and stepped.has_tensors_of(now))

    def enqueue(self) -> None:
        self._measure()
        self._clip()
        with self._rates_as_tensors():
            if self._rules.scale is None:
                self._step()
            else:
                written, stream = self._written(), current_stream(self._device)
                kept = self._snapshots.take(stream, written)
                self._step()
                self._snapshots.put_back(stream, written, kept, self.found_inf)
        self._rescale()

    def baked(self, present: Sequence[bool]) -> Baked | None:
        if not self.inside:
            return None
        values: list[tuple[str, Any]] = []
        tensors: list[Tensor] = []
        for at, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                if name != "params" and not (name == "lr" and not isinstance(value, Tensor)):
                    _take(f"{name} of group {at}", value, values, tensors)
        for parameter, there in zip(self._gradients.parameters, present, strict=True):
            if there:
                for name, value in self._optimizer.state.get(parameter, {}).items():
                    _take(name, value, values, tensors)
        return Baked((*values, *self._numbers()), tuple(tensors))

    def holds(self, baked: Any, present: Sequence[bool]) -> bool:
        now = self.baked(present)
        if baked is None or now is None:
            return True
        if baked.has_tensors_of(now) and baked.values == now.values:
            return True
        self._report(baked.moved(now))
        self._changes += 1
        self.inside = self.inside and self._changes <= MOST_CHANGES
        return False

    def _report(self, moved: str | None) -> None:
        if moved is None or self._is_reported:
            return
        self._is_reported = True
        warn(
            f"the optimizer's {moved}: the training step is captured again; of a captured "
            f"{type(self._optimizer).__name__} only lr may move without that",
            RecapturedStep,
        )

    def leave(self, reason: str) -> bool:
        if not self.inside:
            return False
        self.inside = False
        warn(
            f"the step of {type(self._optimizer).__name__} cannot be captured, so it follows each "
            f"replay: {reason}",
            UncapturedStep,
        )
        return True

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        """Those of clipping and of the loss scale."""
        scale = self._rules.scale
        if scale is not None:
            yield "growth_factor", scale.growth_factor
            yield "backoff_factor", scale.backoff_factor
            yield "growth_interval", scale.growth_interval

    def _written(self) -> list[Tensor]:
        """All that a step changes."""
        found: list[Tensor] = []
        for parameter, there in zip(
            self._gradients.parameters, self._gradients.present, strict=True
        ):
            if there:
                state = self._optimizer.state.get(parameter, {})
                found += [parameter.detach()]
                found += [x for x in tree_leaves(dict(state)) if isinstance(x, Tensor)]
        return found

    @contextmanager
    def _rates_as_tensors(self) -> Iterator[None]:
        groups = self._optimizer.param_groups
        given = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                if not _is_beside(group["lr"], self._device):
                    group["lr"] = rate
            yield
        finally:
            for group, rate in zip(groups, given, strict=True):
                group["lr"] = rate


def _take(name: str, value: Any, values: list[tuple[str, Any]], tensors: list[Tensor]) -> None:
    leaves = tree_leaves(value)
    tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
    values.append((name, plain[0] if len(plain) == 1 else plain))


def _is_beside(value: Any, device: torch.device) -> bool:
    """Whether it is a tensor on the device, which a captured step reads there."""
    return isinstance(value, Tensor) and value.device == device
