"""Random data on which a plan is judged, with what the network means by it.

The reference is the module itself in a wider dtype, or its graph where the module names its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plantune.base.generators import numbers_of
from plantune.devices.cuda.flags import references_in_float32
from plantune.devices.device import framework_alone
from plantune.errors import CannotJudge
from plantune.graph.graph import Graph, Node
from plantune.graph.layouts import strictly_in_layout
from plantune.graph.memory import in_rows
from plantune.graph.nested import tensors_in
from plantune.graph.ops.conv import leaves_unwritten
from plantune.graph.tracing.arguments import Arguments
from plantune.graph.tracing.autocast import under
from plantune.runtime.proof.distances import (
    BUFFER,
    GRADIENT,
    Results,
    distances,
    is_finite,
    names_of,
    narrowest,
)
from plantune.runtime.proof.draws import drawn, drawn_inputs
from plantune.runtime.proof.products import float32_products

# Of the random numbers that a network draws where it is compared.
SEED = 0
# What becomes of a value of that name when an op has made it.
Change = Callable[[Node, str, Tensor], Tensor]


def _as_it_is(node: Node, name: str, value: Tensor) -> Tensor:
    return value


def evaluated(
    graph: Graph,
    given: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    change: Change = _as_it_is,
) -> dict[str, Tensor]:
    """Every value of a graph from its sources, in its own dtypes or in `dtype`, in which go on also
    those that an op makes in a dtype that it names.

    What is random is drawn from one seed, as a program draws it: in its own dtype, row by row.
    """
    known = dict(given)
    if dtype is not None:
        known = {name: _as(dtype, value) for name, value in known.items()}
    with numbers_of(next(iter(given.values())).device, SEED):
        for node in graph.nodes:
            values = node.evaluate([known[value] for value in node.inputs], dtype)
            if dtype is not None:
                values = tuple(_as(dtype, value) for value in values)
            made = zip(node.outputs, values, strict=True)
            known.update((name, change(node, name, value)) for name, value in made)
    return known


def _as(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


# How much smaller images and weights become, in turn, where the framework overflows.
SCALES = ((1.0, 1.0), (2**-4, 1.0), (2**-8, 1.0), (2**-8, 0.5), (2**-8, 2**-6), (2**-8, 2**-12))
# Where the framework's outputs are off by more, they say nothing about a plan's. Gradients may be:
# through batch norm over few pixels they are chaotic.
MOST_OWN_ERROR = 0.1
MOST_ON_HOST = 1 << 24  # elements
# A rounding to a grid is off by a step / sqrt(12), by norm. Of numbers of 16 bits, 0.55 eps is more
# than half a step and less than one and a half.
MOVED, MOST_OF_A_STEP = 1 / 12, 0.55


@dataclass(frozen=True)
class Case:
    """Random data with what the framework makes of it, in its own dtype and in a wider one."""

    inputs: tuple[Tensor, ...]
    seeds: tuple[Tensor, ...]
    theirs: Results
    exact: Results


@dataclass(frozen=True)
class Called:
    """A module with the call that its graph is of."""

    module: nn.Module
    call: Arguments


def judgeable(network: Called, graph: Graph, random: torch.Generator) -> Case:
    """Random data on which the framework is finite and about right; raises CannotJudge."""
    for of_images, of_weights in SCALES:
        _randomise(network.module, random, of_weights)
        inputs = drawn_inputs(graph, network.call.examples, random, of_images)
        # Gradients of scalars are sums over all pixels, which overflow sooner than outputs do.
        seeds = tuple(drawn(type_, random, of_images) for _, type_ in graph.output_gradients)
        moved = [_moved(x, random) for x in inputs]
        with framework_alone():
            theirs = _of_framework(network, graph, moved, seeds)
        if not all(map(is_finite, theirs.values())):
            continue
        with framework_alone():
            exact = _exact(network, graph, inputs, seeds)
        if all(map(is_finite, exact.values())):
            own = dict(distances(graph, theirs, theirs, exact))
            if all(own[name].theirs <= MOST_OWN_ERROR for name in names_of(graph)):
                return Case(inputs, seeds, theirs, exact)
    raise CannotJudge(
        "the framework itself overflows, or is off by more than "
        f"{MOST_OWN_ERROR:.0%}, on random weights and images of any size, so the plan "
        "cannot be verified"
    )


def _randomise(module: nn.Module, random: torch.Generator, scale: float) -> None:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=scale * max(parameter[:1].numel(), 1) ** -0.5, generator=random)
        else:
            parameter.uniform_(0.5 * scale, scale, generator=random)


def rounded_again(network: Called, graph: Graph, case: Case, random: torch.Generator) -> Results:
    """The framework's results on the case's images and weights after one random rounding: a plan
    that folds norms into filters rounds those once more, too.
    """
    moved = [rounded(x, random) if x.is_floating_point() else x for x in case.inputs]
    weights = [w for w in network.module.parameters() if w.is_floating_point()]
    before = [weight.clone() for weight in weights]
    try:
        for weight in weights:
            weight.copy_(rounded(weight, random))
        return _of_framework(network, graph, moved, case.seeds)
    finally:
        for weight, own in zip(weights, before, strict=True):
            weight.copy_(own)


def _moved(x: Tensor, random: torch.Generator) -> Tensor:
    """Images in float64, after one random rounding: the framework is its own reference there, and
    what a rounding changes no plan can be blamed for.
    """
    return rounded(x, random) if x.dtype == torch.float64 else x


def rounded(x: Tensor, random: torch.Generator) -> Tensor:
    """The numbers after one random rounding. What fills its 16 bits cannot move by less than a step
    of them: one of 12 numbers does, which is as much, by norm, as a rounding of all.
    """
    noise, eps = torch.empty_like(x).uniform_(-1, 1, generator=random), torch.finfo(x.dtype).eps
    if x.dtype.itemsize > 2:
        return x * (1 + eps / 2 * noise)
    moved = noise.sign() * (noise.abs() > 1 - MOVED)
    return x + x * (MOST_OF_A_STEP * eps) * moved


def _wider(graph: Graph, device: torch.device) -> torch.dtype:
    """The reference's dtype: on a GPU float32 has a thousandth of a 16-bit dtype's error, and
    float64 would take most of the time of a first call. Training's also where other parameters are
    wide, if all that is judged follows from 16 bits: float64 would take 3.3 times the memory of
    eager's passes, float32 1.8 times (airbench94, 2,000 images, counted on meta tensors).
    """
    if device.type != "cuda":
        return torch.float64
    types = [type_.torch_dtype for _, type_ in graph.sources if type_.is_float]
    if graph.gradients:
        types = [*narrowest(graph).values()]
    return torch.float32 if all(dtype.itemsize <= 2 for dtype in types) else torch.float64


def _exact(
    network: Called, graph: Graph, inputs: Sequence[Tensor], seeds: Sequence[Tensor]
) -> Results:
    """What the module means in a wider dtype; by its graph if it names its own dtype somewhere."""
    dtype = _wider(graph, inputs[0].device)
    if not graph.draws:
        with suppress(RuntimeError):
            return _of_module(network, graph, inputs, seeds, dtype)
    return exact_of_graph(network, graph, inputs, seeds)


def exact_of_graph(
    network: Called,
    graph: Graph,
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    change: Change = _as_it_is,
) -> Results:
    """What the graph's ops mean in a wider dtype."""
    dtype = _wider(graph, inputs[0].device)
    with references_in_float32() if dtype == torch.float32 else nullcontext():
        return _of_graph(network, graph, inputs, seeds, dtype, change)


