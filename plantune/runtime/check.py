"""Compares a tuned module with its reference now, on inputs of the user's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from plantune.base.distance import Distance, Exact
from plantune.base.tolerances import AGAIN, tolerance
from plantune.errors import CannotJudge, WrongResult
from plantune.graph.nested import mapped, tensors_in
from plantune.runtime.calls.framework import LastCall
from plantune.runtime.module import TunedModule
from plantune.runtime.proof.cases import MOST_OWN_ERROR
from plantune.runtime.proof.roundings import eager_again
from plantune.runtime.watched.copies import copied


@dataclass(frozen=True)
class CheckResult:
    """`error` is the largest difference from float64 as a part of the largest value, `framework`
    the framework's own, `bound` what was allowed; `call` says how the tuned module ran.
    """

    error: float
    framework: float
    bound: float
    call: LastCall


def check(tuned: TunedModule, *inputs: Any, **named: Any) -> CheckResult:
    """Runs the tuned module and its reference on these arguments, as both are now. Raises
    WrongResult if an output is further from float64 than twice the framework's own distance, and
    CannotJudge if that says nothing because the module draws random numbers.

    Neither weights nor running statistics move. The result is that of the worst output.
    """
    if not isinstance(tuned, TunedModule):
        raise TypeError(f"check takes a module that plantune made, got a {type(tuned).__name__}")
    reference = tuned.reference
    buffers = [(buffer, buffer.clone()) for buffer in reference.buffers()]
    with torch.no_grad():
        theirs = tensors_in(copied(reference)(*inputs, **named))
        wide, wide_named = mapped(_widened, (inputs, named))
        exact = tensors_in(_wide(reference)(*wide, **wide_named))
        try:
            ours = tensors_in(tuned(*inputs, **named))
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
    call = tuned.last_call()
    if len(ours) != len(exact):
        text = f"the tuned module returns {len(ours)} values, the reference {len(exact)}"
        raise WrongResult(text, float("inf"), 0.0)
    compared = [_compared(*values, call) for values in zip(ours, theirs, exact, strict=True)]
    if any(not result.error <= result.bound for result in compared):
        compared = _excused(reference, (inputs, named), exact, compared)
    worst = max(compared, key=lambda result: result.error / result.bound, default=None)
    if worst is None:
        raise ValueError("the module returns no tensor to compare")
    wrong = [result for result in compared if not result.error <= result.bound]
    doubtful = wrong or any(result.framework > MOST_OWN_ERROR for result in compared)
    if doubtful and _differs_from_itself(reference, inputs, named, theirs):
        raise CannotJudge(
            "two calls of the reference differ: it draws random numbers; call eval() on the module "
            "that is optimized, or compare statistics"
        )
    if wrong:
        raise WrongResult(
            f"an output is off by {wrong[0].error:.3g} of its size, allowed {wrong[0].bound:.3g} "
            f"({call.how}: {call.reason}); after a change that nothing reports call refresh()",
            wrong[0].error,
            wrong[0].bound,
        )
    return worst


def _differs_from_itself(
    reference: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], theirs: Sequence[Tensor]
) -> bool:
    with torch.no_grad():
        again = tensors_in(copied(reference)(*inputs, **named))
    pairs = zip(theirs, again, strict=True)
    return not all(torch.allclose(one, other, equal_nan=True) for one, other in pairs)


def _excused(
    reference: nn.Module, given: Any, exact: Sequence[Tensor], compared: list[CheckResult]
) -> list[CheckResult]:
    """With the framework's largest error in both layouts and after other roundings."""
    random = torch.Generator(exact[0].device).manual_seed(0)
    for module, (inputs, named) in eager_again(reference, given, random, AGAIN):
        with torch.no_grad():
            theirs = tensors_in(module(*inputs, **named))
        pairs = zip(compared, theirs, exact, strict=True)
        compared = [_widened_by(*values) for values in pairs]
        if all(result.error <= result.bound for result in compared):
            break
    return compared


def _widened_by(result: CheckResult, theirs: Tensor, exact: Tensor) -> CheckResult:
    own = _compared(theirs, theirs, exact, result.call)
    if not math.isfinite(own.framework):
        return result
    return max(result, replace(own, error=result.error), key=lambda each: each.bound)


def _compared(ours: Tensor, theirs: Tensor, exact: Tensor, call: LastCall) -> CheckResult:
    reference = Exact(exact.double())
    error, framework = (reference.errors(result.double())[-1] for result in (ours, theirs))
    least = torch.finfo(torch.float64).tiny  # of counters, which are exact
    distance = Distance(error, framework, max(tolerance("check", ours.dtype), least))
    return CheckResult(error, framework, distance.bound, call)


def _wide(module: nn.Module) -> nn.Module:
    return copied(module).double()


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
