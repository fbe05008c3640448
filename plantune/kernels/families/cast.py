"""Casts that are launches of their own, of images from one layout into another if need be:
`csrc/cuda/cast.h` and `csrc/cuda/image_layout.h`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from plantune.graph import TensorType
from plantune.kernels.conversions import conversion_cost
from plantune.kernels.cuda import image_layout, vector_kernel
from plantune.kernels.cuda.cuda_family import (
    Arch,
    Attrs,
    Binding,
    CudaFamily,
    Frame,
    Parts,
    Step,
    first_reason,
    refuse,
)
from plantune.kernels.cuda.image_layout import THREADS, Design, Elements
from plantune.kernels.legality import not_the_end_alone
from plantune.kernels.weights.constants import rows_of

# Bytes that a thread asks for, if there are so many threads.
ASKED_BYTES, MANY_THREADS = 64, 1 << 17


@dataclass(frozen=True)
class CastParts(Parts):
    """y has the numbers of x in another dtype."""

    x: str
    y: str
    type: TensorType  # of x
    result: TensorType

    @property
    def is_image(self) -> bool:
        return len(self.type.shape) == 4 and self.x not in self.step.constants

    @property
    def elements(self) -> Elements:
        return Elements.cast(self.type.dtype, self.result.dtype)

    def design(self, config: Attrs) -> Design | None:
        """How images turn; None if elements stay where they are."""
        if config["source_layout"] == config["layout"]:
            return None
        return image_layout.design_of(
            *image_layout.sides(self.type.shape, config["layout"]), self.elements
        )

    @property
    def words(self) -> int:
        """That leave a thread which casts elements where they are."""
        words = ASKED_BYTES // (self.each * self.elements.in_bytes)
        return words if self.type.numel >= words * self.each * MANY_THREADS else 1

    @property
    def each(self) -> int:
        """Neighbours that leave as one word."""
        return self.elements.out_word


class Cast(CudaFamily[CastParts]):
    """Config: images are read in `source_layout` and made in `layout`."""

    name: ClassVar = "cast"

    def read(self, step: Step) -> CastParts:
        node = step.nodes[0]
        refuse({"only a cast alone": step.ops != ("cast",), **not_the_end_alone(step)})
        x, y = step.types[node.inputs[0]], node.types[0]
        refuse(
            {
                **vector_kernel.not_an_element(y.dtype),
                f"it casts {', '.join(image_layout.SOURCES)}, got {x.dtype}": (
                    x.dtype not in image_layout.SOURCES
                ),
                "there is nothing to cast": not 0 < x.numel <= image_layout.COUNT_MAX,
            }
        )
        return CastParts(step, node.inputs[0], node.name, x, y)

    def why_not_config(self, parts: CastParts, config: Attrs, arch: Arch) -> str | None:
        turns = config["source_layout"] != config["layout"]
        return first_reason(
            {
                "what are not images have the layout nchw": (
                    not parts.is_image and (turns or config["layout"] != "nchw")
                ),
                "neither rows nor columns are whole words": (
                    turns and parts.is_image and parts.design(config) is None
                ),
            }
        )

    def threads(self, parts: CastParts, config: Attrs) -> int:
        return THREADS

    def layouts(self, parts: CastParts, config: Attrs) -> Mapping[str, str]:
        if not parts.is_image:
            return {}
        return {parts.x: str(config["source_layout"]), parts.y: str(config["layout"])}

    def estimate_us(self, parts: CastParts, config: Attrs, arch: Arch) -> float:
        design = parts.design(config)
        odd = design is not None and design.is_odd
        return conversion_cost(arch).cast_us(parts.type, parts.result, odd=odd)

    def source(self, parts: CastParts, config: Attrs, arch: Arch) -> str:
        design = parts.design(config)
        if design is not None:
            return design.source
        kernel = f"Cast<{parts.elements.template}, {THREADS}, {parts.words}>"
        return vector_kernel.source(self.name, kernel, THREADS)

    def bind(self, parts: CastParts, config: Attrs, frame: Frame) -> Binding:
        design, images, count = parts.design(config), parts.type.shape[0], parts.type.numel
        constants, values = rows_of(parts.step, frame), frame.values
        block = THREADS * parts.words * parts.each
        blocks = -(-count // block) if design is None else design.blocks(images)
        kernel = vector_kernel.VectorKernel(frame.built, blocks, THREADS)

        def launch(stream: int) -> None:
            x, y = constants.tensor(parts.x), values[parts.y]
            if design is None:
                arguments = vector_kernel.members(y.data_ptr(), x.data_ptr(), count)
                kernel.launch(stream, arguments, [x])
            else:
                kernel.launch(stream, design.turn(images, y, x), [x])

        return Binding(launch, constants=constants.all)


FAMILY = Cast()
