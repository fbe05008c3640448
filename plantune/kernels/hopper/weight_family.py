"""Families of gradients of weights on Hopper's tensor copies and warpgroup products."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from plantune.devices.cuda.tensor_map import TensorMap, tensor_map
from plantune.errors import IllegalCandidate
from plantune.graph import Node, Step
from plantune.kernels.cuda.launcher import Launcher
from plantune.kernels.family import Arch, Attrs, Binding, Frame, Parts, images, refuse
from plantune.kernels.hopper.family import COSTS, WarpgroupFamily, not_multiplied
from plantune.kernels.hopper.launch import beyond_copies, placing_images, room_for, word
from plantune.kernels.hopper.products import ELEMENTS
from plantune.kernels.hopper.tiles import CHUNK, ROW_BYTES, ConvShape
from plantune.kernels.hopper.weight_gradient import Cut, WgradDesign, best_cut
from plantune.kernels.legality import not_of, not_within

STRIDE_MAX, KERNEL_MAX = 2, 3
BOX_US = 0.01


class Maps(ctypes.Structure):
    """plantune::WgradMaps."""

    _fields_ = (("dy", TensorMap), ("x", TensorMap))


@dataclass(frozen=True)
class WgradParts(Parts):
    """A step that is the gradient of a convolution's weight."""

    @property
    def node(self) -> Node:
        return self.step.nodes[0]

    @property
    def dtype(self) -> str:
        """Of the gradient."""
        return self.step.types[self.node.name].dtype

    @property
    def factor(self) -> str:
        """Of what is multiplied."""
        return self.node.types[0].dtype

    @cached_property
    def shape(self) -> ConvShape:
        """The convolution; without padding and stride, 1x1 is a product of all pixels in a row."""
        attrs: Any = self.node.attrs
        dy, x = (self.step.types[name].shape for name in self.node.inputs)
        (n, o, p, q), (_, c, h, w) = dy, x
        r, s = self.node.types[0].shape[2:]
        stride, padding = attrs["stride"], attrs["padding"]
        if (r, s, stride, padding) == (1, 1, (1, 1), (0, 0)):
            n, h, p, w, q = 1, 1, 1, n * h * w, n * p * q
        return ConvShape(n, c, h, w, o, r, s, p, q, stride, padding)


class WgradFamily(WarpgroupFamily[WgradParts]):
    """Config: a block takes `tile_m` by `tile_n` channels and boxes of at most `tile_k` pixels,
    with `stages` of them in flight. By `order`, in a box the pixels of an image are neighbours, or
    the images of a pixel. About `blocks` share the work. The gradient is made in `layout`.
    """

    mixes_types: ClassVar = True
    # What it multiplies.
    multiplies: ClassVar[Collection[str]] = ELEMENTS

    def read(self, step: Step) -> WgradParts:
        parts = WgradParts(step)
        if step.ops != ("conv2d_wgrad",):
            raise IllegalCandidate("only the gradient of a convolution's weight alone")
        shape, attrs = parts.shape, parts.node.attrs
        large = max(shape.r, shape.s) > KERNEL_MAX or max(shape.stride) > STRIDE_MAX
        refuse(
            {
                **not_multiplied(parts.factor, self.multiplies),
                **not_of(step, parts.factor, *parts.node.inputs),
                f"a gradient of {parts.dtype}": parts.dtype not in (parts.factor, "float32"),
                "only convolutions without groups and dilation": attrs["groups"] != 1
                or attrs["dilation"] != (1, 1),
                "there is nothing to compute": min(shape.n, shape.c, shape.o, shape.q) == 0,
                f"pixels of {shape.c} and {shape.o} channels do not start at 16 bytes": shape.c % 8
                or shape.o % 8,
                f"kernels up to 3x3 and strides up to 2, got {shape.r}x{shape.s} and "
                f"{shape.stride}": large,
                # There a NaN of a pixel whose taps read nothing would reach the sums.
                **not_within(shape.padding, (shape.r, shape.s)),
                "an image is constant": step.constants,
            }
        )
        return parts

    def layouts(self, parts: WgradParts, config: Attrs) -> Mapping[str, str]:
        return {**images(parts.step, "nhwc"), parts.node.name: str(config["layout"])}

    def why_not_config(self, parts: WgradParts, config: Attrs, arch: Arch) -> str | None:
        if _cut(parts, config) is None:
            return f"no box of {config['tile_k']} pixels can be copied at once"
        design, blocks = self.design(parts, config), int(config["blocks"])
        if reason := design.why_not():
            return reason
        if blocks >= 2 * design.tiles * design.cut.boxes:
            return f"half of {blocks} blocks have no box of pixels"
        return super().why_not_config(parts, config, arch)

    def design(self, parts: WgradParts, config: Attrs) -> WgradDesign:
        cut, axes = _cut(parts, config), {key: int(config[key]) for key in SIZES}
        if cut is None:
            raise IllegalCandidate(f"no box of {config['tile_k']} pixels can be copied at once")
        return self.uncut(cut, axes, config).shared_by(int(config["blocks"]))

    def uncut(self, cut: Cut, axes: Mapping[str, int], config: Attrs) -> WgradDesign:
        """The design of one block for all pixels."""
        return WgradDesign(cut, **axes, split_k=1)

    def workspace_bytes(self, parts: WgradParts, config: Attrs) -> int:
        rooms = room_for(parts.step, parts.node.inputs)
        return rooms + self.design(parts, config).sums_bytes

    def copied(self, parts: WgradParts) -> frozenset[str]:
        return frozenset(parts.node.inputs)

    def rest(self, parts: WgradParts, config: Attrs) -> frozenset[str]:
        added = self.design(parts, config).split_k > 1
        return frozenset((parts.node.name,) if added else ())

    def source(self, parts: WgradParts, config: Attrs, arch: Arch) -> str:
        design = self.design(parts, config)
        return design.source(parts.factor, parts.dtype, str(config["layout"]))

    def bind(self, parts: WgradParts, config: Attrs, frame: Frame) -> Binding:
        design, names = self.design(parts, config), parts.node.inputs
        place = placing_images(parts.step, names, frame)
        sums = beyond_copies(parts.step, names, frame)
        multiply = Launcher(
            frame.built, design.blocks, design.threads, shared_bytes=design.shared_bytes
        )
        add = Launcher(frame.built, design.sum.blocks, design.sum.threads, name="sum")

        def launch(stream: int) -> None:
            dy, x, copied = place(stream)
            maps = Maps(_result_map(dy, design.cut), _image_map(x, design.cut))
            dw = ctypes.c_void_p(frame.values[parts.node.name].data_ptr())
            multiply.launch(stream, maps, ctypes.c_void_p(sums), dw, programmatic=not copied)

        def rest(stream: int) -> None:
            dw = ctypes.c_void_p(frame.values[parts.node.name].data_ptr())
            add.launch(stream, ctypes.c_void_p(sums), dw)

        return Binding(launch) if design.split_k == 1 else Binding.in_halves(launch, rest)

    def estimate_us(self, parts: WgradParts, config: Attrs, arch: Arch) -> float:
        return _estimate_us(self.design(parts, config), parts.step.traffic_bytes, arch)


