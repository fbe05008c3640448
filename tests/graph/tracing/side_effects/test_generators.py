"""Random numbers of Python's and numpy's, of which a trace would keep one draw for all calls."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plantune
from plantune.errors import UnsupportedModule

Draw = Callable[[], float]


class LayerDrop(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(3, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if not self.training or self.draw() < 0.5 else x


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "Python's random"),
        (lambda: random.uniform(0, 1), "Python's random"),
        (lambda: np.random.rand(), "numpy.random"),  # noqa: PLW0108 - a copy of the method has its own
        (lambda: np.random.normal(0, 1), "numpy.random"),
    ],
)
def test_a_forward_that_draws_is_refused(draw: Draw, name: str) -> None:
    with pytest.raises(UnsupportedModule, match=f"draws from {name}"):
        plantune.optimize(LayerDrop(draw), torch.randn(2, 3), mode="train")


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_one_that_draws_only_in_training_is_planned_in_eval(draw: Draw) -> None:
    plantune.optimize(LayerDrop(draw).eval(), torch.randn(2, 3))


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_of_another_thread_are_its_own(draw: Draw) -> None:
    """It draws in the trace and goes on, as one that prepares samples does."""
    over, drawn = threading.Event(), threading.Event()

    def prepare() -> None:
        while not over.is_set():
            draw()
            drawn.set()

    def wait() -> float:
        drawn.clear()
        assert drawn.wait(30)
        return 0.0

    thread = threading.Thread(target=prepare)
    thread.start()
    try:
        plantune.optimize(LayerDrop(wait), torch.randn(2, 3), mode="train")
    finally:
        over.set()
        thread.join()


def test_a_forward_that_draws_while_another_thread_rests() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with pytest.raises(UnsupportedModule, match="Python's random"):
            plantune.optimize(LayerDrop(random.random), torch.randn(2, 3), mode="train")
    finally:
        over.set()
        thread.join()


FIRST = """
from torch import nn
from plantune.graph.tracing.side_effects.watch import SideEffects
with SideEffects(nn.Identity(), SystemExit).watched([]):
    import numpy.random
    print("loaded", flush=True)
with SideEffects(nn.Identity(), SystemExit).watched([]):
    numpy.random.rand()
"""


def test_the_first_draw_of_all() -> None:
    """To load numpy.random is no draw."""
    ran = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False)
    assert ran.stdout == "loaded\n"
    assert "draws from numpy.random" in ran.stderr


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x + torch.rand(3)


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return seeded(x)


def drawn_twice(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    once = torch.rand(3)
    torch.set_rng_state(state)
    return x + once - torch.rand(3)


@pytest.mark.parametrize("forward", [seeded, forked, drawn_twice])
def test_a_forward_that_sets_torchs_random_numbers_is_refused(
    forward: Callable[[Tensor], Tensor],
) -> None:
    module = nn.Identity()
    module.forward = forward
    with pytest.raises(UnsupportedModule, match=r"sets torch's random numbers.*backend="):
        plantune.optimize(module, torch.randn(2, 3))
    torch.manual_seed(5)  # as ever afterwards
    assert torch.initial_seed() == 5


def test_another_thread_may_set_them_meanwhile() -> None:
    def elsewhere(x: Tensor) -> Tensor:
        thread = threading.Thread(target=torch.manual_seed, args=(7,))
        thread.start()
        thread.join()
        return x + 1

    module = nn.Identity()
    module.forward = elsewhere
    plantune.optimize(module, torch.randn(2, 3))
    assert torch.initial_seed() == 7


@torch.compile(backend="eager")
def compiled(x: Tensor) -> Tensor:
    return x.relu() * 2


class Compiled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return compiled(super().forward(x))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_forward_may_call_what_dynamo_compiles() -> None:
    """It sets the generator to what it was before."""
    plantune.optimize(Compiled(3, 3).eval(), torch.randn(2, 3))


class Holding(nn.Module):
    """Its forward moves what it holds."""

    def __init__(self, held: Any, move: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.held, self.move = nn.Linear(3, 3), held, move

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.move(self.held)


def counted(held: Any) -> float:
    held.calls += 1
    return float(held.calls)


def queued(held: Any) -> float:
    held.append(2.0)
    return float(held[-1])


def summed(held: Any) -> float:
    held += 1
    return float(held.sum())


MOVED = {
    "Python's generator": (lambda: random.Random(3), random.Random.random),
    "numpy's generator": (lambda: np.random.default_rng(3), np.random.Generator.random),
    "numpy's old one": (lambda: np.random.RandomState(3), np.random.RandomState.rand),
    "one in a list": (lambda: [random.Random(3)], lambda held: held[0].random()),
    "a counter": (lambda: types.SimpleNamespace(calls=0), counted),
    "a queue": (lambda: deque([1.0], maxlen=4), queued),
    "an array": (lambda: np.zeros(3), summed),
}


@pytest.mark.parametrize(("make", "move"), MOVED.values(), ids=MOVED)
def test_what_a_module_holds_and_a_forward_moves(
    make: Callable[[], Any], move: Callable[[Any], float]
) -> None:
    """It is where it was afterwards, so that the module itself goes on as if it was never tried."""
    module = Holding(make(), move)
    with pytest.raises(UnsupportedModule, match=r"forward that (draws from|changes) self\.held"):
        plantune.optimize(module, torch.randn(2, 3))
    assert move(module.held) == move(make())


def test_a_forward_that_only_counts_up_is_refused() -> None:
    with pytest.raises(UnsupportedModule, match=r"changes self\.held"):
        plantune.optimize(Holding(itertools.count(1), next), torch.randn(2, 3))


@pytest.mark.parametrize(
    "held", [random.Random(3), deque([1.0]), np.ones(3), types.SimpleNamespace(calls=2, seen=[])]
)
def test_what_is_held_and_not_moved(held: Any) -> None:
    plantune.optimize(Holding(held, lambda _: 2.0), torch.randn(2, 3))
