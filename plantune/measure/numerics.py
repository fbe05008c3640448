"""Proves a candidate right before it is timed or trusted: against fp64, on random data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.family import Candidate, Values
from plantune.kernels.registry import why_not
from plantune.measure.inputs import draw_inputs
from plantune.measure.trial import NANS, NUMBERS, Trial
from plantune.memory import MEMORY_FORMATS, in_layout
from plantune.space.search_space import SearchSpace

# The tiny constant beside twice PyTorch's own error, as a part of the result's size: some roundings
# of the dtype, for a kernel that sums in another order.
TOLERANCES: Mapping[str, float] = {
    "float64": 1e-14,
    "float32": 1e-6,
    "float16": 1e-3,
    "bfloat16": 8e-3,
}


@dataclass(frozen=True)
class Numerics:
    """The error that came nearest to its bound, and where. Both are parts of the result's size.

    `deterministic` is false where two runs on the same data differed in any bit.
    """

    error: float
    bound: float
    place: str
    deterministic: bool


@dataclass(frozen=True)
class Distance:
    """How far an output is from the reference, against what is allowed, at its worst element."""

    error: float
    bound: float
    place: str
    got: str = ""

    @property
    def share(self) -> float:
        """1 at the bound; above it, or NaN, the output is wrong."""
        return self.error / self.bound if self.bound else math.inf if self.error else 0.0


def check(step: Step, candidate: Candidate, space: SearchSpace, seed: int = 0) -> Numerics:
    """Runs a candidate on random data in every way in which a program may run it.

    Raises IllegalCandidate where it cannot run the step, BuildError, and WrongResult where an error
    is over its bound, the kernel touches memory that is not its own, or a NaN or infinity is lost
    or reaches another image.
    """
    reason = why_not(step, candidate, space)
    if reason is not None:
        raise IllegalCandidate(f"{candidate.family} at step {step.name!r}: {reason}")
    random = torch.Generator().manual_seed(seed)
    trial = Trial(step, candidate, space.arch)
    data = draw_inputs(step, random)
    trial.put_constants(data)
    trial.put_data(data)
    first = trial.run("first run", NUMBERS)
    worst = [_judged(trial, first, data, random)]
    again = trial.run("second run on the same data", NANS)
    worst.append(_judged(trial, again, data, random))
    deterministic = all(_same_bits(again[name], result) for name, result in first.items())

    data = {**draw_inputs(step, random), **{name: data[name] for name in step.constants}}
    trial.put_data(data, awkward=True)
    stale = trial.run("run on other data", NUMBERS, fresh_workspace=False)
    worst.append(_judged(trial, stale, data, random))
    data = draw_inputs(step, random)
    trial.put_constants(data, awkward=True)
    trial.put_data(data)
    worst.append(_judged(trial, trial.run("run on other weights", NANS), data, random))

    _check_poisons(trial, data, random)
    nearest = max(worst, key=lambda distance: distance.share)
    return Numerics(nearest.error, nearest.bound, nearest.place, deterministic)


def _judged(trial: Trial, results: Values, data: Values, random: torch.Generator) -> Distance:
    """The output nearest to its bound; raises WrongResult where one is over it.

    PyTorch's error is the larger one of its two layouts, and counts at least as much as one
    rounding of the inputs: where a sum cancels to little, its own error may be small by luck.
    """
    step, wide = trial.step, _widened(data)
    exact = step.evaluate(wide)
    rivals = [step.evaluate({name: _moved(x, data[name], random) for name, x in wide.items()})]
    rivals += [step.evaluate(_stored(data, layout)) for layout in MEMORY_FORMATS]
    found = [
        distance
        for name, _ in step.outputs
        for distance in _distances(name, results[name], exact[name], [r[name] for r in rivals])
    ]
    worst = max(found, key=lambda distance: distance.share)
    if not worst.share <= 1:
        text = f"{worst.place} is {worst.got}; relative error {worst.error:.3g} of the output"
        raise trial.wrong(f"{text}, allowed {worst.bound:.3g}", worst.error, worst.bound)
    return worst


def _stored(data: Values, layout: str) -> Values:
    return {name: in_layout(x, layout) if x.dim() == 4 else x for name, x in data.items()}


def _widened(data: Values) -> Values:
    return {name: x.double() if x.is_floating_point() else x for name, x in data.items()}


def _moved(wide: Tensor, narrow: Tensor, random: torch.Generator) -> Tensor:
    """The value after one random rounding: what it changes, no kernel can be blamed for."""
    if not narrow.is_floating_point():
        return wide
    noise = 2 * torch.rand(wide.shape, generator=random, dtype=wide.dtype) - 1
    return wide * (1 + torch.finfo(narrow.dtype).eps / 2 * noise)


def _distances(
    name: str, result: Tensor, exact: Tensor, rivals: Sequence[Tensor]
) -> Iterator[Distance]:
    """By norm, and by the worst element as a part of the largest."""
    off = (result.double() - exact).abs().nan_to_num(math.inf)
    off[~exact.isfinite() & ~result.isfinite()] = 0
    index = tuple(torch.nonzero(off == off.max())[0].tolist())
    place = f"{name!r}{list(index)}"
    got = f"{result[index].item():.6g} instead of {exact[index].item():.6g}"
    tolerance = TOLERANCES.get(str(result.dtype).removeprefix("torch."))
    for kind in (2, math.inf):
        bound = 0.0
        if tolerance is not None:
            bound = 2 * max(_error(rival, exact, kind) for rival in rivals) + tolerance
        yield Distance(_error(result, exact, kind), bound, place, got)


def _error(result: Tensor, exact: Tensor, kind: float) -> float:
    """The norm of the difference as a part of the norm of `exact`."""
    off = (result.double() - exact.double()).flatten()
    off[~result.isfinite().flatten() & ~exact.isfinite().flatten()] = 0
    size = exact.double().flatten().nan_to_num(0, 0, 0)
    error = torch.linalg.vector_norm(off, kind) / torch.linalg.vector_norm(size, kind)
    return 0.0 if not off.any() else float(error.nan_to_num(math.inf))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


# Finite values in the place of a poisoned element: what they change depends on it.
PROBES = (3.0, -50.0)


def _check_poisons(trial: Trial, data: Values, random: torch.Generator) -> None:
    """NaN, then infinity, in one element of each input that is no constant."""
    for name, x in data.items():
        if name in trial.step.constants or not x.is_floating_point() or not x.numel():
            continue
        index = int(torch.randint(x.numel(), (), generator=random))
        low, high = (_evaluated_with(trial.step, data, name, index, probe) for probe in PROBES)
        for poison in (math.nan, math.inf):
            trial.put_data(_with_element(data, name, index, poison))
            results = trial.run(f"run with {poison} in one element of {name!r}", NUMBERS)
            exact = _evaluated_with(trial.step, data, name, index, poison)
            for output, type_ in trial.step.outputs:
                if type_.is_float:
                    depends = low[output] != high[output]
                    _check_poison(trial, output, results[output], exact[output], depends)


def _with_element(data: Values, name: str, index: int, value: float) -> Values:
    changed = data[name].clone()
    changed.view(-1)[index] = value
    return {**data, name: changed}


def _evaluated_with(step: Step, data: Values, name: str, index: int, value: float) -> Values:
    return step.evaluate(_widened(_with_element(data, name, index, value)))


def _check_poison(trial: Trial, name: str, result: Tensor, exact: Tensor, depends: Tensor) -> None:
    """The poison is in every element that has it in the reference and depends on it (torch also
    multiplies it by padding), and in no image that has none of it in the reference.
    """
    lost = depends & torch.where(
        exact.isnan(), ~result.isnan(), ~exact.isfinite() & result.isfinite()
    )
    if lost.any():
        place = torch.nonzero(lost)[0].tolist()
        value = result[tuple(place)].item()
        raise trial.wrong(f"{name!r}{place} is {value:.6g}: NaN or infinity is lost")
    images = (len(exact), -1) if exact.dim() > 1 else (-1, 1)
    clean = exact.isfinite().reshape(images).all(1)
    spread = clean & ~result.isfinite().reshape(images).all(1)
    if spread.any():
        place = torch.nonzero(spread)[0].tolist()
        raise trial.wrong(f"{name!r}{place} has NaN or infinity that belongs to another image")
