"""The gradient of squeeze-and-excite: of the image, of both layers and of what is around them, in
one pass over each image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from plantune.canonical import Attrs
from plantune.graph.graph import Node
from plantune.graph.step import Step
from plantune.graph.types import TensorType
from plantune.kernels import vector_kernel
from plantune.kernels.constants import Constants, in_rows
from plantune.kernels.cuda_family import CudaFamily
from plantune.kernels.family import Binding, Frame, Parts
from plantune.kernels.launcher import Launcher
from plantune.kernels.legality import refuse
from plantune.kernels.patterns import pointwise_chain
from plantune.kernels.patterns.excite_gradient import ExciteGradient, excite_gradient_of
from plantune.kernels.patterns.pointwise_chain import NONE, Operand
from plantune.kernels.rendering import cxx_bool
from plantune.kernels.small_matrix import TILE, matrix, shared_bytes_at_most, why_not_mma
from plantune.space.arch import Arch

SOURCE = (
    """#include "cuda/se_resnet9/se_grad.h"
struct Chain {{
  using T = {element};
  static constexpr int kChannels = {channels}, kHidden = {hidden}, kPixels = {pixels};
  static constexpr int kImages = {images}, kThreads = {threads}, kChunk = {chunk};
  static constexpr bool kInRegisters = {in_registers}, kLayers = {layers};
  static constexpr bool kByRows1 = {by_rows1}, kByRows2 = {by_rows2};
  static constexpr int kRead = {read}, kSmall = {small}, kValues = {values}, kHeld = {held};
  static constexpr int kStoredFirst = {stored_first}, kSumsFirst = {sums_first};
  static constexpr int kStoredSecond = {stored_second}, kSumsSecond = {sums_second};
  static constexpr int kHeldAs[] = {{{held_as}}};
  static constexpr bool kOfImages[] = {{{of_images}}}, kOfChannels[] = {{{of_channels}}};
  static constexpr float kAlpha = {alpha}f;
  static __device__ __forceinline__ float gate(float dy, float of) {{ return {gate}; }}
  static __device__ __forceinline__ float hidden(float dy, float of) {{ return {hidden_grad}; }}
  static __device__ __forceinline__ void first(const float (&images)[{read}],
                                               const float (&small)[{small} + 1],
                                               float (&out)[{first_results}]) {{
    {first}
  }}
  static __device__ __forceinline__ void second(const float (&images)[{held}],
                                                const float (&small)[{small} + 1], float spread,
                                                float (&out)[{second_results}]) {{
    {second}
  }}
}};
using Kernel = plantune::SeGrad<Chain, plantune::{matrix}>;"""
    + vector_kernel.ENTRIES
    + """
