"""A network at one call, as the command line asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from plantune.errors import InvalidNetwork, UnsupportedModule
from plantune.models.factory import Factory, is_factory, prints_aside
from plantune.models.registry import network

if TYPE_CHECKING:
    from torch import nn

    from plantune.graph import Graph, TensorType
    from plantune.graph.tracing.arguments import Arguments
    from plantune.graph.tracing.tape import Tape
    from plantune.plans.problem import Problem

# In the order of the JSON that `bench` writes; a network is a model there.
FIELDS = ("arch", "batch", "mode", "dtype", "in_channels")
# Of one input: no machine has the memory, and torch counts no further than 63 bits.
ELEMENTS_MAX = 1 << 40
BATCH_MAX = 1 << 24


@dataclass(frozen=True)
class Workload:
    """What decides the layer graph of a network: a reference network by its name, or another one
    by its factory, whose keyword arguments are `settings`.

    `inputs` are texts such as 8x3x64x64:uint8, whose dtype is the network's if it is left out;
    without them there is one image.
    """

    network: str = "se_resnet9_fixup"
    batch: int = 8
    in_channels: int = 3
    mode: str = "infer"
    dtype: str = "float32"
    arch: str = "cpu"
    image_size: int | None = None
    inputs: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def on(arch: str | None, dtype: str | None, **given: Any) -> Workload:
        """What options mean: what they leave open follows from this machine. Raises InvalidNetwork
        for options that do not go together.
        """
        if arch is None:
            from plantune.devices.gpus import best_arch

            arch = best_arch()
        batch, inputs = given.pop("batch", None), given.get("inputs", ())
        if inputs:
            _require(batch is None, "--input has the batch in it; leave --batch out")
            _require(given.get("image_size") is None, "give --input or --image-size, not both")
            batch = int(inputs[0].partition(":")[0].partition("x")[0])
        batch = Workload.batch if batch is None else batch
        made = Workload(arch=arch, dtype=dtype or _dtype_on(arch), batch=batch, **given)
        made.require_inputs()
        return made

    @staticmethod
    def of(problem: Problem) -> Workload:
        """For the problem of a reference network, which takes one image, if its call was kept."""
        (_, image), *_ = problem.tensors
        named = (problem.mode, problem.dtype, problem.arch)
        usual = network(problem.network).image_size
        size = None if image.shape[2] == usual else image.shape[2]
        return Workload(problem.network, problem.batch, image.shape[1], *named, image_size=size)

    @property
    def factory(self) -> Factory | None:
        """None of a reference network."""
        return Factory(self.network, self.settings) if is_factory(self.network) else None

    def require_inputs(self) -> None:
        """Raises InvalidNetwork where it is not known what the network is called with."""
        names = [name for name, _ in self.settings]
        twice = [name for name in names if names.count(name) > 1]
        _require(not twice, f"--set {twice[0]}=... is given twice" if twice else "")
        image = self.batch * self.in_channels * (self.image_size or 1) ** 2
        most = f"images of {self.image_size} pixels a side have more than {ELEMENTS_MAX} elements"
        _require(bool(self.inputs) or image <= ELEMENTS_MAX, most)
        if self.factory is None:
            _require(not self.settings, f"--set is for a factory, and {self.network} has a name")
            return
        _require(
            bool(self.inputs) or self.image_size is not None,
            f"{self.network}: say what it is called with, such as --input 8x3x224x224 (again for "
            "each input), or --image-size 224",
        )

    @cached_property
    def problem(self) -> Problem:
        from plantune.plans.problem import Problem

        named = self.network if self.factory is None else type(self._module).__name__
        return Problem.of(self.graph, self.arch, named)

    @cached_property
    def graph(self) -> Graph:
        """The graph that a module made by `load_model` or `optimize` for this asks a plan for."""
        from plantune.graph.passes.differentiate import differentiate

        # On a GPU weights are read in place, so nothing is folded into them.
        graph = self.extracted(fold=self.mode == "infer" and self.arch == "cpu")
        if self.mode != "train":
            return graph
        named = self._module.named_parameters()
        trained = {name for name, parameter in named if parameter.requires_grad}
        none = f"no parameter of {self.network} requires a gradient: take --mode infer"
        _require(bool(trained), none)
        return differentiate(graph, [name for name, _ in graph.parameters if name in trained])

    @cached_property
    def tape(self) -> Tape | None:
        """The network for another process; None of one that has a name."""
        from plantune.graph.tracing.tape import tape_of

        derives = self.mode == "train"
        given = self._module, self._arguments
        with prints_aside():
            return None if self.factory is None else tape_of(*given, derives=derives)

    def extracted(self, *, fold: bool) -> Graph:
        """The network's layers, with the scales of its norms in the weights if they are folded."""
        from plantune.graph.tracing.extract import extract
        from plantune.space.recurrent import scans_on

        scans = scans_on(self.arch)
        derives = self.mode == "train"
        types = self._arguments.types
        with prints_aside():
            return extract(self._module, *types, fold=fold, derives=derives, scans=scans)

    def module(self) -> nn.Module:
        """The network, freshly initialised on the CPU."""
        from plantune.graph.types import DTYPES

        factory = self.factory
        made = network(self.network).build(self.in_channels) if factory is None else factory.build()
        try:
            return made.to(device="cpu", dtype=DTYPES[self.dtype]).train(self.mode == "train")
        except Exception as error:  # Both may be the network's own methods.
            said = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
            raise UnsupportedModule(
                f"{self.network}: cannot be brought into {self.dtype} and mode {self.mode}: "
                f"{said}; see its methods `to` and `train`"
            ) from error

    @cached_property
    def _module(self) -> nn.Module:
        return self.module()

    @cached_property
    def _arguments(self) -> Arguments:
        from plantune.graph import TensorType
        from plantune.graph.tracing.arguments import Arguments

        if self.inputs:
            return Arguments(tuple(map(self._type, self.inputs)))
        size = self.image_size
        size = network(self.network).image_size if size is None else size
        return Arguments((TensorType((self.batch, self.in_channels, size, size), self.dtype),))

    def _type(self, text: str) -> TensorType:
        from plantune.graph import TensorType

        shape, _, dtype = text.partition(":")
        sizes = tuple(map(int, shape.split("x")))
        return TensorType(sizes, dtype or self.dtype)

    def to_json(self) -> dict[str, Any]:
        given = {
            "image_size": self.image_size,
            "inputs": list(self.inputs),
            "settings": dict(self.settings),
        }
        added = {name: value for name, value in given.items() if value}
        return {"model": self.network, **{name: getattr(self, name) for name in FIELDS}, **added}

    def arguments(self) -> str:
        """The options that mean this; defaults are left out, but for the batch."""
        plain = {**vars(Workload.on(None, None)), "dtype": _dtype_on(self.arch), "batch": None}
        named = {"network": "model"}
        kept = ("network", "batch", "in_channels", "mode", "dtype", "arch", "image_size")
        words = [
            f"--{named.get(name, name.replace('_', '-'))} {getattr(self, name)}"
            for name in kept
            if getattr(self, name) != plain[name] and not (name == "batch" and self.inputs)
        ]
        words += [f"--input {text}" for text in self.inputs]
        return " ".join([*words, *(f"--set {name}={value}" for name, value in self.settings)])

    def __str__(self) -> str:
        channels = "" if self.in_channels == 3 else f", {self.in_channels} channels"
        size = "" if self.image_size is None else f", {self.image_size}x{self.image_size}"
        call = f", input {' and '.join(self.inputs)}" if self.inputs else ""
        call = call or f", batch {self.batch}{channels}{size}"
        named = self.network if self.factory is None else str(self.factory).removesuffix("()")
        return f"{named}{call}, {self.mode}, {self.dtype}, {self.arch}"


def _dtype_on(arch: str) -> str:
    return "float32" if arch == "cpu" else "float16"


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise InvalidNetwork(text)
