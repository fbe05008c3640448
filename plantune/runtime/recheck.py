"""Proves that a plan computes the network here, before it is used for the first time.

Random weights and images, because weights as they are at first may hide a mistake, as Fixup's zeros
do. The reference is the module itself in a wider dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plantune.cuda.flags import flags, plain_float32
from plantune.distance import Distance
from plantune.errors import CannotJudge, WrongResult
from plantune.generators import kept_numbers, numbers_of
from plantune.graph.arguments import Arguments
from plantune.graph.autocast import under
from plantune.graph.graph import Graph
from plantune.graph.memory import in_rows
from plantune.graph.nested import tensors_in
from plantune.layouts import HOST_MEMORY
from plantune.plan import Plan
from plantune.products import float32_products
from plantune.runtime.copies import copied
from plantune.runtime.distances import (
    GRADIENT,
    Distances,
    Results,
    distances,
    is_finite,
    joined,
    names_of,
)
from plantune.runtime.draws import drawn, drawn_inputs
from plantune.runtime.evaluated import SEED, evaluated
from plantune.runtime.pool import device_of
from plantune.runtime.program import Program
from plantune.space.search_space import SearchSpace

# How much smaller images and weights become, in turn, where the framework overflows.
SCALES = ((1.0, 1.0), (2**-4, 1.0), (2**-8, 1.0), (2**-8, 0.5), (2**-8, 2**-6), (2**-8, 2**-12))
# Where the framework's outputs are off by more, they say nothing about a plan's. Gradients may be:
# through batch norm over few pixels they are chaotic.
MOST_OWN_ERROR = 0.1
# A framework that rounds luckily is not held against the plan: what is wrong is wrong on each draw.
DRAWS = 3
# The gradient of a scalar is one number, whose errors say little on few draws: of two ways that are
# equally good, one has twice the other's pooled error on 8 draws in 3 of 100 cases, on 24 in none.
MOST_DRAWS = 24
# An error of more than that many times the bound is not bad luck.
HOPELESS = 8.0
# A framework's gradient that is further off is chaotic itself, and excuses no other one. Jumps of
# up to 6e-4 were seen (se_resnet9_fixup, batch 64, float32).
MOST_JUMP = 1e-2
MOST_ON_HOST = 1 << 24  # elements


@dataclass(frozen=True)
class _Case:
    """Random data with what the framework makes of it, in its own dtype and in a wider one."""

    inputs: tuple[Tensor, ...]
    seeds: tuple[Tensor, ...]
    theirs: Results
    exact: Results


@dataclass(frozen=True)
class _Called:
    """A module with the call that its graph is of."""

    module: nn.Module
    call: Arguments


def recheck(
    graph: Graph,
    plan: Plan,
    space: SearchSpace,
    module: nn.Module,
    otherwise: torch.device = HOST_MEMORY,
    arguments: Arguments | None = None,
) -> None:
    """Raises WrongResult if the plan's outputs or gradients are not the network's, CannotJudge
    where the framework's own are of no use; `otherwise` is where a module without a tensor runs,
    `arguments` what it is called with if not with the graph's inputs by their place.

    A copy of the module runs, with the same training flags. Nothing of the user's changes. Where
    random numbers are drawn, the graph's ops run in its place, one by one and from the same state
    of torch's generator: of the same numbers the plan must make the same.
    """
    device = device_of(module, otherwise)
    call = arguments or Arguments(tuple(type_ for _, type_ in graph.inputs))
    # Of its own, so that loading a model moves no random number of the user's.
    random = torch.Generator(device).manual_seed(0)
    with _plainly(device), kept_numbers(device):
        network = _Called(copied(module), call)
        program = Program(graph, plan, space, device)
        found: Distances = {}
        for draw in range(1, MOST_DRAWS + 1):
            case = _judgeable(network, graph, random)
            ours = _of_program(program, network.module, case)
            found = joined(found, dict(distances(graph, ours, case.theirs, case.exact)))
            jump = _worst_jump(graph, found)
            wrong = {what: d for what, d in found.items() if not d.ours <= max(d.bound, jump(what))}
            if not wrong and (draw >= DRAWS or not graph.gradients):
                return
            if draw >= DRAWS and any(map(_is_surely_wrong, wrong.items())):
                break
    what, first = next(iter(wrong.items()))
    text = f"{what} is off by {first.ours:.3g} of its size, allowed {first.bound:.3g}"
    raise WrongResult(f"the plan for {plan.problem.network}: {text}", first.ours, first.bound)


def _worst_jump(graph: Graph, found: Distances) -> Callable[[str], float]:
    """What one input of a ReLU may do to a gradient if rounding moves it across zero: as much as it
    did to the framework's worst gradient.

    In float32 such jumps are rare and far larger than all rounding: a few draws may show some of
    the plan's and none of the framework's. In 16 bits each draw has many of both.
    """
    rare = all(type_.torch_dtype.itemsize >= 4 for _, type_ in graph.parameters)
    gradients = [d.theirs for what, d in found.items() if what.startswith(GRADIENT)]
    worst = min(max(gradients, default=0.0), MOST_JUMP) if rare else 0.0
    return lambda what: worst if what.startswith(GRADIENT) else 0.0


def _is_surely_wrong(named: tuple[str, Distance]) -> bool:
    """Whether more draws would change nothing."""
    what, distance = named
    return not what.startswith(GRADIENT) or not distance.ours <= HOPELESS * distance.bound


@contextmanager
def _plainly(device: torch.device) -> Iterator[None]:
    """As if the user had set nothing: no autocast, no inference mode, no search of cuDNN's."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        flags(benchmark=False),
    ):
        yield


