"""Inputs and references are made once for a step and seed, whatever the candidate."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from plantune.base.canonical import Attrs
from plantune.devices.cuda.flags import planned_for
from plantune.devices.device import CPU
from plantune.errors import WrongResult
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels.family import Candidate
from plantune.kernels.registry import candidates
from plantune.measure import scenes
from plantune.measure.kept import Kept, tensors_in
from plantune.measure.numerics import check
from plantune.measure.scenes import Scenes

IMAGE = TensorType((2, 3, 5, 7))


@pytest.fixture(autouse=True)
def forgotten():
    scenes.forget()
    yield
    scenes.forget()


@pytest.fixture
def conv_named(step_of):
    def make(x: str, w: str) -> Step:
        def emit(b):
            image = b.input(x, TensorType((2, 4, 6, 6)))
            weight = b.parameter(w, TensorType((8, 4, 3, 3)))
            geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
            return b.emit("conv2d", image, weight, **geometry)

        return step_of(emit)

    return make


@pytest.fixture
def evaluations(monkeypatch):
    """The dtypes in which references are evaluated."""
    seen = []
    evaluate = Step.evaluate

    def counted(step, values, floats=None):
        seen.append(floats)
        return evaluate(step, values, floats)

    monkeypatch.setattr(Step, "evaluate", counted)
    return seen


def test_the_second_candidate_of_a_step_needs_no_reference(conv_named, space, evaluations):
    step = conv_named("x", "w")
    first, *others = candidates(step, space, ["framework", "onednn_conv"])
    check(step, first, space)
    assert torch.float64 in evaluations
    evaluations.clear()
    for candidate in others:
        check(step, candidate, space)
    assert len(others) > 2
    assert not evaluations


def test_equal_steps_share_whatever_their_values_are_called(conv_named, space, evaluations):
    candidate = Candidate("framework", Attrs(layout="nchw"))
    check(conv_named("x", "w"), candidate, space)
    evaluations.clear()
    check(conv_named("b", "a"), candidate, space)
    assert not evaluations


def test_seeds_share_nothing(conv_named):
    step = conv_named("x", "w")
    one, other = (Scenes(step, CPU, seed).first().inputs[0] for seed in (0, 1))
    assert not torch.equal(one, other)


def test_a_scene_is_the_same_when_it_is_made_again(conv_named):
    step = conv_named("x", "w")
    names = ("first", "other_data", "other_weights", "large")
    before = {name: getattr(Scenes(step, CPU, 0), name)() for name in names}
    for name in reversed(names):
        scenes.forget()
        again = getattr(Scenes(step, CPU, 0), name)()
        for x, y in zip(*map(tensors_in, (before[name], again)), strict=True):
            assert torch.equal(x, y)
        assert again.own == before[name].own


def test_a_candidate_cannot_spoil_what_the_next_one_is_given(relu_that_scribbles, check_fake):
    """Scenes are copied into the memory that kernels see."""
    step, family, right = relu_that_scribbles
    with pytest.raises(WrongResult, match="it wrote to its input"):
        check_fake(step, family)
    assert check_fake(step, right).error == 0


@pytest.fixture
def relu_that_scribbles(step_of, fake):
    step = step_of(lambda b: b.emit("relu", b.input("x", IMAGE)))
    return step, fake(lambda s, frame: frame.values["x"].fill_(7)), fake(lambda s, frame: None)


def test_references_are_made_by_one_thread_and_kernels_run_by_all(
    step_of, fake, check_fake, monkeypatch
):
    step = step_of(lambda b: b.emit("relu", b.input("x", IMAGE)))
    evaluate, references, kernels = Step.evaluate, set(), set()

    def counted(step, values, floats=None):
        if floats is not None:
            references.add(torch.get_num_threads())
        return evaluate(step, values, floats)

    monkeypatch.setattr(Step, "evaluate", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        check_fake(step, fake(lambda s, frame: kernels.add(torch.get_num_threads())))
        assert (references, kernels) == ({1}, {3})
        assert torch.get_num_threads() == 3
        monkeypatch.setattr("plantune.measure.threads.SMALL_BYTES", 0)
        references.clear()
        scenes.forget()
        check_fake(step, fake(lambda s, frame: None))
        assert references == {3}  # where parallel regions are large
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Block:
    memory: torch.Tensor
    again: tuple[torch.Tensor, ...]  # counted once


def block(size: int) -> Block:
    memory = torch.empty(size, dtype=torch.uint8)
    return Block(memory, (memory,))


def test_what_is_unused_for_longest_goes_first():
    kept, made = Kept(100), []

    def get(key, size=40):
        return kept.get(key, lambda: made.append(key) or block(size))

    for key in "abacab":  # c pushes b out, which then pushes c out
        get(key)
    assert made == ["a", "b", "c", "b"]


def test_what_has_no_room_is_made_each_time():
    kept, made = Kept(100), []
    for _ in range(2):
        kept.get("small", lambda: made.append("small") or block(60))
        kept.get("large", lambda: made.append("large") or block(101))
    assert made == ["small", "large", "large"]
    kept.forget()
    kept.get("small", lambda: made.append("small") or block(60))
    assert made[-1] == "small"
    assert len(made) == 4


def test_pytorchs_error_is_of_the_settings_that_hold(conv_named):
    """An error of tf32 is no bound where torch rounds nothing."""
    step = conv_named("x", "w")

    def under(precision):
        with planned_for((precision,) * 3):
            return Scenes(step, CPU, 0).first()

    assert under("tf32") is under("tf32")
    assert under("tf32") is not under("ieee")
