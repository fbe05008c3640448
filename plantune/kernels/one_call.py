"""What eager runs as one call where a graph has two ops: a convolution or a product, and its bias.

A batch norm in inference is two ops here, too, which take no longer than eager's one call: 61 us
and 58 of 64 images of 64x8x8 (one thread of a Xeon, 2026-11-28).
"""

from __future__ import annotations

from collections import Counter

import torch

from plantune.devices.cuda.workspaces import kept_workspaces
from plantune.devices.device import Runnable
from plantune.graph import Node, Step
from plantune.graph.fusions import Fusion, Item
from plantune.graph.ops.conv import geometry
from plantune.graph.ops.matmul import operands
from plantune.kernels.family import Values
from plantune.kernels.torch_ops import call_of

Calls = tuple[tuple[Node, ...], ...]
# With their biases. cuDNN's convolution has none: there eager adds it in a launch of its own.
BIASED = {"cpu": frozenset(("conv2d", "matmul")), "cuda": frozenset(("matmul",))}
# Where such pairs may be in a graph.
PAIRS = Fusion(
    "biased",
    (
        Item(BIASED["cpu"], optional=False, repeats=False),
        Item(frozenset(("add_channel",)), optional=False, repeats=False),
    ),
)


def calls_in(step: Step) -> Calls:
    """The nodes of a step, those together that run as one call."""
    reads = Counter(name for node in step.nodes for name in node.inputs)
    alone = {name for name in step.internal if reads[name] == 1}
    makers = {name: node for node in step.nodes for name in node.outputs if name in alone}
    pairs: dict[str, tuple[Node, ...]] = {}
    for node in step.nodes:
        maker = makers.get(node.inputs[0]) if node.inputs else None
        if maker is not None and _adds_bias(step, maker, node):
            pairs[node.name] = (maker, node)
    joined = {maker.name for maker, _ in pairs.values()}
    return tuple(pairs.get(n.name, (n,)) for n in step.nodes if n.name not in joined)


def is_one_call(step: Step, kind: str) -> bool:
    """Whether eager runs the ops of a step as one call, on this kind of arch."""
    return len(step.nodes) == 2 and len(calls_in(step)) == 1 and step.ops[0] in BIASED[kind]


def call_together(nodes: tuple[Node, ...], values: Values, loose: frozenset[str]) -> Runnable:
    """What runs the nodes of one call in each launch."""
    if len(nodes) == 1:
        return call_of(nodes[0], values, loose)
    product, adder = nodes
    (first, second), bias, result = product.inputs, adder.inputs[1], adder.outputs[0]

    def convolve() -> None:
        factors = (values[first], values[second], values[bias])
        values[result] = torch.conv2d(*factors, **geometry(product.attrs))

    def multiply() -> None:
        factors = operands((values[first], values[second]), product.attrs)
        torch.addmm(values[bias], *factors, out=values[result])

    if product.op == "conv2d":
        return convolve
    return kept_workspaces()(multiply) if values[result].is_cuda else multiply


def _adds_bias(step: Step, maker: Node, adder: Node) -> bool:
    """Whether a node adds to each channel of what another one makes, in the same dtype."""
    if maker.op not in BIASED["cpu"] or adder.op != "add_channel" or adder.attrs["axis"] != 1:
        return False
    types = [step.types[name] for name in (*maker.inputs, *adder.inputs, *adder.outputs)]
    return types[0].is_float and len({type_.dtype for type_ in types}) == 1
