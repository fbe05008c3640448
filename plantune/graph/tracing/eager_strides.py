"""The strides of what a module returns in eager.

No rule foretells them: kernels of torch choose layouts by device, dtype and size, and those for
tensors without memory choose others. So the module's forward runs once on real tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from plantune.base.canonical import digest, words
from plantune.base.generators import kept_numbers
from plantune.graph.nested import tensors_in
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.autocast import under
from plantune.graph.tracing.records import Record
from plantune.graph.tracing.shadow import Shadow
from plantune.graph.tracing.trace import Trace

# Of one result; None of one that is returned in rows, whatever eager does.
Strides = tuple[int, ...] | None
# They make rows of whatever they read.
PRODUCTS = frozenset(words("aten.linear.default aten.mm.default aten.addmm.default"))
# They make rows of rows, as pointwise ops do.
KEEPS_ROWS = frozenset(
    words("aten.softmax.int aten.log_softmax.int aten.to.dtype aten.dropout.default")
)


def strides_in_eager(
    module: nn.Module, call: Arguments, inputs: Sequence[Tensor], device: torch.device
) -> tuple[Strides, ...]:
    """Those of each result of a call with these inputs. Raises what the forward raises; nothing of
    the module's changes. Gradients are recorded if they are switched on, which some forwards look
    at.
    """
    shadow = Shadow(module, _own)
    args, kwargs = call.given([x.detach() for x in inputs])
    with (
        kept_numbers(device),
        _kept_buffers(module),
        saved_tensors_hooks(lambda saved: None, lambda saved: saved),
        under(call.autocast),
    ):
        made = tensors_in(shadow(*args, **kwargs))
    shared = Counter(map(_storage, (*made, *inputs, *shadow.state.values())))
    return tuple(_strides_of(tensor, shared[_storage(tensor)] > 1) for tensor in made)


def _own(tensor: Tensor) -> Tensor:
    """A weight itself, but a copy of a buffer: to autograd, one that is written has changed."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


@contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """Afterwards buffers hold what they held, also those that a function of the forward's holds.
    Only what was moved is written.
    """
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, kept in before:
                if not torch.equal(buffer, kept):
                    buffer.copy_(kept)


def _strides_of(tensor: Tensor, shared: bool) -> Strides:
    """A result has memory of its own: one that overlaps, or has gaps for others, is in rows."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in sizes if size > 1):
        if stride < reach or (shared and stride > reach):
            return None
        reach += stride * (size - 1)
    return tensor.stride()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def calls_of(traced: Trace) -> str | None:
    """Equal for forwards whose results have the same strides. None if these are always in rows,
    however weights and inputs are stored: the heads of most networks are products.
    """
    rows: set[int] = set()
    for record in traced.records:
        made = _tensors(record.result)
        if all(map(_in_rows, made)) and _makes_rows(record, rows):
            rows.update(map(id, made))
        else:
            rows.difference_update(map(id, made))
    results = [leaf for leaf in traced.leaves if isinstance(leaf, Tensor)]
    if all(id(tensor) in rows or not tensor.dim() for tensor in results):
        return None
    return digest([str(record.overload) for record in traced.records])


def _makes_rows(record: Record, rows: set[int]) -> bool:
    name = str(record.overload)
    if name in PRODUCTS:
        return True
    made, read = _tensors(record.result), _tensors((record.args, dict(record.kwargs)))
    if not read or not all(id(x) in rows or not x.dim() for x in read):
        return False
    views = any(result.alias_info is not None for result in record.overload._schema.returns)
    keeps = torch.Tag.pointwise in record.overload.tags or name in KEEPS_ROWS
    return views or (keeps and len({x.shape for x in (*read, *made) if x.dim()}) == 1)


def _in_rows(tensor: Tensor) -> bool:
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
