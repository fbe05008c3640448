"""The gradient of squeeze-and-excite: of the image, of both layers and of what is around them, in
one pass over each image.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import ClassVar

from plantune.graph import TensorType
from plantune.kernels.chips import measured_chip
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, CudaFamily, Step, first_reason, refuse
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.cuda.se_gradient import SeGradParts, Workspace, operands_of
from plantune.kernels.cuda.small_matrix import HIDDEN_MAX, kind_of, matrix, unit_of, why_not_block
from plantune.kernels.family import Binding, Frame
from plantune.kernels.patterns import pointwise_chain
from plantune.kernels.patterns.element_passes import Pass, axes_of
from plantune.kernels.patterns.excite_gradient import LayerGradient, excite_gradient_of
from plantune.kernels.rendering import struct
from plantune.kernels.weights.constants import Constants, in_rows

MEMBERS = """  static __device__ __forceinline__ float gate(float dy, float of) {{ return {gate}; }}
  static __device__ __forceinline__ float hidden(float dy, float of) {{ return {hidden}; }}
  static __device__ __forceinline__ void first(const float (&images)[kRead],
                                               const float (&small)[kSmall + 1],
                                               float (&out)[{first_results}]) {{
    {first}
  }}
  static __device__ __forceinline__ void second(const float (&images)[kHeld],
                                                const float (&small)[kSmall + 1], float spread,
                                                float (&out)[{second_results}]) {{
    {second}
  }}
"""
ENTRIES = (
    vector_kernel.ENTRIES.replace("({threads})", "({threads}, {blocks_per_sm})")
    + """
static_assert(Kernel::kTiles == {tiles} && Kernel::kTileSums == {tile_sums},
              "what is launched is what was planned");
