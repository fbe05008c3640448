"""Squeeze-and-excite with its gate and what follows, in one pass over each image."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from plantune.devices.cuda.structs import fields
from plantune.graph import Node
from plantune.graph.types import DTYPES
from plantune.kernels.chips import measured_chip
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.cuda.cuda_family import (
    Arch,
    Attrs,
    Binding,
    CudaFamily,
    Frame,
    Step,
    first_reason,
    refuse,
)
from plantune.kernels.cuda.small_matrix import (
    HIDDEN_MAX,
    IMAGES_MAX,
    by_tiles,
    kind_of,
    matrix,
    unit_of,
    why_not_block,
)
from plantune.kernels.cuda.squeeze_tail import SeTailParts
from plantune.kernels.legality import not_of
from plantune.kernels.patterns.expression import expression, functor, functors
from plantune.kernels.patterns.squeeze_excite import (
    copies_of,
    head_of,
    squeeze_excite_of,
)
from plantune.kernels.rendering import cxx_bool
from plantune.kernels.weights.constants import Arrangement, Constants, as_it_is, in_rows

SOURCE = (
    """#include "cuda/se_tail.h"
{operands}{functors}using Parts = plantune::SeTailParts<{expression}, {layers}, {flags}>;
using Kernel = plantune::{tail}<{element}, {channels}, {hidden}, {pixels}, Parts, {images},
                                {threads}, plantune::{matrix}>;"""
    + vector_kernel.ENTRIES
)


class SeTail(CudaFamily[SeTailParts]):
    """Config: `images` and `threads` of a block, each image having its share of the threads; the
    `math` of the two layers, "simt" in float or "mma" on tensor cores.
    """

    name: ClassVar = "se_tail"
    image_layout = "nhwc"
    mixes_types: ClassVar = True

    def read(self, step: Step) -> SeTailParts:
        copies = copies_of(step)
        made = [node for node in step.nodes if node.name not in copies]
        refuse({"there is nothing but casts": not made})
        head, nodes = head_of(step, made)
        pool = nodes[-1] if len(nodes) > 1 and nodes[-1].op == "avg_pool2d" else None
        nodes = nodes if pool is None else nodes[:-1]
        tail = squeeze_excite_of(step, nodes, copies, any_function=True)
        also = next((name for name, source in copies.items() if source == tail.result), None)
        parts = SeTailParts(step, tail, head, pool, also)
        type_, width = step.types[tail.image], tail.squeeze.width
        by_eights = type_.numel and type_.shape[1] % 8 == 0
        many = len(tail.means) > 2 or len(tail.gates) > 2
        refuse(
            {
                **vector_kernel.not_an_element(*parts.dtypes),
                f"channels are read by eights, got shape {type_.shape}": not by_eights,
                f"it takes up to {HIDDEN_MAX} hidden channels, got {width}": width > HIDDEN_MAX,
                "more than two shapes of the means or gates are read outside": many,
                **_why_not_types(parts, copies),
                **_why_not_pool(step, pool, tail.result),
            }
        )
        return parts

    def why_not_config(self, parts: SeTailParts, config: Attrs, arch: Arch) -> str | None:
        declared = parts.shared_bytes_at_most(config)
        needed = declared + self.shared_bytes(parts, config, arch)
        most = arch.gpu.shared_memory_per_block_bytes
        reason = why_not_block(parts, config, declared, arch)
        over = f"it needs {needed} bytes of shared memory, a block has {most}"
        return reason or first_reason({over: needed > most})

    def shared_bytes(self, parts: SeTailParts, config: Attrs, arch: Arch) -> int:
        return parts.shared_bytes_at_launch(config)

    def source(self, parts: SeTailParts, config: Attrs, arch: Arch) -> str:
        _, channels, height, width = parts.image.shape
        return SOURCE.format(
            operands=parts.operands() if parts.mixed else "",
            tail="SeTailOf" if parts.mixed else "SeTail",
            element="Operands" if parts.mixed else vector_kernel.ELEMENTS[parts.weight],
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
        work += 2 * products * DTYPES[parts.weight].itemsize * blocks / cost["cached_bytes_per_us"]
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
        threads, shared = int(config["threads"]), parts.shared_bytes_at_launch(config)
        kernel = vector_kernel.VectorKernel(frame.built, blocks, threads, shared)
        constants = _constants(parts, unit_of(config), frame)
        images = {
            **dict(zip(("x", "residual"), parts.read, strict=True)),
            "offset": None if tail.offset in parts.step.constants else tail.offset,
            **dict(zip(("y", "unshifted", "pooled", "also"), parts.stored, strict=True)),
            "hidden": tail.hidden,
        }
        lists = {"means": tail.means, "gates": tail.gates}

        def launch(stream: int) -> None:
            pairs = {word: _pair(*(values[n] for n in names)) for word, names in lists.items()}
            arguments = constants.into(_Arguments, images, **pairs, images=count)
            kernel.launch(
                stream, arguments, [values[name] for name in parts.read if name is not None]
            )

        return Binding(launch, constants=constants.all)


class _Arguments(ctypes.Structure):
    """plantune::SeTailArguments."""

    _fields_ = fields(
        "x weight1 bias1 weight2 bias2 scale shift residual offset y unshifted pooled "
        "means:void_p[2] hidden gates:void_p[2] images:longlong also"
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
            "weight1": (squeeze.weight, matrix(squeeze, step.types[squeeze.weight], unit)),
            "weight2": (excite.weight, matrix(excite, step.types[excite.weight], unit)),
            **{
                word: (name, _number(parts, name))
                for word, name in vectors.items()
                if name in step.constants
            },
        },
    )


def _number(parts: SeTailParts, name: str) -> Arrangement:
    """Beside operands of several types numbers are float32."""
    type_ = parts.step.types[name]
    if not parts.mixed:
        return in_rows(type_)
    return Arrangement(type_.shape, torch.float32, as_it_is, in_place=True)


def _pair(*tensors: Tensor) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * 2)(*(tensor.data_ptr() for tensor in tensors))


def _flags(parts: SeTailParts) -> str:
    """The flags of plantune::SeTailParts."""
    tail, head = parts.tail, parts.head
    saved = tail.means or tail.hidden or tail.gates
    flags = (tail.result, tail.unshifted, saved, head.scale or head.shift)
    return ", ".join((*map(cxx_bool, flags), parts.pooled_type))


def _why_not_types(parts: SeTailParts, copies: Mapping[str, str]) -> dict[str, object]:
    """Reasons to refuse types of operands, and whether they hold."""
    tail, types = parts.tail, parts.step.types
    own = {*tail.means, *tail.gates, parts.also}
    brought = tail.offset if tail.offset not in parts.step.constants else None
    weights = {types[layer.weight].dtype for layer in (tail.squeeze, tail.excite)}
    return {
        f"both weights are of one type, got {', '.join(sorted(weights))}": len(weights) > 1,
        **(not_of(parts.step, "float32", brought) if parts.mixed else {}),
        **{f"{name!r} is a copy that no kernel stores": name not in own for name in copies},
    }


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