extern "C" __global__ __launch_bounds__({threads}) void add(Kernel::Arguments arguments) {{
  Kernel::add(arguments);
}}
"""
)
HIDDEN_MAX = 256
UNIT = 4  # columns of a row that a lane reads at least
STATIC_SHARED_BYTES = 48 << 10
# Vectors of images that a block holds in registers, and those that a thread asks for at once.
HELD_MOST, ASKED_MOST = 4096, 10
IMAGES_MOST, SMALL_MOST = 8, 6
# Of the layers' gradients: channels and hidden channels of a tile, and sums of each lane.
TILE_CHANNELS, TILE_HIDDEN, SUMS_OF_TILE = 32, 8, 18 * 32
# Blocks that add the layers' gradients, and images that one adds at least.
ADDING_BLOCKS, ADDED_IMAGES = 264, 32


@dataclass(frozen=True)
class Pass:
    """What is made of single elements in one pass: `lines` of C++ make `results` from `operands`,
    which are whole `images` and `small` values.
    """

    images: tuple[str, ...]
    small: tuple[Operand, ...]
    operands: tuple[Operand, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class SeGradParts(Parts):
    """A gradient, and which values the passes over an image make.

    `stored` leave from the first and from the second pass, and `sums` are of what each makes.
    """

    gradient: ExciteGradient

    @property
    def image(self) -> TensorType:
        return self.step.types[self.gradient.total.inputs[0]]

    @property
    def channels(self) -> int:
        return self.image.shape[1]

    @property
    def hidden(self) -> int:
        return self.gradient.excite.matrix.width

    @property
    def pixels(self) -> int:
        return self.image.shape[2] * self.image.shape[3]

    @cached_property
    def stored(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        leaving = dict(self.step.outputs)
        first, second = (
            tuple(node.name for node in nodes if node.name in leaving)
            for nodes in (self.gradient.first, self.gradient.second)
        )
        return first, second

    @cached_property
    def sums(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        late = {node.name for node in self.gradient.second}
        sums = self.gradient.sums
        first = tuple(node for node in sums if node.inputs[0] not in late)
        return first, tuple(node for node in sums if node.inputs[0] in late)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """Values of the first pass that the second one would make from two images or more."""
        several: set[str] = set()
        sources = {name: frozenset((name,)) for name in self.stored[0]}
        for node in self.gradient.first:
            if node.name in sources:
                continue
            own = frozenset().union(*(self._sources(value, sources) for value in node.inputs))
            several |= {node.name} if len(own) > 1 else set()
            sources[node.name] = frozenset((node.name,)) if len(own) > 1 else own
        cut = {*self.stored[0], *several}
        inner = [node for node in self.gradient.first if node.name not in cut]
        reads = {value for node in self.gradient.second for value in node.inputs}
        reads |= {v for n in inner if n.name in _needed(reads, inner) for v in n.inputs}
        return tuple(node.name for node in self.gradient.first if node.name in several & reads)

    def _sources(self, value: str, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
        if value in known:
            return known[value]
        whole = self.step.types[value].shape == self.gradient.shape
        return frozenset((value,)) if whole else frozenset()

    @property
    def values(self) -> tuple[str, ...]:
        """What the first pass makes in words: what leaves, then what is kept."""
        return (*self.stored[0], *self.kept)

    @cached_property
    def first(self) -> Pass:
        added = (node.inputs[0] for node in self.sums[0])
        wanted = (self.gradient.total.inputs[0], *self.values, *added)
        return self._pass(self.gradient.first, wanted)

    def second(self, *, held: bool) -> Pass:
        """The second pass, where what the first one kept is `held` in registers."""
        known = self.values if held else self.stored[0]
        nodes = (*self.gradient.first, *self.gradient.second)
        wanted = (*self.stored[1], *(node.inputs[0] for node in self.sums[1]))
        return self._pass([node for node in nodes if node.name not in known], wanted)

    def _pass(self, nodes: Sequence[Node], wanted: Sequence[str]) -> Pass:
        needed = _needed(wanted, nodes)
        own = tuple(node for node in nodes if node.name in needed)
        made = {node.name for node in own}
        reads = dict.fromkeys(v for node in own for v in node.inputs if v not in made)
        reads |= dict.fromkeys(value for value in wanted if value not in made)
        types, step = self.step.types, self.step
        inputs = tuple((name, types[name]) for name in reads)
        outputs = tuple((name, types[name]) for name in wanted)
        head = Step(own, inputs, outputs, step.constants.intersection(reads), step.phase)
        return _sorted(head, pointwise_chain.expression_of(head))

    @cached_property
    def small(self) -> tuple[Operand, ...]:
        """Values of images and channels, but the spread gradient of the mean."""
        passes = (self.first, self.second(held=True), self.second(held=False))
        found = dict.fromkeys(operand for one in passes for operand in one.small)
        return tuple(operand for operand in found if operand.name not in self.gradient.spread)

    @property
    def makes_layers(self) -> bool:
        return any(layer.weight or layer.bias for layer in self.gradient.layers)

    @property
    def adds(self) -> bool:
        """Whether there is a second kernel."""
        return self.makes_layers or bool(self.gradient.sums)

    @property
    def tiles(self) -> int:
        """Tiles of the layers' gradients."""
        tiles = -(-self.channels // TILE_CHANNELS) * -(-self.hidden // TILE_HIDDEN)
        return tiles if self.makes_layers else 0

    @property
    def splits(self) -> int:
        """Parts of the images that are added by different blocks."""
        most = max(self.image.shape[0] // ADDED_IMAGES, 1)
        return min(most, max(ADDING_BLOCKS // max(self.tiles, 1), 1))

    def rounds(self, config: Attrs) -> int:
        """Vectors of an image that a thread takes."""
        vectors = self.channels * self.image.torch_dtype.itemsize // vector_kernel.VECTOR_BYTES
        team = int(config["threads"]) // int(config["images"])
        groups = min(team // vectors, self.pixels)
        return -(-self.pixels // groups)

    def in_registers(self, config: Attrs) -> bool:
        held = self.rounds(config) * len(self.second(held=True).images)
        return held * int(config["threads"]) <= HELD_MOST


class SeGrad(CudaFamily[SeGradParts]):
    """Config: `images` and `threads` of a block, each image having its share of the threads; the
    `math` of the two layers, "simt" in float or "mma" on tensor cores.
    """

    name: ClassVar = "se_grad"
    image_layout = "nhwc"

    def read(self, step: Step) -> SeGradParts:
        parts = SeGradParts(step, excite_gradient_of(step))
        dtypes = ", ".join({type_.dtype for _, type_ in (*step.inputs, *step.outputs)})
        refuse({**vector_kernel.not_an_element(dtypes), **_places(parts)})
        images = (*parts.first.images, *parts.values, *parts.stored[1])
        refuse(
            {
                f"channels are read by eights, got shape {parts.image.shape}": parts.channels % 8,
                "there are no images": parts.image.numel == 0,
                f"it takes up to {HIDDEN_MAX} hidden channels": parts.hidden > HIDDEN_MAX,
                f"{len(images)} images enter and leave, {IMAGES_MOST} may": len(images)
                > IMAGES_MOST,
                f"it takes {SMALL_MOST} values of channels": len(parts.small) > SMALL_MOST,
                "nothing but values of channels leaves": not parts.stored[1],
                "an image is constant": not step.constants.isdisjoint(images),
            }
        )
        return parts

    def why_not_config(self, parts: SeGradParts, config: Attrs, arch: Arch) -> str | None:
        images = int(config["images"])
        vectors = parts.channels * parts.image.torch_dtype.itemsize // vector_kernel.VECTOR_BYTES
        if images > parts.image.shape[0]:
            return f"a block of {images} images is larger than the batch"
        team = int(config["threads"]) // images
        if team < vectors:
            return f"{team} threads of an image do not cover the {vectors} vectors of its channels"
        if config["math"] == "mma" and (reason := why_not_mma(parts.image.dtype, images, arch)):
            return reason
        if parts.tiles > int(config["threads"]):
            return f"{parts.tiles} tiles of the layers' gradients are more than a block's threads"
        shared = _shared_bytes_at_most(parts, config)
        if shared > STATIC_SHARED_BYTES:
            return f"it declares {shared} bytes of shared memory, {STATIC_SHARED_BYTES} may be"
        return None

    def workspace_bytes(self, parts: SeGradParts, config: Attrs) -> int:
        return _Workspace(parts, config).bytes

    def source(self, parts: SeGradParts, config: Attrs, arch: Arch) -> str:
        gradient, held = parts.gradient, parts.in_registers(config)
        first, second = parts.first, parts.second(held=held)
        made = {name: len(first.images) + i for i, name in enumerate(parts.values)}
        places = {**{name: i for i, name in enumerate(first.images)}, **made}
        small = parts.small
        return SOURCE.format(
            element=vector_kernel.ELEMENTS[parts.image.dtype],
            channels=parts.channels,
            hidden=parts.hidden,
            pixels=parts.pixels,
            images=config["images"],
            threads=config["threads"],
            chunk=max(ASKED_MOST // len(first.images), 1),
            in_registers=cxx_bool(held),
            layers=cxx_bool(parts.makes_layers),
            by_rows1=cxx_bool(gradient.squeeze.by_rows),
            by_rows2=cxx_bool(gradient.excite.by_rows),
            read=len(first.images),
            small=len(small),
            values=len(parts.values),
            held=len(second.images),
            stored_first=len(parts.stored[0]),
            sums_first=len(parts.sums[0]),
            stored_second=len(parts.stored[1]),
            sums_second=len(parts.sums[1]),
            held_as=", ".join(str(places[name]) for name in second.images),
            of_images=", ".join(cxx_bool(0 in _axes(operand)) for operand in small) or "false",
            of_channels=", ".join(cxx_bool(1 in _axes(o)) for o in small) or "false",
            alpha=repr(gradient.alpha),
            gate=_cxx(gradient.excite.derivative),
            hidden_grad=_cxx(gradient.squeeze.derivative),
            first=_lines(first, parts),
            second=_lines(second, parts),
            first_results=len(first.results),
            second_results=len(second.results),
            matrix="SmallMatrixMma" if config["math"] == "mma" else "SmallMatrix",
        )

    def bind(self, parts: SeGradParts, config: Attrs, frame: Frame) -> Binding:
        threads = int(config["threads"])
        count = parts.image.shape[0]
        constants = _constants(parts, TILE if config["math"] == "mma" else UNIT, frame)
        workspace = _Workspace(parts, config).addresses(frame)
        kernel = vector_kernel.VectorKernel(frame.built, _blocks(parts, config), threads)
        sums = parts.gradient.sums
        adding = parts.tiles * parts.splits + len(sums)
        add = Launcher(frame.built, max(adding, 1), threads, name="add")
        names = _names(parts)
        read = [*parts.first.images, *(operand.name for operand in parts.small)]

        def address(name: str | None) -> int:
            if name is None:
                return 0
            return workspace[name] if name in workspace else constants.tensor(name).data_ptr()

        def launch(stream: int) -> None:
            addresses = [address(name) for name in names]
            arguments = vector_kernel.members(*addresses, count, parts.splits)
            kernel.launch(stream, arguments, [constants.tensor(n) for n in read])
            if adding:
                add.launch(stream, arguments)

        return Binding(launch, constants=constants.all)


WEIGHTS = ("excite weight", "squeeze weight")
OWN = ("dexcite", "dsqueeze", "parts", "layers", "arrived")


def _names(parts: SeGradParts) -> tuple[str | None, ...]:
    """What the kernel takes, in its own order: values, its weights, its own memory."""
    gradient, leaving = parts.gradient, dict(parts.step.outputs)
    squeeze, excite = gradient.layers
    own = tuple(
        layer.excited if layer.excited in leaving else word
        for layer, word in ((excite, OWN[0]), (squeeze, OWN[1]))
    )
    return (
        *parts.first.images,
        *(operand.name for operand in parts.small),
        None,
        *parts.stored[0],
        *parts.stored[1],
        None,
        *(node.name for one in parts.sums for node in one),
        None,
        *WEIGHTS,
        excite.of,
        squeeze.of,
        *own,
        *OWN[2:],
        excite.argument,
        squeeze.argument,
        squeeze.weight,
        squeeze.bias,
        excite.weight,
        excite.bias,
    )


@dataclass(frozen=True)
class _Workspace:
    """What the kernels leave for each other: gradients of both layers, and parts of sums."""

    parts: SeGradParts
    config: Attrs

    @property
    def _sizes(self) -> dict[str, int]:
        parts, layers = self.parts, self.parts.makes_layers
        images, size = parts.image.shape[0], parts.image.torch_dtype.itemsize
        return {
            "dexcite": images * parts.channels * size * layers,
            "dsqueeze": images * parts.hidden * size * layers,
            "parts": 4 * len(parts.gradient.sums) * _blocks(parts, self.config),
            "layers": 4 * SUMS_OF_TILE * parts.tiles * parts.splits,
            "arrived": 4 * parts.tiles,
        }

    @property
    def bytes(self) -> int:
        return sum(-(-size // 16) * 16 for size in self._sizes.values())

    def addresses(self, frame: Frame) -> dict[str, int]:
        at = 0 if frame.workspace is None else frame.workspace.data_ptr()
        found = {}
        for name, size in self._sizes.items():
            found[name] = at if size else 0
            at += -(-size // 16) * 16
        return found


def _blocks(parts: SeGradParts, config: Attrs) -> int:
    return -(-parts.image.shape[0] // int(config["images"]))


def _shared_bytes_at_most(parts: SeGradParts, config: Attrs) -> int:
    """What plantune::SeGrad declares, and what `add` does."""
    images, threads = int(config["images"]), int(config["threads"])
    size = parts.image.torch_dtype.itemsize
    vectors = parts.channels * size // vector_kernel.VECTOR_BYTES
    groups = min(threads // images // vectors, parts.pixels)
    sums = images * groups * (parts.channels + 16) * 4
    layers = sum(
        shared_bytes_at_most(rows, columns, images, threads)
        for rows, columns in ((parts.hidden, parts.channels), (parts.channels, parts.hidden))
    )
    saved = images * (parts.channels + parts.hidden) * size
    own = (len(parts.gradient.sums) + 1) * threads // 8 + 64
    return sums + layers + saved + own


def _constants(parts: SeGradParts, unit: int, frame: Frame) -> Constants:
    """Both matrices, and what else is constant in rows."""
    step, gradient = parts.step, parts.gradient
    operands = {o.name: (o.name, in_rows(step.types[o.name])) for o in parts.small}
    layers = zip(WEIGHTS, (gradient.excite, gradient.squeeze), strict=True)
    return Constants(
        frame,
        {
            **{
                word: (layer.matrix.weight, matrix(layer.matrix, parts.image, unit))
                for word, layer in layers
            },
            **{name: read for name, read in operands.items() if name in step.constants},
        },
    )


def _needed(wanted: Iterable[str], nodes: Sequence[Node]) -> set[str]:
    """Names of the nodes that values follow from."""
    needed = set(wanted)
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(node.inputs)
    return needed.intersection(node.name for node in nodes)


def _sorted(head: Step, expression: pointwise_chain.Expression) -> Pass:
    """An expression whose operands are whole images, or not."""
    whole = pointwise_chain.whole(head.outputs[-1][1].shape)
    images = tuple(o.name for o in expression.operands if o.place == whole)
    small = tuple(o for o in expression.operands if o.place != whole)
    return Pass(images, small, expression.operands, expression.lines, expression.results)


def _lines(one: Pass, parts: SeGradParts) -> str:
    """The pass in C++, where the kernel has its operands."""
    found = {name: f"images[{i}]" for i, name in enumerate(one.images)}
    small = {operand: f"small[{i}]" for i, operand in enumerate(parts.small)}
    spread = parts.gradient.spread
    read = [small.get(o) or ("spread" if o.name in spread else found[o.name]) for o in one.operands]
    made = [f"out[{i}] = {name};" for i, name in enumerate(one.results)]
    return "\n    ".join((f"const float in[] = {{{', '.join(read)}}};", *one.lines, *made))


def _axes(operand: Operand) -> frozenset[int]:
    return frozenset(operand.place) - {NONE}


def _places(parts: SeGradParts) -> dict[str, bool]:
    """Reasons to refuse values, and whether they hold."""
    step, gradient = parts.step, parts.gradient
    known = {frozenset(), frozenset((1,)), frozenset((0, 1))}
    inputs = dict(step.inputs)
    arguments = [layer.argument for layer in gradient.layers if layer.argument is not None]
    taken = {*parts.stored[0], *parts.stored[1], *(node.name for node in gradient.sums)}
    for layer in gradient.layers:
        taken |= {name for name in (layer.excited, layer.weight, layer.bias) if name}
    return {
        **{
            f"{operand.name!r} is broadcast along other axes": _axes(operand) not in known
            for operand in parts.small
        },
        **{f"{name!r} is not a value that was saved": name not in inputs for name in arguments},
        **{
            f"{name!r} stays inside, but is read outside": name not in taken
            for name, _ in step.outputs
        },
    }


def _cxx(derivative: str) -> str:
    return str(pointwise_chain.cxx_of(derivative)).format("dy", "of")


FAMILY = SeGrad()
