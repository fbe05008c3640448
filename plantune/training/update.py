"""From gradients to weights: unscale, clip, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plantune.kernels.weights.copies import Copies, Pair, Triple
from plantune.runtime.program.flat import FlatLayout, are_alike
from plantune.runtime.program.program import current_stream
from plantune.space.arch import Arch
from plantune.training.loss_scale import LossScale

# As in torch.nn.utils.clip_grad_norm_.
CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Rules:
    """What happens to gradients before the optimizer reads them."""

    max_norm: float | None = None
    scale: LossScale | None = None


class FlatGradients:
    """The gradients of one step, side by side, and which parameters have one.

    Inside of `left_in_place` those of whole batches stay where a backward pass made them, if they
    are stored as their parameters are; `addresses` says where.
    """

    def __init__(
        self, parameters: Sequence[Tensor], device: torch.device, arch: Arch | None = None
    ) -> None:
        self.parameters = parameters
        self.layout = FlatLayout.of({str(at): tensor for at, tensor in enumerate(parameters)})
        self.buffers = self.layout.buffers(device)
        self.views = [*self.layout.views(self.buffers).values()]
        self.present = [False] * len(self.views)
        self._device, self._copies = device, None if arch is None else Copies(arch, device)
        self._leaves = False
        self._left: dict[int, Tensor] = {}

    def take(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Those of a micro-batch; the first of a step has the number 0."""
        if number == 0:
            self.present, self._left = [gradient is not None for gradient in gradients], {}
        pairs: list[Pair] = []
        sums: list[Triple] = []
        for at, (view, gradient) in enumerate(zip(self.views, gradients, strict=True)):
            if gradient is None:
                if number == 0:
                    view.zero_()
                continue
            self.present[at] = True
            if number == 0 and gradient.data_ptr() == view.data_ptr():
                continue  # a pass has written it there
            if number > 0:
                sums.append((view, self._left.pop(at, view), gradient))
            elif self._leaves and self._can_stay(at, gradient):
                self._left[at] = gradient
            else:
                pairs.append((view, gradient))
        self.write(pairs, sums)

    @contextmanager
    def left_in_place(self) -> Iterator[None]:
        """Inside, gradients need not be side by side, and those of the last step are kept."""
        self._leaves = True
        try:
            yield
        finally:
            self._leaves, self._left = False, {}

    def addresses(self) -> list[int]:
        """Where each gradient begins; 0 stands for none."""
        tensors = (self._left.get(at, view) for at, view in enumerate(self.views))
        pairs = zip(tensors, self.present, strict=True)
        # An empty tensor has no address.
        return [max(tensor.data_ptr(), 1) if there else 0 for tensor, there in pairs]

    def _can_stay(self, at: int, gradient: Tensor) -> bool:
        """Whether it may be read where it is, while parameters are written."""
        if gradient.layout != torch.strided or gradient.is_neg():
            return False
        memory = gradient.untyped_storage().data_ptr()
        return are_alike(self.parameters[at], gradient) and all(
            parameter.untyped_storage().data_ptr() != memory for parameter in self.parameters
        )

    def write(self, pairs: Sequence[Pair], sums: Sequence[Triple] = ()) -> None:
        """Enqueues copies and sums."""
        if self._copies is not None:
            self._copies.launch(current_stream(self._device), pairs, sums)
            return
        for view, gradient in pairs:
            view.copy_(gradient)
        for view, one, other in sums:
            torch.add(one, other, out=view)

    def norm(self) -> Tensor:
        """Of all gradients together, in float32 at least."""
        norms = [
            torch.linalg.vector_norm(buffer, dtype=torch.promote_types(buffer.dtype, torch.float32))
            for buffer in self.buffers.values()
        ]
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))
        return total.float()


