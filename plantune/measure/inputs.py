"""Random inputs of a step: in the domain of each op, and such that no mistake hides in them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from plantune.graph import Node, Step, TensorType
from plantune.graph.ops import Domain, op_named
from plantune.kernels.family import Values

# Integers that are not an index: every value of a pixel, and counters.
BELOW = {"uint8": 256, "bool": 2}
COUNTS_BELOW = 100
# Numbers that are scaled are drawn such that their sums fit every dtype.
LARGEST = 256.0
# Ops whose results are as large as their largest input.
SUMS = ("add", "sub", "add_channel")
# So many numbers around a half fit a float16 together, eight times over.
ADDENDS_MAX = 1 << 14
# Ops whose results are sums over images.
PRODUCTS_OF_VALUES = ("conv2d_wgrad", "matmul")


def draw_inputs(step: Step, random: torch.Generator) -> Values:
    """Random numbers for each input of a step, in the domain that its readers name.

    They are on the device where `random` draws.
    """
    drawn = {
        name: _drawn(type_, domain_of(step, name), name in step.constants, random)
        for name, type_ in step.inputs
    }
    for name, type_ in step.inputs:
        if type_.is_float:
            drawn[name] *= _size(step, name)
    makers = {value: node for node in step.nodes for value in node.outputs}
    for node in step.nodes:
        if (part := _part_of_sum(step, node)) < 1:
            for name in _addends(makers, node.inputs[0]) - step.constants:
                drawn[name] *= part
    return drawn


def domain_of(step: Step, name: str) -> Domain:
    """What the readers of an input say that it may hold."""
    for node in step.nodes:
        if name not in node.inputs:
            continue
        types = [step.types[value] for value in node.inputs]
        for position, value in enumerate(node.inputs):
            domain = op_named(node.op).domain(position, types, node.attrs)
            if value == name and domain.kind != "real":
                return domain
    return Domain()


def _size(step: Step, name: str) -> float:
    """How large numbers are drawn that are scaled first, as pixels are: scaled to next to nothing
    they would hide what is done with them.
    """
    for node in step.nodes:
        if node.inputs[0] == name and node.op == "cast":
            return _size(step, node.name)
        if node.inputs[0] == name and node.op == "affine" and node.attrs["alpha"]:
            size: float = min(1 / abs(float(node.attrs["alpha"])), LARGEST)
            return size
    return 1.0


def _part_of_sum(step: Step, node: Node) -> float:
    """How small the addends are whose sum would be infinite otherwise, and prove nothing."""
    if node.types[0].dtype != "float16":
        return 1.0
    return float(2.0 ** -math.ceil(math.log2(max(_number_of(step, node) / ADDENDS_MAX, 1))))


def _number_of(step: Step, node: Node) -> float:
    """How many numbers are added up for each of a node's results, where none of them is a weight:
    those are drawn small enough.
    """
    results = max(node.types[0].numel, 1)
    if node.op in ("sum", "sum_to"):
        return step.types[node.inputs[0]].numel / results
    if node.op in PRODUCTS_OF_VALUES and step.constants.isdisjoint(node.inputs):
        types = tuple(step.types[name] for name in node.inputs)
        return op_named(node.op).flops(types, node.types, node.attrs) / (2 * results)
    return 1.0


def _addends(makers: Mapping[str, Node], value: str) -> set[str]:
    """The inputs whose size a value has; of a product the first factor's alone. Each value is
    followed once: through the residuals of a ResNet-50 there are 65,536 ways.
    """
    found, seen, left = set[str](), set[str](), [value]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        maker = makers.get(name)
        if maker is None:
            found.add(name)
        else:
            left += maker.inputs if maker.op in SUMS else maker.inputs[:1]
    return found


def _below(type_: TensorType, domain: Domain) -> int:
    """A mask, or an index of 8 bits, holds less than what it is an index of may have."""
    if domain.kind != "index":
        return BELOW.get(type_.dtype, COUNTS_BELOW)
    most = BELOW.get(type_.dtype) or torch.iinfo(type_.torch_dtype).max + 1
    return min(domain.below, most)


def _drawn(type_: TensorType, domain: Domain, constant: bool, random: torch.Generator) -> Tensor:
    shape, dtype, place = type_.shape, type_.torch_dtype, random.device
    if domain.draw is not None:
        made: Tensor = domain.draw(random)
        return made
    if not type_.is_float:
        below = _below(type_, domain)
        return torch.randint(below, shape, generator=random, dtype=dtype, device=place)
    # Off centre, so that sums do not cancel to what rounding left.
    normal = torch.randn(shape, generator=random, dtype=torch.float64, device=place).add_(0.5)
    uniform = torch.rand(shape, generator=random, dtype=torch.float64, device=place)
    if domain.kind == "unit":
        normal = uniform
    elif domain.kind == "positive":
        normal = uniform + 0.5
    elif type_.numel == 1:
        normal = normal.sign() * (uniform + 0.5)  # Near 0 it would hide what it multiplies.
    elif not constant:
        normal = normal.where(uniform > 1 / 8, 0.0)  # ReLU leaves zeros; `<` is not `<=` there.
    elif len(shape) > 1:
        # As networks scale their weights.
        normal = normal.sub_(0.5).mul_(math.prod(shape[1:]) ** -0.5)
    return normal.to(dtype)
