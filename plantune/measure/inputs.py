"""Random inputs of a step: in the domain of each op, and such that no mistake hides in them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plantune.graph.ops import Domain, op_named
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.family import Values


def draw_inputs(step: Step, random: torch.Generator) -> Values:
    """Random numbers for each input of a step, in the domain that its readers name.

    They lie where `random` draws them.
    """
    return {
        name: _drawn(type_, _domain(step, name), name in step.constants, random)
        for name, type_ in step.inputs
    }


def _domain(step: Step, name: str) -> Domain:
    for node in step.nodes:
        types = [step.types[value] for value in node.inputs]
        for position, value in enumerate(node.inputs):
            domain = op_named(node.op).domain(position, types, node.attrs)
            if value == name and domain.kind != "real":
                return domain
    return Domain()


def _drawn(type_: TensorType, domain: Domain, constant: bool, random: torch.Generator) -> Tensor:
    shape, dtype, place = type_.shape, type_.torch_dtype, random.device
    if not type_.is_float:
        below = domain.below if domain.kind == "index" else 100
        return torch.randint(below, shape, generator=random, dtype=dtype, device=place)
    # Off centre, so that sums do not cancel to what rounding left.
    normal = torch.randn(shape, generator=random, dtype=torch.float64, device=place) + 0.5
    uniform = torch.rand(shape, generator=random, dtype=torch.float64, device=place)
    if domain.kind == "positive":
        normal = uniform + 0.5
    elif type_.numel == 1:
        normal = normal.sign() * (uniform + 0.5)  # Near 0 it would hide what it multiplies.
    elif not constant:
        normal = normal.where(uniform > 1 / 8, 0.0)  # ReLU leaves zeros; `<` is not `<=` there.
    elif len(shape) > 1:
        normal = (normal - 0.5) * math.prod(shape[1:]) ** -0.5  # As networks scale their weights.
    return normal.to(dtype)