def _of_framework(
    network: Called, graph: Graph, inputs: Sequence[Tensor], seeds: Sequence[Tensor]
) -> Results:
    if graph.draws or _leaves_unwritten(graph, inputs[0].device):
        return op_by_op(network, graph, inputs, seeds)
    return _of_module(network, graph, inputs, seeds)


def _leaves_unwritten(graph: Graph, device: torch.device) -> bool:
    """Whether a gradient of eager's may be what was in its memory before."""
    grads = [node for node in graph.nodes if node.op == "conv2d_wgrad" and device.type == "cpu"]
    images = [graph.types[node.inputs[1]] for node in grads]
    return any(
        leaves_unwritten(image.shape, image.torch_dtype, node.attrs)
        for node, image in zip(grads, images, strict=True)
    )


def op_by_op(
    network: Called,
    graph: Graph,
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    layout: str | None = None,
    change: Change = _as_it_is,
) -> Results:
    """What the framework makes of the graph's ops, one by one, each result after a change; all
    images in `layout`, if one is given.
    """

    def laid_out(x: Tensor) -> Tensor:
        return strictly_in_layout(x, layout) if layout and x.dim() == 4 else x

    def both(node: Node, name: str, value: Tensor) -> Tensor:
        return laid_out(change(node, name, value))

    with _products(graph, inputs[0].device, None):
        given = [laid_out(x) for x in inputs], [laid_out(seed) for seed in seeds]
        return _of_graph(network, graph, *given, change=both)


