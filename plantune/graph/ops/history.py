"""What autograd remembers of an overload's call, as a value that its gradient reads.

It is a tensor of no elements, of which only the overload's backward pass knows more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from plantune.graph.types import TensorType

HISTORY = TensorType((0,), "uint8")
Run = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class History:
    """A call that autograd recorded: where gradients enter and leave it. `held` are the memories
    that autograd keeps.
    """

    enter: tuple[GradientEdge | None, ...]
    leave: tuple[GradientEdge, ...]
    held: frozenset[int]

    def gradients(self, given: Sequence[int], seeds: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """What leaves if these seeds enter at the results in `given`; None where nothing does. This
        may be asked again.
        """
        pairs = [(self.enter[at], seed) for at, seed in zip(given, seeds, strict=True)]
        edges = [edge for edge, _ in pairs if edge is not None]
        found: Sequence[Tensor | None] = [None] * len(self.leave)
        if edges:
            of_edges = [seed for edge, seed in pairs if edge is not None]
            found = torch.autograd.grad(
                edges, self.leave, of_edges, retain_graph=True, allow_unused=True
            )
        return tuple(None if gradient is None else gradient.detach() for gradient in found)


def record(
    run: Run, inputs: Sequence[Tensor], wanted: Sequence[int], unread: Collection[int] = ()
) -> tuple[list[Tensor], History]:
    """The results of a call, and what autograd remembers for the gradients of the inputs in
    `wanted`. It keeps no input in `unread`.

    Whoever calls this keeps the other inputs as they are: autograd would look at versions, of which
    all values in one arena have the same.
    """
    held: set[int] = set()
    gone = {inputs[at].data_ptr() for at in unread}

    def keep(tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        kept = kept.clone() if kept.data_ptr() in gone else kept
        held.add(_storage(kept))
        return kept

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        saved_tensors_hooks(keep, lambda kept: kept),
    ):
        sources = [x.detach().clone() if x.is_inference() else x.detach() for x in inputs]
        for at in wanted:
            sources[at].requires_grad_()
        results = run(sources)
        enter = tuple(get_gradient_edge(r) if r.requires_grad else None for r in results)
        leave = tuple(get_gradient_edge(sources[at]) for at in wanted)
    made = [result.detach() for result in results]  # one may be a source: dropout of nothing
    for at in unread:
        sources[at].data = sources[at].new_empty(0)
    return made, History(enter, leave, frozenset(held))


def remembered(
    run: Run, inputs: Sequence[Tensor], wanted: Sequence[int], unread: Collection[int]
) -> tuple[Tensor, ...]:
    """The results of a call, and what autograd remembers of it."""
    results, history = record(run, inputs, wanted, unread)
    token = torch.empty(HISTORY.shape, dtype=HISTORY.torch_dtype, device=inputs[0].device)
    token.history = history  # type: ignore[attr-defined]
    return (*results, token)


def history_of(token: Tensor) -> History | None:
    """What autograd remembers of the call that made the token; None if it was made otherwise."""
    found: History | None = getattr(token, "history", None)
    return found


def owned(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    held: Collection[int] = (),
    loose: Collection[int] = (),
) -> tuple[Tensor, ...]:
    """The results as values of their own: dense, and in memory that nothing else reads. Those at
    the places in `loose` stay what they are.
    """
    taken = {*map(_storage, inputs), *held}
    made = []
    for place, result in enumerate(results):
        is_own = _storage(result) not in taken and _is_whole(result)
        stays = place in loose or is_own
        made.append(result if stays else result.clone(memory_format=_kept_order(result)))
        taken.add(_storage(result))
    return tuple(made)


def row_major(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Torch draws in the order of memory, and a plan's layouts must not change the numbers."""
    return [tensor.contiguous() for tensor in tensors]


def _is_whole(result: Tensor) -> bool:
    dense = result.is_contiguous() or result.is_contiguous(memory_format=torch.channels_last)
    return dense and result.untyped_storage().nbytes() == result.numel() * result.element_size()


def _kept_order(result: Tensor) -> torch.memory_format:
    """That in which a copy moves no element past another: a slice of channels_last images took
    three times as long in rows (dpn68, H200, 2026-11-23).
    """
    images = result.dim() == 4 and result.stride(1) == 1 and result.shape[1] > 1
    near = images and result.stride(3) >= result.shape[1] and result.stride(2) >= result.stride(3)
    return torch.channels_last if near else torch.contiguous_format


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
