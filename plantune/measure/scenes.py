"""What every candidate of a step is proved against: inputs, and what should come out.

No candidate changes any of it, so it is made once for a step and seed, and kept while there is
room. Each scene draws from a generator of its own: which others are kept makes no difference.

Large steps of 16-bit values are compared with fp32, whose error is a thousandth of theirs: consumer
GPUs take seconds for them in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from plantune.base.canonical import digest
from plantune.base.distance import Exact
from plantune.base.generators import numbers_of
from plantune.base.tolerances import AGAIN
from plantune.devices.cuda.flags import flags, float32_precisions, references_in_float32
from plantune.devices.device import Device, framework_alone
from plantune.graph.layouts import MEMORY_FORMATS, strictly_in_layout
from plantune.graph.ops import op_named
from plantune.graph.ops.overload import OverloadOp
from plantune.graph.ops.overload_backward import OverloadBackward
from plantune.graph.step import Step
from plantune.kernels.family import Values
from plantune.measure.inputs import domain_of, draw_inputs
from plantune.measure.kept import Kept, T, room_on
from plantune.measure.threads import threads, threads_of_proof
from plantune.runtime.proof.products import SomeImagesAtOnce, small_images_at_once

# Steps with more arithmetic than this have a reference in fp32 on a GPU.
MOST_EXACT_FLOPS = 5e10
# Finite values in the place of a poisoned element: what they change depends on it.
PROBES = (3.0, -50.0)
# The largest float16.
LARGE = 65504.0

# Torch's own overloads, some of which refuse numbers.
OF_TORCH = (OverloadOp, OverloadBackward)

Tensors = tuple[Tensor, ...]
Errors = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Scene:
    """Inputs in the order of the step's, and what should come out, in the order of its outputs.

    `own` is PyTorch's error of each output, of each kind. `again` gives more of them, of inputs
    that differ by a rounding: few elements may have a small error by luck.
    """

    inputs: Tensors
    exact: tuple[Exact, ...]
    own: Errors
    again: Callable[[], Iterator[Errors]]


@dataclass(frozen=True)
class Masks:
    """Where one output must show a poison (torch also multiplies it by padding, which need not).

    Where that is an infinity, it and NaN are as good: PyTorch's mean of a row with one is NaN, by
    the algorithm that it takes. Images that are `clean` have none of the poison, those that are
    `apart` depend on none of it: a ReLU makes zero of an infinity.
    """

    as_nan: Tensor
    as_any: Tensor
    clean: Tensor
    apart: Tensor


@dataclass(frozen=True)
class Poison:
    """Inputs of which one element is a poison. Integers show nothing and are None. `own` gives what
    PyTorch's kernels make of them, in each layout: some lose a NaN themselves, such as those for
    the gradient of hardswish in 16 bits.
    """

    inputs: Tensors
    masks: tuple[Masks | None, ...]
    own: Callable[[], Iterator[Values]]


class Scenes:
    """The scenes of one step and seed."""

    def __init__(self, step: Step, device: Device, seed: int) -> None:
        self.step, self._device = step, device
        # PyTorch's own error depends on torch's settings.
        place = str(device.place), device.captures, float32_precisions()
        self._key = (step.signature, *place, seed)

    def named(self, inputs: Tensors) -> Values:
        """Inputs of a scene by the names that they have in this step."""
        return {name: x for (name, _), x in zip(self.step.inputs, inputs, strict=True)}

    def first(self) -> Scene:
        return self._scene("first", lambda random: draw_inputs(self.step, random))

    def other_data(self) -> Scene:
        """Zeros of both signs and the smallest numbers among the others, and the same weights."""

        def draw(random: torch.Generator) -> Values:
            before, constants = self.named(self.first().inputs), self.step.constants
            data = {**draw_inputs(self.step, random), **{name: before[name] for name in constants}}
            return with_small(self.step, data, random)

        return self._scene("other data", draw)

    def other_weights(self) -> Scene:
        return self._scene("other weights", lambda random: draw_inputs(self.step, random))

    def replayed(self, number: int) -> Scene:
        return self._scene(f"replay {number}", lambda random: draw_inputs(self.step, random))

    def large(self) -> Scene:
        """The largest float16 in one element of each input that is not constant, with the last
        weights.
        """

        def draw(random: torch.Generator) -> Values:
            data = self.named(self.other_weights().inputs)
            for name in poisoned(self.step, data):
                data = _with_element(data, name, _place(data[name], random), LARGE)
            return data

        return self._scene("large", draw)

    def poisons(self) -> Iterator[tuple[str, float, Poison]]:
        """NaN, then infinity, in one element of each input that is not constant, then NaN in one
        element of one constant: a network that diverged must show it. The last data.

        An infinity is not asked for there: Winograd's factors are sums of weights, in which it may
        cancel to NaN, and then reaches the whole output channel, padding included.
        """
        data = self.named(self.other_weights().inputs)
        for name in poisoned(self.step, data):
            for value in (math.nan, math.inf):
                yield name, value, self._poison(name, value)
        weights = [n for n, x in data.items() if n in self.step.constants and _holds_any(x)]
        if weights:
            name = weights[_integer(len(weights), self._generator("which weight"))]
            yield name, math.nan, self._poison(name, math.nan)

    def _scene(self, name: str, draw: Callable[[torch.Generator], Values]) -> Scene:
        def make() -> Scene:
            random = self._generator(name)
            return _judged(self.step, draw(random), random, self._exact_dtype)

        return self._kept(name, make)

    def _poison(self, name: str, value: float) -> Poison:
        place = [known for known, _ in self.step.inputs].index(name)
        generator = f"place in {place}"

        def changed(value: float) -> Values:
            data = self.named(self.other_weights().inputs)
            return _with_element(data, name, _place(data[name], self._generator(generator)), value)

        def evaluated(value: float) -> list[Tensor]:
            return _evaluated(self.step, changed(value), self._exact_dtype)

        def probe() -> Tensors:
            """Which elements of each output depend on that element."""
            low, high = map(evaluated, PROBES)
            return tuple(a != b for a, b in zip(low, high, strict=True))

        def make() -> Poison:
            depends = self._kept(("depends", place), probe)
            found = zip(self.step.outputs, depends, evaluated(value), strict=True)
            masks = [
                _masks(mask, exact, type_.torch_dtype, value) if type_.is_float else None
                for (_, type_), mask, exact in found
            ]
            return Poison(tuple(changed(value).values()), tuple(masks), own)

        def own() -> Iterator[Values]:
            return (_of_step(self.step, _stored(changed(value), name)) for name in MEMORY_FORMATS)

        return self._kept((place, str(value)), make)

    def _kept(self, name: object, make: Callable[[], T]) -> T:
        with threads(threads_of_proof(self.step)):
            return _kept_on(self._device).get((self._key, name), make)

    def _generator(self, name: str) -> torch.Generator:
        return self._device.generator(int(digest([self._key[-1], name])[:15], 16))

    @property
    def _exact_dtype(self) -> torch.dtype:
        """The dtype of the reference."""
        types = self.step.types.values()
        short = all(type_.torch_dtype.itemsize <= 2 for type_ in types if type_.is_float)
        large = self.step.flops > MOST_EXACT_FLOPS
        return torch.float32 if short and large and self._device.captures else torch.float64


@cache
def _kept_on(device: Device) -> Kept:
    return Kept(room_on(device))


def forget() -> None:
    """Gives back all memory that scenes hold."""
    _kept_on.cache_clear()


def _judged(step: Step, data: Values, random: torch.Generator, dtype: torch.dtype) -> Scene:
    """PyTorch's error is the largest of its two layouts, and counts at least as much as one
    rounding of the inputs: where a sum cancels to little, its own error may be small by luck.
    """
    names = [name for name, _ in step.outputs]
    with _plainly(dtype):
        values = _of_step(step, _widened(data, dtype), dtype)
    exact = tuple(Exact(values[name]) for name in names)
    is_short = any(x.is_floating_point() and x.dtype.itemsize == 2 for x in data.values())

    def errors(computed: Values) -> Errors:
        return tuple(e.errors(computed[name]) for e, name in zip(exact, names, strict=True))

    def moved(random: torch.Generator) -> Values:
        wide = _widened(data, dtype)
        return {name: _moved(x, data[name], random) for name, x in wide.items()}

    with _plainly(dtype):
        own = errors(_of_step(step, moved(random), dtype))
    for layout in MEMORY_FORMATS:
        own = larger(own, errors(_of_step(step, _stored(data, layout))))
    after = random.get_state()

    def again() -> Iterator[Errors]:
        once = torch.Generator(random.device)
        once.set_state(after)
        for _ in range(AGAIN):
            wide = moved(once)
            if is_short:  # rounded to 16 bits once more, they would move by whole steps
                with _plainly(dtype):
                    yield errors(_of_step(step, wide, dtype))
                continue
            for layout in MEMORY_FORMATS:
                own = {name: x.to(data[name].dtype) for name, x in wide.items()}
                yield errors(_of_step(step, _stored(own, layout)))

    return Scene(tuple(data.values()), exact, own, again)


def larger(one: Errors, other: Errors) -> Errors:
    """Of each output and kind the larger one."""
    pairs = zip(one, other, strict=True)
    return tuple(tuple(map(max, errors, others)) for errors, others in pairs)


def _masks(depends: Tensor, exact: Tensor, dtype: torch.dtype, poison: float) -> Masks:
    """An image with a number that may become infinite in the output's dtype is not clean."""
    is_nan = exact.isnan() if math.isnan(poison) else torch.zeros_like(depends)
    images = (len(exact), -1) if exact.dim() > 1 else (-1, 1)
    fits = exact.abs() <= torch.finfo(dtype).max / 2  # false of NaN, too
    clean, apart = (mask.reshape(images).all(1) for mask in (fits, ~depends))
    return Masks(depends & is_nan, depends & ~is_nan & ~exact.isfinite(), clean, apart)