extern "C" __global__ __launch_bounds__({adding_threads}) void add(Kernel::Arguments arguments) {{
  Kernel::add(arguments);
}}
"""
)
# Vectors of images that a thread asks for at once, and what the kernel calls where images are held.
ASKED = {"registers": 10, "shared": 12, None: 10}
HOLDS = {None: 0, "registers": 1, "shared": 2}
ADDING_THREADS = 256
IMAGES_MOST, SMALL_MOST = 8, 6
# Of those that a thread is thought to take: with 194, 255 were too few on five kinds of GPU.
REGISTERS_MOST = 168
ROUNDS = 8  # vectors of an image that a thread does best to take
WEIGHTS = ("excite weight", "squeeze weight")
OWN = ("dexcite", "dsqueeze", "parts", "layers", "arrived")


class SeGrad(CudaFamily[SeGradParts]):
    """Config: `images` and `threads` of a block, each image having its share of the threads; the
    `math` of the two layers, "simt" in float or "mma" on tensor cores; what a block is to `hold`
    its images in, "registers" or "shared" memory, where they fit; blocks that share an SM.
    """

    name: ClassVar = "se_grad"
    image_layout = "nhwc"
    mixes_types: ClassVar = True

    def read(self, step: Step) -> SeGradParts:
        parts = SeGradParts(step, excite_gradient_of(step))
        refuse({**vector_kernel.not_an_element(*parts.dtypes), **_places(parts), **_types(parts)})
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
        declared = parts.shared_bytes_declared(config)
        reason = why_not_block(parts, config, declared, arch)
        if reason is not None:
            return reason
        threads = int(config["threads"]) * int(config["blocks_per_sm"])
        registers = min(arch.gpu.registers_per_sm // threads, REGISTERS_MOST)
        needed = declared + self.shared_bytes(parts, config, arch)
        most = arch.gpu.shared_memory_per_block_bytes
        few = registers < parts.registers(config)
        return first_reason(
            {
                f"its blocks leave a thread {registers} registers": few,
                f"it needs {needed} bytes of shared memory, a block has {most}": needed > most,
            }
        )

    def shared_bytes(self, parts: SeGradParts, config: Attrs, arch: Arch) -> int:
        return parts.held_bytes(config)

    def workspace_bytes(self, parts: SeGradParts, config: Attrs) -> int:
        return Workspace(parts, config).bytes

    def rest(self, parts: SeGradParts, config: Attrs) -> frozenset[str]:
        if not parts.adds:
            return frozenset()
        sums = {node.name for node in parts.gradient.sums}
        layers = {name for layer in parts.gradient.layers for name in _added(layer)}
        return frozenset(
            n for n, _ in (*parts.step.inputs, *parts.step.outputs) if n in layers | sums
        )

    def source(self, parts: SeGradParts, config: Attrs, arch: Arch) -> str:
        gradient = parts.gradient
        held = parts.hold(config) is not None
        first, second = parts.first, parts.second if held else parts.second_anew
        made = {name: len(first.images) + i for i, name in enumerate(parts.values)}
        places = {**{name: i for i, name in enumerate(first.images)}, **made}
        small, threads = parts.small, config["threads"]
        functions = MEMBERS.format(
            gate=_cxx(gradient.excite.derivative),
            hidden=_cxx(gradient.squeeze.derivative),
            first=_lines(first, parts),
            second=_lines(second, parts),
            first_results=len(first.results),
            second_results=len(second.results),
        )
        chain = struct(
            "Chain",
            functions,
            T=vector_kernel.ELEMENTS[parts.held_dtype],
            **{"kChannels": parts.channels, "kHidden": parts.hidden, "kPixels": parts.pixels},
            **{"kImages": config["images"], "kThreads": threads},
            kChunk=max(ASKED[parts.hold(config)] // len(first.images), 1),
            kHold=HOLDS[parts.hold(config)],
            **{"kLayers": parts.makes_layers, "kLayersMma": parts.layers_mma},
            kByRows1=gradient.squeeze.by_rows,
            kByRows2=gradient.excite.by_rows,
            **{"kRead": len(first.images), "kSmall": len(small), "kValues": len(parts.values)},
            kHeld=len(second.images),
            **{"kStoredFirst": len(parts.stored[0]), "kSumsFirst": len(parts.sums[0])},
            **{"kStoredSecond": len(parts.stored[1]), "kSumsSecond": len(parts.sums[1])},
            kHeldAs=[places[name] for name in second.images],
            kSlotOf=_slots(parts, second.images),
            kOfImages=[0 in axes_of(operand) for operand in small] or [False],
            kOfChannels=[1 in axes_of(operand) for operand in small] or [False],
            kAlpha=gradient.alpha,
        )
        types = f"Of<Chain, {operands_of(parts)}" if parts.mixed else "<Chain"
        kernel = f"SeGrad{types}, plantune::{kind_of(config)}>"
        sizes = {"blocks_per_sm": config["blocks_per_sm"], "adding_threads": ADDING_THREADS}
        sizes |= {"tiles": parts.tiles, "tile_sums": parts.sums_of_tile * parts.makes_layers}
        return vector_kernel.source(self.name, kernel, threads, chain, ENTRIES, **sizes)

    def bind(self, parts: SeGradParts, config: Attrs, frame: Frame) -> Binding:
        threads = int(config["threads"])
        count = parts.image.shape[0]
        constants = _constants(parts, unit_of(config), frame)
        workspace = Workspace(parts, config).addresses(frame)
        held_bytes = parts.held_bytes(config)
        kernel = vector_kernel.VectorKernel(frame.built, parts.blocks(config), threads, held_bytes)
        sums = parts.gradient.sums
        adding = parts.tiles * parts.splits + len(sums)
        add = Launcher(frame.built, max(adding, 1), ADDING_THREADS, name="add")
        names = _names(parts)
        read = [*parts.first.images, *(operand.name for operand in parts.small)]

        def address(name: str | None) -> int:
            if name is None:
                return 0
            return workspace[name] if name in workspace else constants.tensor(name).data_ptr()

        def arguments() -> ctypes.Array[ctypes.c_longlong]:
            addresses = [address(name) for name in names]
            return vector_kernel.members(*addresses, count, parts.splits)

        def launch(stream: int) -> None:
            kernel.launch(stream, arguments(), [constants.tensor(n) for n in read])

        def rest(stream: int) -> None:
            add.launch(stream, arguments())

        if not adding:
            return Binding(launch, constants=constants.all)
        return Binding.in_halves(launch, rest, constants.all)

    def estimate_us(self, parts: SeGradParts, config: Attrs, arch: Arch) -> float:
        """All blocks move what they must; one alone on its multiprocessor, or a few turns of them,
        load and wait in step.
        """
        cost, resident = arch.cost(self.name), _resident(parts, config, arch)
        turns = parts.blocks(config) / (resident * measured_chip().multiprocessors)
        moved_us = parts.moved_bytes(config) / cost["bytes_per_us"]
        work = moved_us * (1 + cost["in_step"] / max(turns, 1) + cost["alone"] * (resident == 1))
        work += parts.weights_bytes(config) / cost["cached_bytes_per_us"]
        # Few vectors of a thread leave its block waiting at each barrier, many leave few threads.
        work *= 1 + cost["rounds"] * abs(math.log2(parts.rounds(config) / ROUNDS))
        waits = max(turns, 1) * cost["block_us"] / (resident * int(config["threads"]))
        adding = cost["adding_us"] if parts.adds else 0.0
        return cost["launch_us"] + adding + waits + work * self.slowdown(parts, arch)


def _added(layer: LayerGradient) -> tuple[str | None, ...]:
    """The values that a layer's gradients are summed from, and the gradients."""
    return (layer.excited, layer.argument, layer.weight, layer.bias)