def _judgeable(network: _Called, graph: Graph, random: torch.Generator) -> _Case:
    """Random data on which the framework is finite and about right; raises CannotJudge."""
    for of_images, of_weights in SCALES:
        _randomise(network.module, random, of_weights)
        inputs = drawn_inputs(graph, network.call.examples, random, of_images)
        # Gradients of scalars are sums over all pixels, which overflow sooner than outputs do.
        seeds = tuple(drawn(type_, random, of_images) for _, type_ in graph.output_gradients)
        moved = [_moved(x, random) for x in inputs]
        theirs = _of_framework(network, graph, moved, seeds)
        if not all(map(is_finite, theirs.values())):
            continue
        exact = _exact(network, graph, inputs, seeds)
        if all(map(is_finite, exact.values())):
            own = dict(distances(graph, theirs, theirs, exact))
            if all(own[name].theirs <= MOST_OWN_ERROR for name in names_of(graph)):
                return _Case(inputs, seeds, theirs, exact)
    raise CannotJudge(
        "the framework itself overflows, or is off by more than "
        f"{MOST_OWN_ERROR:.0%}, on random weights and images however small, so that nothing "
        "can prove the plan; `plantune search` judges it step by step"
    )


def _randomise(module: nn.Module, random: torch.Generator, scale: float) -> None:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=scale * parameter[0].numel() ** -0.5, generator=random)
        else:
            parameter.uniform_(0.5 * scale, scale, generator=random)


def _moved(x: Tensor, random: torch.Generator) -> Tensor:
    """Images in float64, after one random rounding: the framework is its own reference there, and
    what a rounding changes no plan can be blamed for.
    """
    if x.dtype != torch.float64:
        return x
    noise = torch.empty_like(x).uniform_(-1, 1, generator=random)
    return x * (1 + torch.finfo(x.dtype).eps / 2 * noise)


def _wider(graph: Graph, device: torch.device) -> torch.dtype:
    """The reference's dtype: on a GPU float32 has a thousandth of a 16-bit dtype's error, and
    float64 would take most of the time of a first call.
    """
    types = [type_ for _, type_ in graph.sources if type_.is_float]
    short = all(type_.torch_dtype.itemsize <= 2 for type_ in types)
    return torch.float32 if short and device.type == "cuda" else torch.float64


def _exact(
    network: _Called, graph: Graph, inputs: Sequence[Tensor], seeds: Sequence[Tensor]
) -> Results:
    """What the module means in a wider dtype; by its graph if it names its own dtype somewhere."""
    dtype = _wider(graph, inputs[0].device)
    if not graph.draws:
        with suppress(RuntimeError):
            return _of_module(network, graph, inputs, seeds, dtype)
    with plain_float32() if dtype == torch.float32 else nullcontext():
        return _of_graph(network, graph, inputs, seeds, dtype)


def _of_framework(
    network: _Called, graph: Graph, inputs: Sequence[Tensor], seeds: Sequence[Tensor]
) -> Results:
    if not graph.draws:
        return _of_module(network, graph, inputs, seeds)
    with _products(graph, inputs[0].device, None):
        return _of_graph(network, graph, inputs, seeds)


def _of_graph(
    network: _Called,
    graph: Graph,
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> Results:
    names = [name for name, _ in (*graph.inputs, *graph.output_gradients)]
    given = {
        **dict(zip(names, (*inputs, *seeds), strict=True)),
        **dict((*network.module.named_parameters(), *network.module.named_buffers())),
    }
    known = evaluated(graph, given, dtype)
    named = zip(names_of(graph), graph.outputs, strict=True)
    results = {name: known[value] for name, value in named}
    gradients = {f"{GRADIENT}{name}": known[value] for name, value in graph.gradients}
    return _near(results | gradients)


def _of_module(
    network: _Called,
    graph: Graph,
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> Results:
    """The framework's outputs and gradients, in its own dtype or in `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        taken = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor.clone()
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
        args, kwargs = network.call.given([*given.values()])
        held = _at_each_place(module, state)
        with under(network.call.autocast if dtype is None else None):
            result = torch.func.functional_call(module, held, args, kwargs, tie_weights=False)
        outputs = dict(zip(names_of(graph), tensors_in(result), strict=True))
        gradients = _gradients(graph, outputs, leaves, seeds, cast) if targets else {}
    return _near({**{name: value.detach() for name, value in outputs.items()}, **gradients})


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
        plain_float32() if narrow and (dtype or not graph.gradients) else nullcontext(),
        float32_products() if narrow and not graph.gradients else nullcontext(),
    ):
        yield


def _near(results: Results) -> Results:
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
    found = torch.autograd.grad(
        seeded,
        [leaves[name] for name in targets],
        [cast(seed) for seed in seeds],
        allow_unused=True,
    )
    zeros = (torch.zeros_like(leaves[name]) for name in targets)
    return {
        f"{GRADIENT}{name}": zero if value is None else value
        for name, value, zero in zip(targets, found, zeros, strict=True)
    }


def _of_program(program: Program, network: nn.Module, case: _Case) -> Results:
    graph = program.graph
    state = dict((*network.named_parameters(), *network.named_buffers()))
    program.refresh({name: state[name] for name, _ in (*graph.parameters, *graph.buffers)})
    with numbers_of(case.inputs[0].device, SEED):
        results = dict(zip(names_of(graph), program.forward(*case.inputs), strict=True))
    if graph.gradients:
        found = program.backward(*case.seeds)
        results |= {f"{GRADIENT}{name}": found[name] for name, _ in graph.gradients}
        program.forget()
    return _near(results)
