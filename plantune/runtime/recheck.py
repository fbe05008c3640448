"""Proves that a plan computes the network here, before it is used for the first time.

Random weights and images, because weights as they are at first may hide a mistake, as Fixup's zeros
do. The reference is the module itself in a wider dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plantune.device import plain_float32
from plantune.errors import CannotJudge, WrongResult
from plantune.graph.graph import Graph
from plantune.graph.types import TensorType
from plantune.memory import in_layout
from plantune.plan import Plan
from plantune.runtime.copies import copied
from plantune.runtime.live_state import CPU
from plantune.runtime.pool import device_of
from plantune.runtime.program import Program
from plantune.space.search_space import SearchSpace

Results = dict[str, Tensor]

# How much smaller images and weights become, in turn, where the framework overflows.
SCALES = ((1.0, 1.0), (2**-4, 1.0), (2**-8, 1.0), (2**-8, 0.5), (2**-8, 2**-6), (2**-8, 2**-12))
# Where the framework's outputs are off by more, they say nothing about a plan's. Gradients may be:
# through batch norm over few pixels they are chaotic.
MOST_OWN_ERROR = 0.1
# A framework that rounds luckily is not held against the plan: what is wrong is wrong on each draw.
DRAWS = 3
# Beside twice the framework's own error. Winograd and Karatsuba tiles lose up to three bits, as the
# search allows; in 16 bits they are not used. For float64 there is nothing wider to judge by.
CONSTANTS = {torch.float64: 1e-10, torch.float32: 1e-6}

SUM_ROUNDINGS = 8
GRADIENT = "the gradient of "


@dataclass(frozen=True)
class _Case:
    """Random data with what the framework makes of it, in its own dtype and in a wider one."""

    x: Tensor
    seeds: tuple[Tensor, ...]
    theirs: Results
    exact: Results


@dataclass(frozen=True)
class _Distance:
    """Errors as parts of the result's size: the plan's, the framework's, and what is added."""

    ours: float
    theirs: float
    constant: float

    @property
    def bound(self) -> float:
        return 2 * self.theirs + self.constant

    def joined(self, other: _Distance) -> _Distance:
        ours, theirs = max(self.ours, other.ours), max(self.theirs, other.theirs)
        return _Distance(ours, theirs, self.constant)


def recheck(
    graph: Graph,
    plan: Plan,
    space: SearchSpace,
    module: nn.Module,
    otherwise: torch.device = CPU,
) -> None:
    """Raises WrongResult where the plan's outputs or gradients are not the network's, CannotJudge
    where the framework's own are of no use; `otherwise` is where a module without a tensor runs.

    A copy of the module runs, with the same training flags. Nothing of the user's changes.
    """
    device = device_of(module, otherwise)
    # Of its own, so that loading a model moves no random number of the user's.
    random = torch.Generator(device).manual_seed(0)
    with _plainly(device):
        network = copied(module)
        program = Program(graph, plan, space, device)
        found: dict[str, _Distance] = {}
        for _ in range(DRAWS):
            case = _judgeable(network, graph, random)
            ours = _of_program(program, network, case)
            found = _joined(found, dict(_distances(graph, ours, case)))
            wrong = {what: d for what, d in found.items() if not d.ours <= d.bound}
            if not wrong:
                return
    what, first = next(iter(wrong.items()))
    text = f"{what} is off by {first.ours:.3g} of its size, allowed {first.bound:.3g}"
    raise WrongResult(f"the plan for {plan.network}: {text}", first.ours, first.bound)


