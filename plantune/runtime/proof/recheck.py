"""Proves that a plan computes the network here, before it is used for the first time.

Random weights and images, because weights as they are at first may hide a mistake, as Fixup's zeros
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from plantune.base.distance import Distance
from plantune.base.generators import kept_numbers, numbers_of
from plantune.base.tolerances import AGAIN
from plantune.devices.cuda.flags import flags
from plantune.errors import WrongResult
from plantune.graph.graph import Graph
from plantune.graph.layouts import HOST_MEMORY
from plantune.graph.tracing.arguments import Arguments
from plantune.plans.checked_plan import CheckedPlan
from plantune.runtime.captured.program_pool import device_of
from plantune.runtime.program.program import Program
from plantune.runtime.proof.cases import SEED, Called, Case, judgeable, moving, near
from plantune.runtime.proof.distances import (
    BUFFER,
    GRADIENT,
    Distances,
    Pooled,
    Results,
    distances,
    is_finite,
    joined,
    names_of,
    widened,
)
from plantune.runtime.proof.roundings import is_wide, other_roundings
from plantune.runtime.watched.copies import copied

# A framework that rounds luckily is not held against the plan: what is wrong is wrong on each draw.
DRAWS = 3
# The gradient of a scalar is one number, whose errors say little on few draws: of two ways that are
# equally good, one has twice the other's pooled error on 8 draws in 3 of 100 cases, on 24 in none.
MOST_DRAWS = 24
# An error of more than that many times the bound is not bad luck.
HOPELESS = 8.0
# After so many of the framework's other results, more of them excuse no error of so many bounds.
SOME, FAR = 6, 100.0
TINY = torch.finfo(torch.float64).tiny
# A framework's gradient that is further off is chaotic itself, and excuses no other one. Jumps of
# up to 6e-4 were seen (se_resnet9_fixup, batch 64, float32).
MOST_JUMP = 1e-2


def recheck(
    checked: CheckedPlan,
    module: nn.Module,
    otherwise: torch.device = HOST_MEMORY,
    arguments: Arguments | None = None,
) -> None:
    """Raises WrongResult if the plan's outputs, gradients or new values of buffers are not the
    network's, CannotJudge where the framework's own cannot be used; `otherwise` is where a module
    without a tensor runs, `arguments` what it is called with if not with the graph's inputs by
    their place.

    A copy of the module runs, with the same training flags. Nothing of the user's changes. Where
    random numbers are drawn, the graph's ops run in its place, one by one and from the same state
    of torch's generator: of the same numbers the plan must make the same.
    """
    device, graph = device_of(module, otherwise), checked.graph
    call = arguments or Arguments(tuple(type_ for _, type_ in graph.inputs))
    # Of its own, so that loading a model moves no random number of the user's.
    random, roundings = (torch.Generator(device).manual_seed(seed) for seed in range(2))
    with _plainly(device), kept_numbers(device):
        network = Called(copied(module), call)
        program = Program(checked, device)
        found: Distances = {}
        excused: Distances = {}
        for draw in range(1, MOST_DRAWS + 1):
            case = judgeable(network, graph, random)
            before = _updated(network.module, graph)
            ours = _of_program(program, network.module, case)
            now = dict(distances(graph, ours, case.theirs, case.exact))
            found = joined(found, now)
            jump = _worst_jump(graph, found)
            with _as_before(network.module, before):
                excused = joined(excused, _excused(network, graph, case, now, jump, roundings))
            wrong = {w: d for w, d in excused.items() if not d.ours <= max(d.bound, jump(w))}
            if not wrong and (draw >= DRAWS or not graph.gradients):
                return
            if draw >= DRAWS and any(map(_is_surely_wrong, wrong.items())):
                break
    what, first = next(iter(wrong.items()))
    off = f"{what} is off by {first.ours:.3g} of its size, allowed {first.bound:.3g}"
    text = f"the plan for {checked.plan.problem.network}: {off}"
    raise WrongResult(text, first.ours, first.bound)


def _excused(
    network: Called,
    graph: Graph,
    case: Case,
    found: Distances,
    jump: Callable[[str], float],
    random: torch.Generator,
) -> Distances:
    """The distances of one draw. Where the plan is beyond a bound, the framework's errors are the
    largest of those in the other layout and after other roundings: no plan is blamed for that.
    """
    if all(d.ours <= max(d.bound, jump(what)) for what, d in found.items()):
        return found
    others = other_roundings(network, graph, case, random, AGAIN)
    for count, (theirs, exact) in enumerate(others, 1):
        if not all(map(is_finite, theirs.values())):
            continue
        again = dict(distances(graph, theirs, theirs, exact))
        found = {what: widened(d, again[what]) for what, d in found.items()}
        shares = [d.ours / max(d.bound, jump(what), TINY) for what, d in found.items()]
        if max(shares) <= 1 or (count >= SOME and max(shares) > FAR):
            break
    return found


def _updated(module: nn.Module, graph: Graph) -> dict[str, torch.Tensor]:
    """What a pass changes, as it is before."""
    buffers = dict(module.named_buffers())
    return {name: buffers[name].clone() for name, _ in graph.updates}


@contextmanager
def _as_before(module: nn.Module, before: dict[str, torch.Tensor]) -> Iterator[None]:
    """With the buffers of another time."""
    buffers = dict(module.named_buffers())
    now = {name: buffers[name].clone() for name in before}
    try:
        for name, value in before.items():
            buffers[name].copy_(value)
        yield
    finally:
        for name, value in now.items():
            buffers[name].copy_(value)


def _worst_jump(graph: Graph, found: Distances) -> Callable[[str], float]:
    """What one input of a ReLU may do to a gradient if rounding moves it across zero: as much as it
    did to the framework's worst gradient.

    In float32 such jumps are rare and far larger than all rounding: a few draws may show some of
    the plan's and none of the framework's. In 16 bits each draw has many of both. A gradient that
    is off by more than all of it is zero but for rounding, and shows no jump.
    """
    gradients = [d.theirs for what, d in found.items() if what.startswith(GRADIENT)]
    jumps = [own for own in gradients if own <= 1]
    worst = min(max(jumps, default=0.0), MOST_JUMP) if is_wide(graph) else 0.0
    return lambda what: worst if what.startswith(GRADIENT) else 0.0


def _is_surely_wrong(named: tuple[str, Distance]) -> bool:
    """Whether more draws would change nothing."""
    _, distance = named
    pooled = isinstance(distance, Pooled)
    return not pooled or not distance.ours <= HOPELESS * distance.bound


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


def _of_program(program: Program, network: nn.Module, case: Case) -> Results:
    graph = program.graph
    state = dict((*network.named_parameters(), *network.named_buffers()))
    program.refresh({name: state[name] for name, _ in (*graph.parameters, *graph.buffers)})
    with numbers_of(case.inputs[0].device, SEED):
        results = dict(zip(names_of(graph), program.forward(*case.inputs), strict=True))
        if graph.gradients:
            found = program.backward(*case.seeds, again=False)
            results |= {f"{GRADIENT}{name}": found[name] for name, _ in graph.gradients}
            program.forget()
    results |= {f"{BUFFER}{name}": state[name] for name, _ in moving(graph)}
    return near(results)