SIZES = ("tile_m", "tile_n", "stages")


def _cut(parts: WgradParts, config: Attrs) -> Cut | None:
    return best_cut(parts.shape, int(config["tile_k"]), inside=config["order"] == "images")


def _estimate_us(design: WgradDesign, traffic_bytes: float, arch: Arch) -> float:
    """Rounds of blocks over the chip, each box bound by products or by copies, of which `stages`
    are under way; then what stores the sums, and what adds them.

    Fitted to 218 times of ten convolutions of se_resnet9 with 128 and 2048 images, deviation 12 %
    (H200, 2026-11-22).
    """
    assert arch.chip is not None
    cost, cycles_per_us = arch.cost("hopper_wgrad"), arch.cost(COSTS)["sm_cycles_per_us"]
    cycles = design.cut.tap_pixels / 16 * design.tile_m / CHUNK * design.tile_n / 2
    cycles *= design.products
    # A warpgroup alone waits for each of its products.
    slower = cost["alone"] if design.groups == 1 else 1.05
    products = cycles * slower / cycles_per_us + cost["box_us"]
    copies = (cost["copy_us"] + products) / design.stages
    box_us = max(products, copies, design.stage_bytes / cost["sm_bytes_per_us"])
    store_us = design.taps * design.tile_m * design.tile_n / cost["sums_per_us"]
    adds_us = cost["add_us"] + 2 * design.sums_bytes / cost["sums_bytes_per_us"]
    if design.split_k == 1:
        store_us, adds_us = store_us * cost["rounded"], 0.0
    waves = -(-design.blocks // arch.chip.multiprocessors)
    busy_us = waves * (design.boxes_of_block * box_us + cost["start_us"] + store_us)
    under_way = min(design.blocks, arch.chip.multiprocessors) * design.stages * design.stage_bytes
    slow = cost["arrives_us"] / under_way + 1 / cost["moved_bytes_per_us"]
    if design.taps > 1:  # pixels at the edge of a box are read by its neighbours, too
        slow = max(slow, 1 / cost["bytes_per_us"])
    moving_us = max(traffic_bytes - cost["cached_bytes"], 0) * slow
    # Of two that move as much in the same time, that of the larger boxes was quicker.
    return max(busy_us, moving_us) + BOX_US * design.boxes_of_block + adds_us


def _result_map(dy: Tensor, cut: Cut) -> TensorMap:
    shape = cut.shape
    return _map(dy, cut, (shape.o, shape.q, shape.p), cut.box[:2], (1, 1))


def _image_map(x: Tensor, cut: Cut) -> TensorMap:
    shape = cut.shape
    stride_h, stride_w = shape.stride
    return _map(x, cut, (shape.c, shape.w, shape.h), cut.phase, (stride_w, stride_h))


def _map(
    image: Tensor,
    cut: Cut,
    sizes: tuple[int, int, int],
    sides: tuple[int, int],
    steps: tuple[int, int],
) -> TensorMap:
    """Boxes of an image of that many channels, columns and rows, in the order of a stage."""
    channels, columns, rows = sizes
    pixel = channels * image.element_size()
    w = (columns, pixel, sides[0] * steps[0], steps[0])
    h = (rows, pixel * columns, sides[1] * steps[1], steps[1])
    n = (cut.shape.n, pixel * columns * rows, cut.box.n, 1)
    axes = (n, w, h) if cut.inside else (w, h, n)
    counts, strides, box, every = zip(*axes, strict=True)
    return tensor_map(
        word(image),
        image.data_ptr(),
        (channels, *counts),
        strides,
        (ROW_BYTES // image.element_size(), *box),
        steps=(1, *every),
    )
