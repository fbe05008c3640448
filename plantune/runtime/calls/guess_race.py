"""Whether kernels that estimates chose are slower than the framework's: a few passes of both.

What it costs to go between kernels of two kinds is not estimated: of 20 networks, estimated at 0.2
to 0.7 of one graph of eager's kernels, two took 1.11 and 1.26 of it (H200, 32 images, 2026-11-23).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from plantune.graph.graph import Graph
from plantune.graph.step import phase_of
from plantune.graph.tracing.arguments import Arguments
from plantune.plans.plan import Plan
from plantune.runtime.captured.program_pool import ProgramPool
from plantune.runtime.proof.draws import drawn_inputs

ROUNDS, PASSES = 7, 3
# A guess that is not clearly slower stays.
CLEARLY = 1.02


def is_unsure(graph: Graph, plan: Plan) -> bool:
    """Whether the framework computes a part of each pass, which can be run for nothing else than
    its time: inference that writes no buffer and draws no number.
    """
    if graph.backward_from is not None or graph.updates or graph.draws:
        return False
    first = (choice.nodes[0] for choice in plan.choices if choice.candidate.family == "framework")
    nodes = (graph.nodes[graph.positions[name]] for name in first)
    return any(phase_of(graph, node) != "refresh" for node in nodes)


@torch.inference_mode(False)
@torch.no_grad()
def is_slower(guess: ProgramPool, other: ProgramPool, call: Arguments) -> bool:
    """Whether passes of the guess take clearly longer than those of the other, in turns."""
    random = torch.Generator(guess.device).manual_seed(0)
    inputs = drawn_inputs(guess.graph, call.examples, random)
    times: dict[ProgramPool, list[float]] = {guess: [], other: []}
    for turn in range(ROUNDS + 1):
        for pool in (guess, other) if turn % 2 else (other, guess):
            times[pool].append(_pass_s(pool, inputs))
    ours, theirs = (times[pool][1:] for pool in (guess, other))  # in the first both are made
    return all(by(ours) > CLEARLY * by(theirs) for by in (min, median))


def _pass_s(pool: ProgramPool, inputs: Sequence[Tensor]) -> float:
    _wait(pool.device)
    began = time.perf_counter()
    for _ in range(PASSES):
        pool.run(*inputs)
    _wait(pool.device)
    return (time.perf_counter() - began) / PASSES


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # all of a GPU breaks others' captures