class Update:
    """What a training step does with its gradients: the norm and `found_inf` are of the last one.

    If it goes `inside`, a captured step holds what `for_capture` gives; else `run` follows each
    replay. One that `reads_in_place` takes gradients from wherever they are.
    """

    inside = False
    reads_in_place = False
    found_inf: Tensor

    def gradient_norm(self) -> Tensor:
        """In memory of the caller's."""
        raise NotImplementedError

    def has_room(self) -> bool:
        """Whether there is memory for what the optimizer keeps with the settings it has now."""
        return True

    def follow(self) -> None:
        """Brings the device up to date with what a user may have changed on the host."""

    def run(self) -> None:
        raise NotImplementedError

    def enqueue(self) -> None:
        """`run` without waiting for the device."""
        self.run()

    def for_capture(self) -> Callable[[], Callable[[], None] | None]:
        """What a capture holds: it enqueues the step, and returns what must follow the capture."""
        return self.enqueue

    def is_ready(self, present: Sequence[bool]) -> bool:
        """Whether it can be captured by now, for the parameters that have a gradient."""
        return True

    def baked(self, present: Sequence[bool]) -> Any:
        """What a capture now reads once, for `holds`."""
        return None

    def holds(self, baked: Any, present: Sequence[bool]) -> bool:
        """Whether what was captured is still what it would do."""
        return True

    def leave(self, reason: str) -> bool:
        """Stays outside of captured steps from now on; False if it cannot."""
        return False


class TorchUpdate(Update):
    """torch's own step of whichever optimizer, which sees these gradients for as long as it takes.
    A caller's `.grad` stays as it is.
    """

    def __init__(self, optimizer: Optimizer, gradients: FlatGradients, rules: Rules) -> None:
        self._optimizer, self._gradients, self._rules = optimizer, gradients, rules
        self._device = gradients.parameters[0].device
        self._norm = torch.zeros((), device=self._device)
        self.found_inf = torch.zeros(1, device=self._device)

    def gradient_norm(self) -> Tensor:
        return self._norm.clone()

    def run(self) -> None:
        """Waits for the device where there is a loss scale."""
        self._measure()
        if self._rules.scale is None or not self.found_inf:
            self._clip()
            self._step()
        self._rescale()

    def _measure(self) -> None:
        """Unscales the gradients; their norm, and whether they are finite."""
        self.found_inf.zero_()
        if self._rules.scale is not None:
            inverse = self._rules.scale.scale.double().reciprocal().float()
            unscale([*self._gradients.buffers.values()], self.found_inf, inverse)
        self._norm.copy_(self._gradients.norm())

    def _clip(self) -> None:
        if self._rules.max_norm is None:
            return
        factor = (self._rules.max_norm / (self._norm + CLIP_EPS)).clamp(max=1.0)
        # Not the buffers: NaN would stay between the gradients.
        torch._foreach_mul_(self._gradients.views, factor)

    def _rescale(self) -> None:
        if self._rules.scale is not None:
            self._rules.scale.update(self.found_inf)

    def _step(self) -> None:
        gradients, groups = self._gradients, self._optimizer.param_groups
        # Also those that are not trained now: the optimizer would move them by an old gradient.
        every = [parameter for group in groups for parameter in group["params"]]
        kept = [parameter.grad for parameter in every]
        triples = zip(gradients.parameters, gradients.views, gradients.present, strict=True)
        try:
            for parameter in every:
                parameter.grad = None
            for parameter, view, there in triples:
                parameter.grad = view if there else None
            self._optimizer.step()
        finally:
            for parameter, grad in zip(every, kept, strict=True):
                parameter.grad = grad


def unscale(buffers: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiplies by `inverse`; `found_inf` becomes 1 where a number was not finite."""
    known = [buffer for buffer in buffers if buffer.dtype != torch.bfloat16]
    if known:
        torch._amp_foreach_non_finite_check_and_unscale_(known, found_inf, inverse)
    for buffer in buffers:
        if buffer.dtype == torch.bfloat16:  # which torch's own does not take on a GPU
            infinite = buffer.isfinite().logical_not_().any()
            torch.maximum(found_inf, infinite.float(), out=found_inf)
            buffer.mul_(inverse)
