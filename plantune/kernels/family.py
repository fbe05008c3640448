"""The interface of a kernel family, the same for the CPU and for CUDA.

A family reads a step once (`read`): what comes of it are the step's parts, or a reason why no
kernel of the family runs the step. All else is asked of the parts: with which configs
(`configs_for`, `why_not_config`), what a kernel needs (`layouts`, `workspace_bytes`, `source`).
Then it is built once (`build`), bound to memory (`bind`) and launched many times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from plantune.base.canonical import Attrs
from plantune.errors import IllegalCandidate
from plantune.graph.contraction import contracted
from plantune.graph.layouts import HOST_MEMORY
from plantune.graph.step import Step
from plantune.kernels.chips import slowdown
from plantune.kernels.legality import first_reason, refuse
from plantune.kernels.patterns.other_step import OtherStep
from plantune.kernels.weights.constants import Constant
from plantune.space.arch import Arch
from plantune.space.search_space import SearchSpace

# With the words of its signatures, so that a family has one place to take them from.
__all__ = ["AnyFamily", "Arch", "Attrs", "Binding", "Candidate", "Frame", "KernelFamily", "P"]
__all__ += ["Parts", "SearchSpace", "Step", "Values", "first_reason", "images", "refuse"]

Values = dict[str, Tensor]
# Readings that are kept: some steps of a network, for each family.
READINGS = 1 << 14


@dataclass(frozen=True)
class Candidate:
    """A family and its config for a step; together with the step it says all about a kernel."""

    family: str
    config: Attrs

    def to_json(self) -> dict[str, Any]:
        return {"family": self.family, "config": dict(self.config)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Candidate:
        return Candidate(data["family"], Attrs(data["config"]))


@dataclass(frozen=True)
class Frame:
    """The memory a kernel is bound to; the caller owns all of it.

    `values` holds a tensor per value name. Inputs and, on a GPU, outputs may be other tensors in
    each call, so a kernel reads them when it is launched. Outputs that it does not adopt are there
    when it is bound; on a CPU they stay. Outputs in `loose` may be as torch makes them: views, with
    any strides. Inputs in `aligned` are where any copy may begin. `workspace` has the bytes that
    the family asked for, less the room for copies of these. What a kernel prepares from weights is
    its own and is on `device`.
    """

    values: Values
    workspace: Tensor | None = None
    built: Any = None
    device: torch.device = HOST_MEMORY
    loose: frozenset[str] = frozenset()
    aligned: frozenset[str] = frozenset()

    @property
    def scratch(self) -> int:
        """The address of the workspace, 0 if there is none."""
        return 0 if self.workspace is None else self.workspace.data_ptr()


@dataclass(frozen=True)
class Binding:
    """A bound kernel. `launch` takes the stream handle (0 on the CPU), returns at once, allocates
    nothing but what the kernel adopts, and synchronises nothing.

    On a CPU `refresh`, if there is one, must run before the first launch and whenever a constant
    input changed. On a GPU `constants` are the weights that the kernel reads in an order or dtype
    of its own: each pass fills them. `halves` are the same launch in two: what the second one does
    can wait, and run beside other launches (see KernelFamily.rest).
    """

    launch: Callable[[int], None]
    refresh: Callable[[], None] | None = None
    constants: tuple[Constant, ...] = ()
    halves: tuple[Callable[[int], None], Callable[[int], None]] | None = None

    @staticmethod
    def in_halves(
        first: Callable[[int], None],
        rest: Callable[[int], None],
        constants: tuple[Constant, ...] = (),
    ) -> Binding:
        """A kernel that does the rest after its first half."""

        def launch(stream: int) -> None:
            first(stream)
            rest(stream)

        return Binding(launch, constants=constants, halves=(first, rest))


@dataclass(frozen=True)
class Parts:
    """What a family needs to know about a step; most families add fields to it."""

    step: Step


P = TypeVar("P", bound=Parts)


class KernelFamily(ABC, Generic[P]):
    """One way to run some steps. Families hold no state; a config is all that varies."""

    name: ClassVar[str]
    arch_kinds: ClassVar[frozenset[str]]
    # The layout of images where the config names none; None if any will do.
    image_layout: ClassVar[str | None] = None
    # Whether all that it does in a pass are launches by `plantune.devices.cuda.kernel`.
    launches_kernels: ClassVar[bool] = False
    # Whether it reads a convolution's filters in place if they are channels_last, and only then.
    reads_channels_last: ClassVar[bool] = False
    # Whether it subtracts pixels before its sums, which makes NaN of infinities; others may not.
    subtracts_pixels: ClassVar[bool] = False
    # Whether its operands may have several element types. Then `read` is given the step without its
    # free casts (plantune/graph/contraction.py), and asks `step.types` for that of each operand.
    mixes_types: ClassVar[bool] = False
    # Seconds that one build takes, roughly. A tie goes to a family that builds nothing.
    build_s: ClassVar[float] = 0.0

    def why_not_arch(self, arch: Arch) -> str | None:
        """Why nothing of this family runs on `arch`, or None if it does."""
        if arch.kind in self.arch_kinds:
            return None
        return f"{self.name} runs on {' and '.join(sorted(self.arch_kinds))}, not on {arch.kind}"

    @abstractmethod
    def read(self, step: Step) -> P:
        """The parts of a step; raises IllegalCandidate with the reason where the family runs it
        with no config. Ask for `parts` instead: that reads a step once.
        """

    def parts(self, step: Step) -> P:
        """What `read` made of a step; raises IllegalCandidate as it did."""
        found: P | str = _reading(self, step)
        if isinstance(found, str):
            raise IllegalCandidate(found)
        return found

    def why_not_step(self, step: Step) -> str | None:
        """Why the family cannot run this step with any config, or None if it can."""
        found = _reading(self, step)
        return found if isinstance(found, str) else None

    def configs(self, space: SearchSpace) -> tuple[Attrs, ...]:
        """Every config of the search space, legal or not."""
        return space.configs(self.name)

    def configs_for(self, parts: P, space: SearchSpace) -> tuple[Attrs, ...]:
        """Every config to try for a step, legal or not."""
        return self.configs(space)

    def admits(self, config: Attrs, space: SearchSpace) -> bool:
        """Whether this is a config of the search space, wherever it comes from."""
        # Looking for it among all of them took 45 ms for the plan of se_resnet9_fixup (2026-11-22).
        if self.name in space.families:
            return space.admits(self.name, config)
        return config in self.configs(space)

    def why_not_config(self, parts: P, config: Attrs, arch: Arch) -> str | None:
        """Why this config cannot run the step, or None if it can."""
        return None

    def layouts(self, parts: P, config: Attrs) -> Mapping[str, str]:
        """The layout of each value that the kernel demands or makes; others may have any.

        An output that is not named is made in `nchw`.
        """
        layout: Any = config.get("layout", self.image_layout)
        return {} if layout is None else images(parts.step, layout)

    def aliases(self, parts: P, config: Attrs) -> Mapping[str, str]:
        """Outputs that are views of an input: {output: input}. They need no memory."""
        return {}

    def leaves_loose(self, parts: P, config: Attrs) -> Mapping[str, str | None]:
        """Outputs that need not be dense, if all that reads them takes any strides: {output: the
        input that it may be a view of, if there is one}. The frame says which are.
        """
        return {}

    def reads_loose(self, parts: P, config: Attrs) -> frozenset[str]:
        """Inputs that may have any strides."""
        return frozenset()

    def reads_slices(self, parts: P, config: Attrs) -> frozenset[str]:
        """Images in nhwc that may be slices of the channels of others: pixels further apart."""
        return frozenset()

    def adopts(self, parts: P, config: Attrs) -> frozenset[str]:
        """Outputs that the kernel makes in memory of its own, instead of writing to the caller's.

        The framework's convolutions cannot write elsewhere; adopting spares a copy.
        """
        return frozenset()

    def workspace_bytes(self, parts: P, config: Attrs) -> int:
        """Scratch memory of one launch."""
        return 0

    def copied(self, parts: P) -> frozenset[str]:
        """Inputs for which the workspace has room, as for a value of a program's, because they may
        have to be copied to where they are aligned.
        """
        return frozenset()

    def rest(self, parts: P, config: Attrs) -> frozenset[str]:
        """Inputs and outputs that the second half of a launch touches beside the workspace; none if
        the launch is one. The first half neither reads nor writes these outputs.
        """
        return frozenset()

    def source(self, parts: P, config: Attrs, arch: Arch) -> str | None:
        """The source to compile, None if the family compiles nothing."""
        return None

    def build(self, parts: P, config: Attrs, arch: Arch) -> Any:
        """The compiled kernel, to be shared by equal steps; raises BuildError."""
        return None

    def build_portable(self, parts: P, config: Attrs, arch: Arch) -> Any:
        """The kernel for `arch` such that later chips run it too, to check its numbers there."""
        return self.build(parts, config, arch)

    @abstractmethod
    def bind(self, parts: P, config: Attrs, frame: Frame) -> Binding:
        """The kernel tied to its memory."""

    def estimate_us(self, parts: P, config: Attrs, arch: Arch) -> float:
        """A guess at one launch's time on the chip of an arch, by which a search orders what it
        measures, and on which plans for chips that are not here rest.

        Only the order within a network matters: measured times replace guesses as they come. Its
        constants are the `costs` of the arch's file.
        """
        cost, step = arch.cost(self.name), parts.step
        work = step.flops / cost["flops_per_us"] + step.traffic_bytes / cost["bytes_per_us"]
        return cost["launch_us"] + work * self.slowdown(parts, arch)

    def can_be_guessed(self, parts: P, config: Attrs) -> bool:
        """Whether plans may use it that rest on estimates alone; others need it measured."""
        return True

    def slowdown(self, parts: P, arch: Arch) -> float:
        """How many times as long as on the chip that was measured."""
        dtypes = (type_.dtype for _, type_ in parts.step.outputs)
        return slowdown(parts.step.flops, parts.step.traffic_bytes, dtypes, arch)


AnyFamily = KernelFamily[Any]


@lru_cache(maxsize=READINGS)
def _reading(family: KernelFamily[P], step: Step) -> P | str:
    """The parts of a step, or the reason why there are none."""
    try:
        return family.read(contracted(step) if family.mixes_types else step)
    except IllegalCandidate as reason:
        return str(reason)


def images(step: Step, layout: str) -> dict[str, str]:
    """`layout` for each rank-4 input that is not a weight, and each rank-4 output."""
    if isinstance(step, OtherStep):
        return step.layouts
    inputs = {name: type_ for name, type_ in step.inputs if name not in step.constants}
    values = {**inputs, **dict(step.outputs)}
    return {name: layout for name, type_ in values.items() if len(type_.shape) == 4}
