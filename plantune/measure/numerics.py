"""Proves a candidate right before it is timed or trusted: against fp64, on random data.

Large steps of 16-bit values are compared with fp32, whose error is a thousandth of theirs: consumer
GPUs take seconds for them in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from plantune.device import Device, device_for, plain_float32
from plantune.errors import IllegalCandidate
from plantune.graph.step import Step
from plantune.kernels.family import Candidate, Values
from plantune.kernels.registry import why_not
from plantune.measure.inputs import domain_of, draw_inputs
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


# Steps with more arithmetic than this have a reference in fp32 on a GPU.
MOST_EXACT_FLOPS = 5e10


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


def check(
    step: Step,
    candidate: Candidate,
    space: SearchSpace,
    seed: int = 0,
    device: Device | None = None,
) -> Numerics:
    """Runs a candidate on random data in every way in which a program may run it, on a GPU of a
    later arch if that is the `device`.

    Raises IllegalCandidate where it cannot run the step, BuildError, and WrongResult where an error
    is over its bound, the kernel touches memory that is not its own, or a NaN or infinity is lost
    or reaches another image.
    """
    reason = why_not(step, candidate, space)
    if reason is not None:
        raise IllegalCandidate(f"{candidate.family} at step {step.name!r}: {reason}")
    place = device or device_for(space.arch)
    with place.own_stream(), torch.no_grad():
        return _checked(Trial(step, candidate, space.arch, device), place.generator(seed))


def _checked(trial: Trial, random: torch.Generator) -> Numerics:
    """All runs, each compared with the reference."""
    step = trial.step
    data = draw_inputs(step, random)
    trial.put_constants(data)
    trial.put_data(data)
    first = trial.run("first run", NUMBERS)
    worst = [_judged(trial, first, data, random)]
    again = trial.run("second run on the same data", NANS)
    worst.append(_judged(trial, again, data, random))
    deterministic = all(_same_bits(again[name], result) for name, result in first.items())

    data = {**draw_inputs(step, random), **{name: data[name] for name in step.constants}}
    data = _with_small(step, data, random)
    trial.put_data(data, awkward=True)
    stale = trial.run("run on other data", NUMBERS, fresh_workspace=False)
    worst.append(_judged(trial, stale, data, random))
    data = draw_inputs(step, random)
    trial.put_constants(data, awkward=True)
    trial.put_data(data)
    worst.append(_judged(trial, trial.run("run on other weights", NANS), data, random))

    _check_poisons(trial, data, random)
    _check_poisoned_weight(trial, data, random)
    _check_large(trial, data, random)
    if trial.device.captures:
        worst += _replayed(trial, random)
    nearest = max(worst, key=lambda distance: distance.share)
    return Numerics(nearest.error, nearest.bound, nearest.place, deterministic)


def _replayed(trial: Trial, random: torch.Generator) -> Iterator[Distance]:
    """The runs of a captured graph, each on other data and other weights."""
    trial.put_constants(draw_inputs(trial.step, random))  # as they lie when it is deployed
    trial.capture()
    for what, pattern in (("first replay", NUMBERS), ("second replay", NANS)):
        data = draw_inputs(trial.step, random)
        trial.put_constants(data)
        trial.put_data(data)
        yield _judged(trial, trial.run(what, pattern), data, random)


def _judged(
    trial: Trial, results: Values, data: Values, random: torch.Generator, *, slack: float = 1.0
) -> Distance:
    """The output nearest to its bound; raises WrongResult where one is over `slack` times it.

    PyTorch's error is the larger one of its two layouts, and counts at least as much as one
    rounding of the inputs: where a sum cancels to little, its own error may be small by luck.
    """
    step, dtype = trial.step, _exact_dtype(trial)
    wide = _widened(data, dtype)
    with _plainly(dtype):
        exact = step.evaluate(wide, dtype)
        moved = {name: _moved(x, data[name], random) for name, x in wide.items()}
        rivals = [step.evaluate(moved, dtype)]
    rivals += [step.evaluate(_stored(data, layout)) for layout in MEMORY_FORMATS]
    found = [
        distance
        for name, _ in step.outputs
        for distance in _distances(name, results[name], exact[name], [r[name] for r in rivals])
    ]
    worst = max(found, key=lambda distance: distance.share)
    if not worst.share <= slack:
        text = f"{worst.place} is {worst.got}; relative error {worst.error:.3g} of the output"
        raise trial.wrong(f"{text}, allowed {worst.bound:.3g}", worst.error, worst.bound)
    return worst


def _stored(data: Values, layout: str) -> Values:
    return {name: in_layout(x, layout) if x.dim() == 4 else x for name, x in data.items()}


def _exact_dtype(trial: Trial) -> torch.dtype:
    """The dtype of the reference."""
    short = all(
        type_.torch_dtype.itemsize <= 2 for type_ in trial.step.types.values() if type_.is_float
    )
    large = trial.step.flops > MOST_EXACT_FLOPS
    return torch.float32 if short and large and trial.device.captures else torch.float64


@contextmanager
def _plainly(dtype: torch.dtype) -> Iterator[None]:
    """References in fp32 are sums of products of fp32 values, without tf32, and without what cuDNN
    does with whole tiles: there a NaN reaches outputs that do not depend on it.
    """
    with_cudnn = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = with_cudnn and dtype != torch.float32
    try:
        with plain_float32():
            yield
    finally:
        torch.backends.cudnn.enabled = with_cudnn


def _widened(data: Values, dtype: torch.dtype) -> Values:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in data.items()}


def _moved(wide: Tensor, narrow: Tensor, random: torch.Generator) -> Tensor:
    """The value after one random rounding: what it changes, no kernel can be blamed for."""
    if not narrow.is_floating_point():
        return wide
    uniform = torch.rand(wide.shape, generator=random, dtype=wide.dtype, device=wide.device)
    noise = 2 * uniform - 1
    return wide * (1 + torch.finfo(narrow.dtype).eps / 2 * noise)


def _distances(
    name: str, result: Tensor, exact: Tensor, rivals: Sequence[Tensor]
) -> Iterator[Distance]:
    """By norm, and by the worst element as a part of the largest."""
    off = (result.double() - exact).abs().nan_to_num(math.inf)
    off[~exact.isfinite() & ~result.isfinite()] = 0
    index = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
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
# The largest float16. What transforms its input loses some digits beside it, and is not wrong.
LARGE, LARGE_SLACK = 65504.0, 8.0


def _check_poisons(trial: Trial, data: Values, random: torch.Generator) -> None:
    """NaN, then infinity, in one element of each input that is no constant."""
    for name in _poisoned(trial.step, data):
        index = int(torch.randint(data[name].numel(), (), generator=random, device=random.device))
        low, high = (_evaluated_with(trial, data, name, index, probe) for probe in PROBES)
        for poison in (math.nan, math.inf):
            trial.put_data(_with_element(data, name, index, poison))
            results = trial.run(f"run with {poison} in one element of {name!r}", NUMBERS)
            exact = _evaluated_with(trial, data, name, index, poison)
            for output, type_ in trial.step.outputs:
                if type_.is_float:
                    depends = low[output] != high[output]
                    _check_poison(trial, output, results[output], exact[output], depends)


def _check_poisoned_weight(trial: Trial, data: Values, random: torch.Generator) -> None:
    """NaN in one element of one constant: a network that diverged must show it.

    An infinity is not asked for: Winograd's factors are sums of weights, in which it may cancel to
    NaN, and then reaches the whole output channel, padding included.
    """
    constants = [name for name in trial.step.constants if _holds_any(data[name])]
    if not constants:
        return
    drawn = torch.randint(1 << 30, (2,), generator=random, device=random.device).tolist()
    name = sorted(constants)[drawn[0] % len(constants)]
    index = drawn[1] % data[name].numel()
    low, high = (_evaluated_with(trial, data, name, index, probe) for probe in PROBES)
    exact = _evaluated_with(trial, data, name, index, math.nan)
    trial.put_constants(_with_element(data, name, index, math.nan))
    results = trial.run(f"run with nan in one element of {name!r}", NUMBERS)
    for output, type_ in trial.step.outputs:
        if type_.is_float:
            depends = low[output] != high[output]
            _require_kept(trial, output, results[output], exact[output], depends)
    trial.put_constants(data)


def _holds_any(x: Tensor) -> bool:
    return x.is_floating_point() and x.numel() > 0


def _with_small(step: Step, data: Values, random: torch.Generator) -> Values:
    """The data with zeros of both signs and the smallest numbers among the others.

    Not among divisors: what they make there is infinite in some dtypes and finite in others.
    """
    changed = dict(data)
    for name in _poisoned(step, data):
        if domain_of(step, name).kind == "positive":
            continue
        limits = torch.finfo(data[name].dtype)
        small = (0.0, -0.0, limits.tiny * limits.eps, -limits.tiny)
        places = torch.randint(
            data[name].numel(), (len(small),), generator=random, device=random.device
        )
        changed[name] = data[name].clone()
        changed[name].view(-1)[places] = changed[name].new_tensor(small)
    return changed


def _check_large(trial: Trial, data: Values, random: torch.Generator) -> None:
    """The largest float16 in one element of each input that is no constant: where PyTorch's sums
    hold it, a kernel's do.
    """
    changed = data
    for name in _poisoned(trial.step, data):
        index = int(torch.randint(data[name].numel(), (), generator=random, device=random.device))
        changed = _with_element(changed, name, index, LARGE)
    trial.put_data(changed)
    results = trial.run(f"run with {LARGE:g} in one element of each input", NUMBERS)
    _judged(trial, results, changed, random, slack=LARGE_SLACK)


def _poisoned(step: Step, data: Values) -> Iterator[str]:
    """The inputs that may hold any number."""
    for name, x in data.items():
        if name not in step.constants and _holds_any(x):
            yield name


def _with_element(data: Values, name: str, index: int, value: float) -> Values:
    changed = data[name].clone()
    changed.view(-1)[index] = value
    return {**data, name: changed}


def _evaluated_with(trial: Trial, data: Values, name: str, index: int, value: float) -> Values:
    dtype = _exact_dtype(trial)
    with _plainly(dtype):
        wide = _widened(_with_element(data, name, index, value), dtype)
        return trial.step.evaluate(wide, dtype)


def _check_poison(trial: Trial, name: str, result: Tensor, exact: Tensor, depends: Tensor) -> None:
    """The poison is kept, and in no image that has none of it in the reference."""
    _require_kept(trial, name, result, exact, depends)
    images = (len(exact), -1) if exact.dim() > 1 else (-1, 1)
    clean = exact.isfinite().reshape(images).all(1)
    spread = clean & ~result.isfinite().reshape(images).all(1)
    if spread.any():
        place = torch.nonzero(spread)[0].tolist()
        raise trial.wrong(f"{name!r}{place} has NaN or infinity that belongs to another image")


def _require_kept(trial: Trial, name: str, result: Tensor, exact: Tensor, depends: Tensor) -> None:
    """The poison is in every element that has it in the reference and depends on it (torch also
    multiplies it by padding). In the place of an infinity NaN will do.
    """
    lost = depends & torch.where(
        exact.isnan(), ~result.isnan(), ~exact.isfinite() & result.isfinite()
    )
    if lost.any():
        place = torch.nonzero(lost)[0].tolist()
        value = result[tuple(place)].item()
        raise trial.wrong(f"{name!r}{place} is {value:.6g}: NaN or infinity is lost")