def _resident(parts: SeGradParts, config: Attrs, arch: Arch) -> int:
    """Blocks that a multiprocessor has at once."""
    shared = parts.shared_bytes_declared(config) + parts.held_bytes(config)
    shared += arch.gpu.shared_memory_reserved_per_block_bytes
    by_shared = arch.gpu.shared_memory_per_sm_bytes // shared
    return max(min(by_shared, int(config["blocks_per_sm"])), 1)


def _slots(parts: SeGradParts, held: Sequence[str]) -> list[int]:
    """Where each image that is read is put first, if anywhere: its own place among those that are
    held, or that of a value which takes it when it is made. None in another type than it is held.
    """
    read = parts.first.images
    own = {name: held.index(name) for name in read if name in held}
    free = iter(place for place, name in enumerate(held) if name not in read)
    held_as = {name for name in read if parts.dtype_of(name) == parts.held_dtype}
    return [
        -1 if name not in held_as else own[name] if name in own else next(free, -1) for name in read
    ]


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


def _constants(parts: SeGradParts, unit: int, frame: Frame) -> Constants:
    """Both matrices, and what else is constant in rows."""
    step, gradient = parts.step, parts.gradient
    operands = {o.name: (o.name, in_rows(step.types[o.name])) for o in parts.small}
    layers = zip(WEIGHTS, (gradient.excite, gradient.squeeze), strict=True)
    return Constants(
        frame,
        {
            **{
                word: (layer.matrix.weight, matrix(layer.matrix, _weight(parts, layer), unit))
                for word, layer in layers
            },
            **{name: read for name, read in operands.items() if name in step.constants},
        },
    )


def _lines(one: Pass, parts: SeGradParts) -> str:
    """The pass in C++, where the kernel has its operands."""
    found = {name: f"images[{i}]" for i, name in enumerate(one.images)}
    small = {operand: f"small[{i}]" for i, operand in enumerate(parts.small)}
    spread = parts.gradient.spread
    read = [small.get(o) or ("spread" if o.name in spread else found[o.name]) for o in one.operands]
    made = [f"out[{i}] = {name};" for i, name in enumerate(one.results)]
    return "\n    ".join((f"const float in[] = {{{', '.join(read)}}};", *one.lines, *made))


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
            f"{operand.name!r} is broadcast along other axes": axes_of(operand) not in known
            for operand in parts.small
        },
        **{f"{name!r} is not a value that was saved": name not in inputs for name in arguments},
        **{
            f"{name!r} stays inside, but is read outside": name not in taken
            for name, _ in step.outputs
        },
    }


def _weight(parts: SeGradParts, layer: LayerGradient) -> TensorType:
    return parts.step.types[layer.matrix.weight]


def _types(parts: SeGradParts) -> dict[str, bool]:
    """Reasons to refuse types of operands, and whether they hold."""
    sums = [node.name for node in parts.gradient.sums]
    made = {node.name: node.types[0].dtype for node in parts.step.nodes}
    excited = {made[layer.excited] for layer in parts.gradient.layers}
    of_layers = {*map(parts.dtype_of, parts.layer_values), *excited}
    gradients, totals = (
        {*map(parts.dtype_of, names)} for names in (parts.parameter_gradients, sums)
    )
    return {
        f"both layers are of one type, got {', '.join(sorted(of_layers))}": len(of_layers) > 1,
        "the parameters' gradients are of several types": len(gradients) > 1,
        "the sums of images are of several types": len(totals) > 1,
    }


def _cxx(derivative: str) -> str:
    return str(pointwise_chain.cxx_of(derivative)).format("dy", "of")


FAMILY = SeGrad()