@contextmanager
def _plainly(device: torch.device) -> Iterator[None]:
    """As if the user had set nothing: no autocast, no inference mode, no search of cuDNN's."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        _on_gpu(device) if device.type == "cuda" else nullcontext(),
    ):
        yield


@contextmanager
def _on_gpu(device: torch.device) -> Iterator[None]:
    searches = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.benchmark = searches


def _judgeable(network: nn.Module, graph: Graph, random: torch.Generator) -> _Case:
    """Random data on which the framework is finite and about right; raises CannotJudge."""
    for of_images, of_weights in SCALES:
        _randomise(network, random, of_weights)
        x = _drawn(graph.inputs[0][1], random, of_images)
        seeds = tuple(_drawn(type_, random) for _, type_ in graph.output_gradients)
        theirs = _of_module(network, graph, _moved(x, random), seeds)
        if not all(map(_is_finite, theirs.values())):
            continue
        exact = _exact(network, graph, x, seeds)
        if all(map(_is_finite, exact.values())):
            case = _Case(x, seeds, theirs, exact)
            distances = dict(_distances(graph, theirs, case))
            if all(distances[name].theirs <= MOST_OWN_ERROR for name in _names(graph)):
                return case
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


def _drawn(type_: TensorType, random: torch.Generator, scale: float = 1.0) -> Tensor:
    drawn = torch.empty(type_.shape, dtype=type_.torch_dtype, device=random.device)
    if type_.is_float:
        drawn = drawn.normal_(std=scale, generator=random)
    else:
        drawn = drawn.random_(generator=random)
    return in_layout(drawn, type_.layout) if drawn.dim() == 4 else drawn


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


def _exact(network: nn.Module, graph: Graph, x: Tensor, seeds: Sequence[Tensor]) -> Results:
    """What the module means in a wider dtype; by its graph if it names its own dtype somewhere."""
    dtype = _wider(graph, x.device)
    with suppress(RuntimeError):
        return _of_module(network, graph, x, seeds, dtype)
    given = {
        **dict((*network.named_parameters(), *network.named_buffers())),
        graph.inputs[0][0]: x,
        **{name: seed for (name, _), seed in zip(graph.output_gradients, seeds, strict=True)},
    }
    wide = {name: t.to(dtype) if t.is_floating_point() else t for name, t in given.items()}
    with plain_float32() if dtype == torch.float32 else nullcontext():
        for node in graph.nodes:
            values = node.evaluate([wide[value] for value in node.inputs], dtype)
            wide.update(zip(node.outputs, values, strict=True))
    named = zip(_names(graph), graph.outputs, strict=True)
    results = {name: wide[value] for name, value in named}
    return results | {f"{GRADIENT}{name}": wide[value] for name, value in graph.gradients}


def _of_module(
    network: nn.Module,
    graph: Graph,
    x: Tensor,
    seeds: Sequence[Tensor],
    dtype: torch.dtype | None = None,
) -> Results:
    """The framework's outputs and gradients, in its own dtype or in `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor.clone()

    state = {
        name: cast(tensor.detach())
        for name, tensor in (*network.named_parameters(), *network.named_buffers())
    }
    leaves = {**state, graph.inputs[0][0]: cast(x)}
    targets = [name for name, _ in graph.gradients]
    for name in targets:
        leaves[name].requires_grad_()
    plainly = plain_float32() if dtype == torch.float32 else nullcontext()
    with torch.set_grad_enabled(bool(targets)), plainly:
        result = torch.func.functional_call(network, state, (leaves[graph.inputs[0][0]],))
        outputs = dict(zip(_names(graph), _tensors(result), strict=True))
        gradients = _gradients(graph, outputs, leaves, seeds, cast) if targets else {}
    return {**{name: value.detach() for name, value in outputs.items()}, **gradients}


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
    results = dict(zip(_names(graph), program.forward(case.x), strict=True))
    if graph.gradients:
        found = program.backward(*case.seeds)
        results |= {f"{GRADIENT}{name}": found[name] for name, _ in graph.gradients}
        program.forget()
    return results


def _names(graph: Graph) -> list[str]:
    return [f"output {index}" for index in range(len(graph.outputs))]


def _tensors(result: Any) -> Sequence[Tensor]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _is_finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


def _distances(graph: Graph, ours: Results, case: _Case) -> Iterator[tuple[str, _Distance]]:
    """Of each output by norm and by its worst element, of each gradient by norm: gradients jump
    where the input of a ReLU is within a rounding of zero.

    All gradients come from the same backward pass, so that the framework's worst one counts for
    each: alone, the sum that is a scalar's gradient is now and then right by luck.
    """
    outputs = _names(graph)
    for name in outputs:
        for what, kind in ((name, 2), (f"an element of {name}", math.inf)):
            own, other = (_error(name, r, case.exact, kind) for r in (ours, case.theirs))
            yield what, _Distance(own, other, _constant(ours[name]))
    gradients = [name for name in case.exact if name.startswith(GRADIENT)]
    theirs = [_error(name, case.theirs, case.exact, 2) for name in gradients]
    for name in gradients:
        own = _error(name, ours, case.exact, 2)
        yield name, _Distance(own, max(theirs), _of_sum(ours[name]))


def _error(name: str, results: Results, exact: Results, kind: float) -> float:
    """The norm of the difference as a part of the result's; infinite if anything is not finite."""
    result, wanted = results[name], exact[name].double()
    if not _is_finite(result) or result.shape != wanted.shape:
        return math.inf
    off = float(torch.linalg.vector_norm(result.double() - wanted, kind))
    size = _size(name, exact, kind)
    return off / size if size else math.inf if off else 0.0


def _size(name: str, exact: Results, kind: float) -> float:
    """The norm of a result. The gradient of a scalar may be a sum that cancels: the largest of them
    says how large its terms are.
    """
    single = name.startswith(GRADIENT) and exact[name].numel() == 1
    alike = [n for n, v in exact.items() if n.startswith(GRADIENT) and v.numel() == 1]
    norms = (
        torch.linalg.vector_norm(exact[n].double(), kind) for n in (alike if single else [name])
    )
    return max(map(float, norms))


def _constant(result: Tensor) -> float:
    """What is added to the bound. In 16 bits it is what storing the result rounds, as a part of
    the framework's error that it may escape by luck: that goes down with the number of elements.
    """
    if not result.is_floating_point():
        return 0.0
    rounding = torch.finfo(result.dtype).eps / 2
    return CONSTANTS.get(result.dtype, rounding / math.sqrt(max(result.numel(), 1)))


def _of_sum(result: Tensor) -> float:
    """What is added for a gradient. It may be a sum over all pixels that nearly cancels, and that
    kernels store in 16 bits several times on the way where torch's own keep it in float32.
    """
    return CONSTANTS.get(result.dtype, SUM_ROUNDINGS * torch.finfo(result.dtype).eps)


def _joined(before: Mapping[str, _Distance], now: Mapping[str, _Distance]) -> dict[str, _Distance]:
    return {what: d.joined(before[what]) if what in before else d for what, d in now.items()}