def _evaluated(step: Step, data: Values, dtype: torch.dtype) -> list[Tensor]:
    """What becomes of a poison."""
    with _plainly(dtype):
        values = _of_step(step, _widened(data, dtype), dtype)
    return [values[name] for name, _ in step.outputs]


def _of_step(step: Step, data: Values, dtype: torch.dtype | None = None) -> Values:
    # An op of plantune's own takes all numbers: an error of its reference is a fault.
    torchs = any(isinstance(op_named(node.op), OF_TORCH) for node in step.nodes)
    alone = framework_alone() if torchs else nullcontext()
    with same_numbers(step, next(iter(data.values())).device), alone:
        return step.evaluate(data, dtype)


def same_numbers(step: Step, place: torch.device) -> AbstractContextManager[None]:
    """Inside, a step that draws random numbers draws the same ones each time."""
    return numbers_of(place, 0) if step.draws else nullcontext()


@contextmanager
def _plainly(dtype: torch.dtype) -> Iterator[None]:
    """References in fp32 are sums of products of fp32 values, without tf32, and without what cuDNN
    does with whole tiles: there a NaN reaches outputs that do not depend on it.
    """
    enabled = torch.backends.cudnn.enabled and dtype != torch.float32
    products = SomeImagesAtOnce() if dtype == torch.float32 else small_images_at_once()
    with flags(enabled=enabled), references_in_float32(), products:
        yield