def _of_graph(
    network: Called,
    graph: Graph,
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    dtype: torch.dtype | None = None,
    change: Change = _as_it_is,
) -> Results:
    names = [name for name, _ in (*graph.inputs, *graph.output_gradients)]
    given = {
        **dict(zip(names, (*inputs, *seeds), strict=True)),
        **dict((*network.module.named_parameters(), *network.module.named_buffers())),
    }
    known = evaluated(graph, given, dtype, change)
    named = zip(names_of(graph), graph.outputs, strict=True)
    results = {name: known[value] for name, value in named}
    gradients = {f"{GRADIENT}{name}": known[value] for name, value in graph.gradients}
    moved = {f"{BUFFER}{name}": known[value] for name, value in moving(graph)}
    return near(results | gradients | moved)


def moving(graph: Graph) -> list[tuple[str, str]]:
    """Buffers that a pass moves, with what they become; counters of batches are not judged."""
    return [(name, value) for name, value in graph.updates if graph.types[value].is_float]


def _of_module(
    network: Called,
    graph: Graph,
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> Results:
    """The framework's outputs and gradients, in its own dtype or in `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        widened = dtype if tensor.is_floating_point() else None
        # A buffer must not be the module's own, which a pass of the plan moves too.
        taken = tensor.to(widened or tensor.dtype, copy=True)
        # In channels_last torch's gradient of a padded average pool is wrong on a GPU.
        return in_rows(taken)

    module = network.module
    state = {
        name: cast(tensor.detach())
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    given = {name: cast(x) for (name, _), x in zip(graph.inputs, inputs, strict=True)}
    leaves = {**state, **given}
    targets = [name for name, _ in graph.gradients]
    for name in targets:
        leaves[name].requires_grad_()
    with torch.set_grad_enabled(bool(targets)), _products(graph, inputs[0].device, dtype):
        call = network.call.given([*given.values()])
        reached = _at_each_place(module, state)
        autocast = network.call.autocast if dtype is None else None

        def passes(made: Any) -> tuple[Results, Results]:
            outputs = dict(zip(names_of(graph), tensors_in(made), strict=True))
            with under(None):
                gradients = _gradients(graph, outputs, leaves, seeds, cast) if targets else {}
            return outputs, gradients

        with under(autocast):
            both, places = _Both(module, passes), {f"module.{k}": v for k, v in reached.items()}
            outputs, gradients = torch.func.functional_call(both, places, *call, tie_weights=False)
    moved = {f"{BUFFER}{name}": state[name] for name, _ in moving(graph)}
    return near({**{name: value.detach() for name, value in outputs.items()}, **gradients, **moved})


class _Both(nn.Module):
    """Both passes, as what a checkpoint runs again in the second one reads the module's weights."""

    def __init__(self, module: nn.Module, passes: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module, self.passes = module, passes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.passes(self.module(*args, **kwargs))


def _at_each_place(module: nn.Module, state: Results) -> Results:
    """The tensors of `state` by each place that holds one. Where torch itself looks for the places
    of tied weights, it leaves its own tensor in a submodule that has two names.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    by_tensor = {id(tensor): state[name] for name, tensor in named}
    return {
        f"{path}.{key}" if path else key: by_tensor[id(tensor)]
        for path, owner in module.named_modules()
        for table in (owner._parameters, owner._buffers)
        for key, tensor in table.items()
        if tensor is not None
    }


@contextmanager
def _products(graph: Graph, device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """How the framework multiplies. In float32 for outputs in 16 bits on a GPU, which takes the
    first use of few libraries; gradients come from the kernels that a training step uses.
    """
    narrow = _wider(graph, device) == torch.float32
    with (
        references_in_float32() if narrow and (dtype or not graph.gradients) else nullcontext(),
        float32_products() if narrow and not graph.gradients else nullcontext(),
    ):
        yield


def near(results: Results) -> Results:
    """Small results on the host: on a GPU each kind of kernel that compares them is loaded at its
    first use, which took 50 ms together (H200, 2026-11-22).
    """
    small = sum(value.numel() for value in results.values()) <= MOST_ON_HOST
    return {name: value.cpu() for name, value in results.items()} if small else results


def _gradients(
    graph: Graph, outputs: Results, leaves: Mapping[str, Tensor], seeds: Sequence[Tensor], cast: Any
) -> Results:
    by_name = {
        f"d({name})": value for name, value in zip(graph.outputs, outputs.values(), strict=True)
    }
    seeded = [by_name[name] for name, _ in graph.output_gradients]
    targets = [name for name, _ in graph.gradients]
    # A reentrant checkpoint knows no autograd.grad.
    torch.autograd.backward(seeded, [cast(seed) for seed in seeds])
    found = {name: leaves[name].grad for name in targets}
    return {
        f"{GRADIENT}{name}": torch.zeros_like(leaves[name]) if value is None else value
        for name, value in found.items()
    }
