"""Squeeze-and-excite with its gate and what follows, in one pass over each image."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plantune.devices.cuda.structs import fields
from plantune.graph import Node
from plantune.kernels.chips import measured_chip
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import Arch, Attrs, Binding, CudaFamily, Frame, Step, refuse
from plantune.kernels.cuda.small_matrix import (
    HIDDEN_MAX,
    IMAGES_MAX,
    by_tiles,
    kind_of,
    matrix,
    shared_bytes_at_most,
    unit_of,
    why_not_block,
)
from plantune.kernels.patterns.expression import expression, functor, functors
from plantune.kernels.patterns.squeeze_excite import Head, TailParts, head_of, squeeze_excite_of
from plantune.kernels.rendering import cxx_bool
from plantune.kernels.weights.constants import Constants, in_rows

SOURCE = (
    """#include "cuda/se_tail.h"
{functors}using Parts = plantune::SeTailParts<{expression}, {layers}, {flags}>;
using Kernel = plantune::SeTail<{element}, {channels}, {hidden}, {pixels}, Parts, {images},
                                {threads}, plantune::{matrix}>;"""
    + vector_kernel.ENTRIES
)


@dataclass(frozen=True)
class SeTailParts(TailParts):
    """A tail as threads divide it, with what comes before its mean."""

    head: Head
    pool: Node | None = None  # of the result, which leaves, too

    @property
    def pooled_type(self) -> str:
        """What the kernel calls the pool's windows."""
        if self.pool is None:
            return "plantune::NoPool"
        _, _, height, width = self.image.shape
        sizes = (self.pool.attrs[key][0] for key in ("kernel", "stride", "padding"))
        return f"plantune::TailPool<{', '.join(map(str, (*sizes, height, width)))}>"

    def shared_bytes_at_most(self, config: Attrs) -> int:
        """What plantune::SeTail declares: the sums of each group of pixels, and for both layers."""
        _, channels, height, width = self.image.shape
        images, threads, hidden = config["images"], config["threads"], self.tail.squeeze.width
        # Pixels of an image that its threads take at once.
        vectors = channels // vector_kernel.width(self.image)
        groups = min(threads // images // vectors, height * width)
        # Rows are padded so that threads that read several at once meet other banks.
        sums = images * groups * (channels + 16) * 4
        if self.pool is not None:
            sums += images * self.image.size_bytes // self.image.shape[0]
        squeeze = shared_bytes_at_most(hidden, channels, images, threads)
        return int(sums + squeeze + shared_bytes_at_most(channels, hidden, images, threads))


class SeTail(CudaFamily[SeTailParts]):
    """Config: `images` and `threads` of a block, each image having its share of the threads; the
    `math` of the two layers, "simt" in float or "mma" on tensor cores.
    """

    name: ClassVar = "se_tail"
    image_layout = "nhwc"

    def read(self, step: Step) -> SeTailParts:
        head, nodes = head_of(step)
        pool = nodes[-1] if len(nodes) > 1 and nodes[-1].op == "avg_pool2d" else None
        nodes = nodes if pool is None else nodes[:-1]
        tail = squeeze_excite_of(step, nodes, any_function=True)
        type_, width = step.types[tail.image], tail.squeeze.width
        by_eights = type_.numel and type_.shape[1] % 8 == 0
        many = len(tail.means) > 2 or len(tail.gates) > 2
        refuse(
            {
                **vector_kernel.not_an_element(type_.dtype),
                f"channels are read by eights, got shape {type_.shape}": not by_eights,
                f"it takes up to {HIDDEN_MAX} hidden channels, got {width}": width > HIDDEN_MAX,
                "more than two shapes of the means or gates are read outside": many,
                **_why_not_pool(step, pool, tail.result),
            }
        )
        return SeTailParts(step, tail, head, pool)

    def why_not_config(self, parts: SeTailParts, config: Attrs, arch: Arch) -> str | None:
        return why_not_block(parts.image, config, parts.shared_bytes_at_most(config), arch)

    def source(self, parts: SeTailParts, config: Attrs, arch: Arch) -> str:
        _, channels, height, width = parts.image.shape
        return SOURCE.format(
            element=vector_kernel.ELEMENTS[parts.image.dtype],
            channels=channels,
            hidden=parts.tail.squeeze.width,
            pixels=height * width,
            expression=expression(parts.tail.chain),
            functors=functors((*parts.tail.chain, *parts.tail.functions)),
            layers=", ".join(map(functor, parts.tail.functions)),
            flags=_flags(parts),
            images=config["images"],
            threads=config["threads"],
            matrix=kind_of(config),
        )

    def estimate_us(self, parts: SeTailParts, config: Attrs, arch: Arch) -> float:
        """Blocks move images, read both weights and multiply; few of them leave chips idle."""
        cost, image = arch.cost(self.name), parts.image
        images, threads, n = int(config["images"]), int(config["threads"]), image.shape[0]
        blocks, products = -(-n // images), image.shape[1] * parts.tail.squeeze.width
        held = image.numel // n * images // threads  # elements of a thread, of each image it reads
        again = 1 + cost["held_again"] * (held > cost["held_elements"])
        work = parts.step.traffic_bytes / cost["bytes_per_us"] * again
        work += 2 * products * image.torch_dtype.itemsize * blocks / cost["cached_bytes_per_us"]
        # Tensor cores have columns for so many images, whether they are there or not.
        multiplied = blocks * IMAGES_MAX if by_tiles(config) else n
        work += 2 * products * multiplied / cost[f"{config['math']}_products_per_us"]
        wide_us = cost["wide_us"] * (threads / 256 - 1) + cost["mma_us"] * by_tiles(config)
        wide_us += cost["pooled_us"] * images * (parts.pool is not None)
        idle = max(measured_chip().multiprocessors / blocks, 1)
        return float(cost["launch_us"] + wide_us + work * idle * self.slowdown(parts, arch))

    def bind(self, parts: SeTailParts, config: Attrs, frame: Frame) -> Binding:
        tail, values, count = parts.tail, frame.values, parts.image.shape[0]
        blocks = -(-count // int(config["images"]))
        kernel = vector_kernel.VectorKernel(frame.built, blocks, int(config["threads"]))
        constants = _constants(parts, unit_of(config), frame)
        images = {
            "x": parts.head.image,
            "residual": tail.residual,
            "offset": None if tail.offset in parts.step.constants else tail.offset,
            "y": tail.result,
            "unshifted": tail.unshifted,
            "pooled": None if parts.pool is None else parts.pool.name,
            "hidden": tail.hidden,
        }
        read = (parts.head.image, tail.residual)
        lists = {"means": tail.means, "gates": tail.gates}

        def launch(stream: int) -> None:
            pairs = {word: _pair(*(values[n] for n in names)) for word, names in lists.items()}
            arguments = constants.into(_Arguments, images, **pairs, images=count)
            kernel.launch(stream, arguments, [values[name] for name in read if name is not None])

        return Binding(launch, constants=constants.all)


class _Arguments(ctypes.Structure):
    """plantune::SeTailArguments."""

    _fields_ = fields(
        "x weight1 bias1 weight2 bias2 scale shift residual offset y unshifted pooled "
        "means:void_p[2] hidden gates:void_p[2] images:longlong"
    )


def _constants(parts: SeTailParts, unit: int, frame: Frame) -> Constants:
    """Both matrices, and the vectors that no call brings, in rows."""
    squeeze, excite = parts.tail.squeeze, parts.tail.excite
    vectors = {
        "bias1": squeeze.bias,
        "bias2": excite.bias,
        "offset": parts.tail.offset,
        "scale": parts.head.scale,
        "shift": parts.head.shift,
    }
    step = parts.step
    return Constants(
        frame,
        {
            "weight1": (squeeze.weight, matrix(squeeze, parts.image, unit)),
            "weight2": (excite.weight, matrix(excite, parts.image, unit)),
            **{
                word: (name, in_rows(step.types[name]))
                for word, name in vectors.items()
                if name in step.constants
            },
        },
    )


def _pair(*tensors: Tensor) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * 2)(*(tensor.data_ptr() for tensor in tensors))


def _flags(parts: SeTailParts) -> str:
    """The flags of plantune::SeTailParts."""
    tail, head = parts.tail, parts.head
    saved = tail.means or tail.hidden or tail.gates
    flags = (tail.result, tail.unshifted, saved, head.scale or head.shift)
    return ", ".join((*map(cxx_bool, flags), parts.pooled_type))


def _why_not_pool(step: Step, pool: Node | None, result: str | None) -> dict[str, object]:
    """Reasons to refuse what is made of the result beside it, and whether they hold."""
    if pool is None:
        return {}
    attrs = pool.attrs
    equal = all(len({*attrs[key]}) == 1 for key in ("kernel", "stride", "padding"))
    return {
        f"{pool.inputs[0]!r} is pooled, which is not the result": result is None
        or pool.inputs[0] != result,
        f"only pools with windows of equal sides, got {attrs}": not equal,
        "windows of the pool count other pixels at the border": not attrs["count_padding"]
        and attrs["padding"] != (0, 0),
        f"{pool.name!r} is not read": pool.name not in dict(step.outputs),
    }


FAMILY = SeTail()