def _stored(data: Values, layout: str) -> Values:
    """Images in a layout, which says what kernels torch takes: some of those for the gradients and
    statistics of norms are 20 to 600 times less exact in channels_last.
    """
    return {name: strictly_in_layout(x, layout) if x.dim() == 4 else x for name, x in data.items()}


def _widened(data: Values, dtype: torch.dtype) -> Values:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in data.items()}


def _moved(wide: Tensor, narrow: Tensor, random: torch.Generator) -> Tensor:
    """The value after one random rounding: what it changes, no kernel can be blamed for."""
    if not narrow.is_floating_point():
        return wide
    uniform = torch.rand(wide.shape, generator=random, dtype=wide.dtype, device=wide.device)
    noise = uniform.mul_(2).sub_(1)
    return noise.mul_(torch.finfo(narrow.dtype).eps / 2).add_(1).mul_(wide)


def with_small(step: Step, data: Values, random: torch.Generator) -> Values:
    """The data with zeros of both signs and the smallest numbers among the others.

    Not among divisors: what they make there is infinite in some dtypes and finite in others.
    """
    changed = dict(data)
    for name in poisoned(step, data):
        if domain_of(step, name).kind != "real":
            continue
        limits = torch.finfo(data[name].dtype)
        small = (0.0, -0.0, limits.tiny * limits.eps, -limits.tiny)
        places = torch.randint(
            data[name].numel(), (len(small),), generator=random, device=random.device
        )
        changed[name] = data[name].clone()
        changed[name].view(-1)[places] = changed[name].new_tensor(small)
    return changed


def poisoned(step: Step, data: Values) -> Iterator[str]:
    """The inputs that may hold any number."""
    for name, x in data.items():
        if name not in step.constants and _holds_any(x):
            yield name


def _holds_any(x: Tensor) -> bool:
    return x.is_floating_point() and x.numel() > 0


def _with_element(data: Values, name: str, index: int, value: float) -> Values:
    changed = data[name].clone()
    changed.view(-1)[index] = value
    return {**data, name: changed}


def _place(x: Tensor, random: torch.Generator) -> int:
    return _integer(x.numel(), random)


def _integer(below: int, random: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=random, device=random.device))
