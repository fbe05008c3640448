"""Convolutions whose kernels make tiles of so many `rows` and `columns` of pixels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from plantune.base.canonical import Attrs
from plantune.devices.cuda.structs import fields
from plantune.kernels.cuda import vector_kernel
from plantune.kernels.family import Binding, Frame
from plantune.kernels.patterns.epilogue import ConvParts
from plantune.kernels.patterns.expression import expression, functors
from plantune.kernels.rendering import struct
from plantune.kernels.weights.constants import Arrangement, Constants, Parameter


class TiledConv(ConvParts):
    """A convolution of images in nhwc."""

    @property
    def filter(self) -> tuple[int, int]:
        rows, columns = self.step.types[self.weight].shape[2:]
        return rows, columns

    @property
    def images(self) -> dict[str, str | None]:
        """What each call brings, by the words of kernels."""
        return {"x": self.x, "residual": self.epilogue.residual, "y": self.y}

    def tiles(self, config: Attrs) -> int:
        """Tiles of all images."""
        images, _, rows, columns = self.conv.types[0].shape
        return images * -(-rows // int(config["rows"])) * -(-columns // int(config["columns"]))

    def read(self, config: Attrs) -> tuple[int, int]:
        """Rows and columns of the image that a tile reads."""
        strides, tile = self.conv.attrs["stride"], (config["rows"], config["columns"])
        rows, columns = (
            (int(size) - 1) * stride + taps
            for size, stride, taps in zip(tile, strides, self.filter, strict=True)
        )
        return rows, columns

    def too_large(self, config: Attrs) -> dict[str, bool]:
        """The reasons that smaller tiles would do, and whether each holds."""
        sizes = zip(("rows", "columns"), self.conv.types[0].shape[2:], strict=True)
        return {
            f"half of {config[word]} {word} hold all {size}": config[word] >= 2 * size
            for word, size in sizes
        }

    def struct(self, config: Attrs, **own: Any) -> str:
        """The struct Conv of a source, with members of the kernel's own, and its functions."""
        (height, width), (rows, columns) = self.step.types[self.x].shape[2:], self.filter
        (p, q), attrs = self.conv.types[0].shape[2:], self.conv.attrs
        members = struct(
            "Conv",
            T=vector_kernel.ELEMENTS[self.dtype],
            Expression=expression(self.epilogue.chain),
            **{"kH": height, "kW": width, "kP": p, "kQ": q, "kR": rows, "kS": columns},
            **dict(zip(("kStrideH", "kStrideW"), attrs["stride"], strict=True)),
            **dict(zip(("kPadH", "kPadW"), attrs["padding"], strict=True)),
            kThreads=config["threads"],
            kScale=self.epilogue.scale is not None,
            kBias=self.epilogue.bias is not None,
            **own,
        )
        return functors(self.epilogue.chain) + members

    def bind(
        self,
        frame: Frame,
        kernel: vector_kernel.VectorKernel,
        arguments: type[ctypes.Structure],
        read: Mapping[str, tuple[str | None, Arrangement]],
        **numbers: int,
    ) -> Binding:
        """Launches a kernel that takes such arguments, with what it reads of weights."""
        constants = Constants(frame, read)
        images = [name for name in (self.x, self.epilogue.residual) if name is not None]

        def launch(stream: int) -> None:
            given = constants.into(arguments, self.images, **numbers)
            kernel.launch(stream, given, [frame.values[name] for name in images])

        return Binding(launch, constants=constants.all)


def arguments(numbers: str = "") -> tuple[tuple[str, Any], ...]:
    """The members of what such a kernel takes, 64-bit `numbers` among them."""
    return fields(f"x w residual y {numbers} scale:one bias:one offset:one", one=Parameter)
