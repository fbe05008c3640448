"""Proves a candidate right before it is timed or trusted: against fp64, on random data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.device import Device
from plantune.distance import Distance, Exact
from plantune.gpus import device_for
from plantune.graph.step import Step
from plantune.kernels.family import Candidate, Values
from plantune.kernels.registry import family_named, refuse_illegal
from plantune.measure.scenes import LARGE, Masks, Poison, Scene, Scenes
from plantune.measure.threads import threads, threads_of_proof
from plantune.measure.trial import NANS, NUMBERS, Trial
from plantune.space.search_space import SearchSpace
from plantune.tolerances import tolerance

# Kernels that transform their input lose some digits next to a large value without being wrong.
LARGE_SLACK = 8.0


@dataclass(frozen=True)
class Numerics:
    """The error that came nearest to its bound. Both are parts of the result's size.

    `deterministic` is false where two runs on the same data differed in any bit.
    """

    error: float
    bound: float
    deterministic: bool


def check(
    step: Step,
    candidate: Candidate,
    space: SearchSpace,
    seed: int = 0,
    device: Device | None = None,
) -> Numerics:
    """Runs a candidate on random data in every way in which a program may run it, on a GPU of a
    later arch if that is the `device`.

    Raises IllegalCandidate if it cannot run the step, BuildError, and WrongResult where an error
    is over its bound, the kernel touches memory that is not its own, or a NaN or infinity is lost
    or reaches another image.
    """
    refuse_illegal(step, candidate, space)
    place = device or device_for(space.arch)
    with place.own_stream(), torch.no_grad():
        trial = Trial(step, candidate, space.arch, device)
        with threads(threads_of_proof(step)):
            return _checked(trial, Scenes(step, place, seed))


def _checked(trial: Trial, scenes: Scenes) -> Numerics:
    """All runs, each compared with the reference."""
    scene = scenes.first()
    data = scenes.named(scene.inputs)
    trial.put_constants(data)
    trial.put_data(data)
    first = trial.run("first run", NUMBERS)
    worst = [_judged(trial, first, scene)]
    again = trial.run("second run on the same data", NANS)
    deterministic = all(_same_bits(again[name], result) for name, result in first.items())
    if not deterministic:
        worst.append(_judged(trial, again, scene))

    scene = scenes.other_data()
    trial.put_data(scenes.named(scene.inputs), awkward=True)
    stale = trial.run("run on other data", NUMBERS, fresh_workspace=False)
    worst.append(_judged(trial, stale, scene))
    scene = scenes.other_weights()
    data = scenes.named(scene.inputs)
    trial.put_constants(data, awkward=True)
    trial.put_data(data)
    worst.append(_judged(trial, trial.run("run on other weights", NANS), scene))

    if not trial.step.draws:  # of NaN, some draw nothing but an error
        _check_poisons(trial, scenes, data)
        _check_large(trial, scenes)
    if trial.device.captures:
        worst += _replayed(trial, scenes)
    nearest = max(worst, key=lambda distance: distance.share)
    return Numerics(nearest.ours, nearest.bound, deterministic)


def _replayed(trial: Trial, scenes: Scenes) -> Iterator[Distance]:
    """The runs of a captured graph, each on other data and other weights."""
    trial.put_constants(scenes.named(scenes.first().inputs))  # stored as in a deployed program
    trial.capture()
    for number, (what, pattern) in enumerate((("first replay", NUMBERS), ("second replay", NANS))):
        scene = scenes.replayed(number)
        data = scenes.named(scene.inputs)
        trial.put_constants(data)
        trial.put_data(data)
        yield _judged(trial, trial.run(what, pattern), scene)


def _judged(trial: Trial, results: Values, scene: Scene, *, slack: float = 1.0) -> Distance:
    """The distance nearest to its bound; raises WrongResult if one is over `slack` times it."""
    worst = Distance(0.0, 0.0, 0.0)
    for (name, _), exact, own in zip(trial.step.outputs, scene.exact, scene.own, strict=True):
        distance = max(_distances(results[name], exact, own), key=lambda found: found.share)
        if not distance.share <= slack:
            text = f"{name!r}{exact.worst(results[name])}; relative error {distance.ours:.3g}"
            text += f" of the output, allowed {distance.bound:.3g}"
            raise trial.wrong(text, distance.ours, distance.bound)
        worst = max(worst, distance, key=lambda found: (found.share, found.bound))
    return worst


def _distances(result: Tensor, exact: Exact, own: Sequence[float]) -> Iterator[Distance]:
    """Of each kind; integers are exact."""
    tolerated = tolerance("step", result.dtype, result.numel())
    for error, theirs in zip(exact.errors(result), own, strict=True):
        yield Distance(error, theirs if result.is_floating_point() else 0.0, tolerated)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def _check_poisons(trial: Trial, scenes: Scenes, data: Values) -> None:
    """Each poison alone among `data`, whose constants are there again afterwards."""
    for name, value, poison in scenes.poisons():
        is_weight = name in trial.step.constants
        poisoned = scenes.named(poison.inputs)
        trial.put_data(poisoned)
        if is_weight:
            trial.put_constants(poisoned)
        results = trial.run(f"run with {value} in one element of {name!r}", NUMBERS)
        _require_shown(trial, results, poison, clean=not is_weight)
        if is_weight:
            trial.put_constants(data)


def _require_shown(trial: Trial, results: Values, poison: Poison, *, clean: bool) -> None:
    """The poison is where it must be; if `clean`, in no other image."""
    for (output, _), masks in zip(trial.step.outputs, poison.masks, strict=True):
        if masks is not None:
            _require_kept(trial, output, results[output], masks)
        if masks is not None and clean:
            _require_clean(trial, output, results[output], masks)


def _check_large(trial: Trial, scenes: Scenes) -> None:
    """The largest float16 in one element of each input that is not constant: where PyTorch's sums
    hold it, a kernel's do.
    """
    scene = scenes.large()
    trial.put_data(scenes.named(scene.inputs))
    results = trial.run(f"run with {LARGE:g} in one element of each input", NUMBERS)
    _judged(trial, results, scene, slack=LARGE_SLACK)


def _require_clean(trial: Trial, name: str, result: Tensor, masks: Masks) -> None:
    """No image has the poison that has none of it in the reference, or at least depends on none."""
    images = (len(result), -1) if result.dim() > 1 else (-1, 1)
    family = family_named(trial.candidate.family)
    clean = masks.clean & masks.apart if family.subtracts_pixels else masks.clean
    spread = clean & ~result.isfinite().reshape(images).all(1)
    if spread.any():
        place = torch.nonzero(spread)[0].tolist()
        text = f"{name!r}{place} has NaN or infinity, where the reference is finite"
        raise trial.wrong(text)


def _require_kept(trial: Trial, name: str, result: Tensor, masks: Masks) -> None:
    """The poison is in every element that must show it."""
    lost = (masks.as_nan & ~result.isnan()) | (masks.as_any & result.isfinite())
    if lost.any():
        place = torch.nonzero(lost)[0].tolist()
        value = result[tuple(place)].item()
        raise trial.wrong(f"{name!r}{place} is {value:.6g}: NaN or infinity is lost")
