"""Proves a candidate right before it is timed or trusted: against fp64, on random data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from plantune.base.distance import Distance
from plantune.base.tolerances import tolerance
from plantune.devices.device import Device
from plantune.devices.gpus import device_for
from plantune.graph.step import Step
from plantune.kernels.family import Candidate, Values
from plantune.kernels.registry import resolve_legal
from plantune.kernels.resolved import ResolvedStep
from plantune.measure.scenes import LARGE, Errors, Masks, Poison, Scene, Scenes, larger
from plantune.measure.threads import threads, threads_of_proof
from plantune.measure.trial import NANS, NUMBERS, Trial
from plantune.space.arch import Arch
from plantune.space.search_space import SearchSpace

# Makes the results of PyTorch's own kernels for one output.
Own = Callable[[], Iterator[Tensor]]
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
    return check_resolved(resolve_legal(step, candidate, space), space.arch, seed, device)


def check_resolved(
    chosen: ResolvedStep, arch: Arch, seed: int = 0, device: Device | None = None
) -> Numerics:
    """`check`, of a candidate that can run its step."""
    place = device or device_for(arch)
    with place.own_stream(), torch.no_grad():
        trial = Trial(chosen, arch, device)
        with threads(threads_of_proof(chosen.step)):
            return _checked(trial, Scenes(chosen.step, place, seed))


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
    made = [results[name] for name, _ in trial.step.outputs]
    errors, own = _errors(trial, results, scene), scene.own
    nearest, others = _nearest(made, errors, own), _other_errors(trial, scene)
    while any(slack < d.share < math.inf for d in nearest):
        other = next(others, None)
        if other is None:
            break
        if any(map(math.isinf, chain.from_iterable(other))):
            continue
        own = larger(own, other)
        nearest = _nearest(made, errors, own)
    for (name, _), distance, exact in zip(trial.step.outputs, nearest, scene.exact, strict=True):
        if not distance.share <= slack:
            text = f"{name!r}{exact.worst(results[name])}; relative error {distance.ours:.3g}"
            text += f" of the output, allowed {distance.bound:.3g}"
            raise trial.wrong(text, distance.ours, distance.bound)
    return max(nearest, key=lambda found: (found.share, found.bound))


def _errors(trial: Trial, results: Values, scene: Scene) -> Errors:
    outputs = zip(scene.exact, trial.step.outputs, strict=True)
    return tuple(exact.errors(results[name]) for exact, (name, _) in outputs)


def _other_errors(trial: Trial, scene: Scene) -> Iterator[Errors]:
    """PyTorch's for inputs in the layouts in which the candidate reads them, then after other
    roundings.
    """
    yield from (_errors(trial, values, scene) for values in trial.theirs())
    yield from scene.again()


def _nearest(made: Sequence[Tensor], errors: Errors, own: Errors) -> list[Distance]:
    """The distance of each output of the kind that is nearest to its bound; integers are exact."""
    found = []
    for result, ours, theirs in zip(made, errors, own, strict=True):
        tolerated = tolerance("step", result.dtype, result.numel())
        floats = result.is_floating_point()
        kinds = zip(ours, theirs if floats else [0.0] * len(theirs), strict=True)
        distances = (Distance(*errors_, tolerated) for errors_ in kinds)
        found.append(max(distances, key=lambda distance: distance.share))
    return found


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
        if masks is None:
            continue
        own = partial(_results_named, output, trial, poison)
        _require_kept(trial, output, results[output], masks, own)
        if clean:
            _require_clean(trial, output, results[output], masks, own)


def _results_named(output: str, trial: Trial, poison: Poison) -> Iterator[Tensor]:
    """Of PyTorch's kernels, also for inputs in the layouts in which the candidate reads them."""
    for values in chain(trial.theirs(), poison.own()):
        yield values[output]


def _check_large(trial: Trial, scenes: Scenes) -> None:
    """The largest float16 in one element of each input that is not constant: where PyTorch's sums
    hold it, a kernel's do.
    """
    scene = scenes.large()
    trial.put_data(scenes.named(scene.inputs))
    results = trial.run(f"run with {LARGE:g} in one element of each input", NUMBERS)
    _judged(trial, results, scene, slack=LARGE_SLACK)


def _require_clean(trial: Trial, name: str, result: Tensor, masks: Masks, own: Own) -> None:
    """No image has the poison that has none of it in the reference, or at least depends on none;
    unless PyTorch's own kernels bring it there.
    """
    clean = masks.clean & masks.apart if trial.chosen.family.subtracts_pixels else masks.clean

    def spread_in(result: Tensor) -> Tensor:
        images = (len(result), -1) if result.dim() > 1 else (-1, 1)
        return clean & ~result.isfinite().reshape(images).all(1)

    spread = _but_theirs(spread_in, result, own)
    if spread.any():
        place = torch.nonzero(spread)[0].tolist()
        text = f"{name!r}{place} has NaN or infinity, where the reference is finite"
        raise trial.wrong(text)


def _but_theirs(faults: Callable[[Tensor], Tensor], result: Tensor, own: Own) -> Tensor:
    """The faults of a result that none of PyTorch's own kernels has."""
    found = faults(result)
    if found.any():
        for theirs in own():
            found &= ~faults(theirs)
    return found


def _require_kept(trial: Trial, name: str, result: Tensor, masks: Masks, own: Own) -> None:
    """The poison is in every element that must show it, but for those in which PyTorch's own
    kernels lose it.
    """

    def lost_in(result: Tensor) -> Tensor:
        return (masks.as_nan & ~result.isnan()) | (masks.as_any & result.isfinite())

    lost = _but_theirs(lost_in, result, own)
    if lost.any():
        place = torch.nonzero(lost)[0].tolist()
        value = result[tuple(place)].item()
        raise trial.wrong(f"{name!r}{place} is {value:.6g}: NaN or infinity is lost")
