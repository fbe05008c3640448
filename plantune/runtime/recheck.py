"""Proves that a plan from elsewhere computes the network here, once, before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plantune.errors import WrongResult
from plantune.graph.graph import Graph
from plantune.graph.types import TensorType
from plantune.memory import in_layout
from plantune.plan import Plan
from plantune.runtime.copies import copied
from plantune.runtime.live_state import CPU, HeldTensors
from plantune.runtime.pool import Pool, device_of
from plantune.space.search_space import SearchSpace

# Beside twice the framework's own error: some roundings of the largest value.
ROUNDINGS = 16


@torch.no_grad()
def recheck(
    graph: Graph,
    plan: Plan,
    space: SearchSpace,
    module: nn.Module,
    otherwise: torch.device = CPU,
) -> None:
    """Raises WrongResult where the plan's outputs are not the network's; `otherwise` is where one
    without a tensor of its own runs.

    A copy with random weights and images runs, in the module's mode: weights as they are at first
    may hide a mistake, as Fixup's zeros do.
    """
    # Of its own, so that loading a model moves no random number of the user's.
    random = torch.Generator(device_of(module, otherwise)).manual_seed(0)
    randomised = _randomised(copied(module), random)
    exact = copied(randomised).double()
    rival = copied(randomised)
    x = _drawn(graph.inputs[0][1], random)
    wanted = _outputs(exact(x.double() if x.is_floating_point() else x))
    theirs = _outputs(rival(x))
    with Pool(graph, plan, space, HeldTensors(randomised, otherwise)).lease() as instance:
        ours = instance.forward(x)
    for index, output in enumerate(wanted):
        bound = 2 * _error(theirs[index], output) + ROUNDINGS * torch.finfo(ours[index].dtype).eps
        error = _error(ours[index], output)
        if not error <= bound:
            text = f"output {index} is off by {error:.3g} of its size, allowed {bound:.3g}"
            raise WrongResult(f"the plan for {plan.network}: {text}", error, bound)


def _randomised(module: nn.Module, random: torch.Generator) -> nn.Module:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5, generator=random)
        else:
            parameter.uniform_(0.5, 1.0, generator=random)
    return module


def _drawn(type_: TensorType, random: torch.Generator) -> Tensor:
    drawn = torch.empty(type_.shape, dtype=type_.torch_dtype, device=random.device)
    drawn = drawn.normal_(generator=random) if type_.is_float else drawn.random_(generator=random)
    return in_layout(drawn, type_.layout) if drawn.dim() == 4 else drawn


def _outputs(result: Any) -> Sequence[Tensor]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _error(output: Tensor, exact: Tensor) -> float:
    """The largest difference as a part of the largest value."""
    return float((output.double() - exact).abs().max() / exact.abs().max())
