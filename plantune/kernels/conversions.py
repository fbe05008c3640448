"""What it costs to bring images into their other layout, or numbers into another dtype."""

from __future__ import annotations

from dataclasses import dataclass

from plantune.graph.layouts import moves
from plantune.graph.types import LAYOUTS, TensorType
from plantune.kernels.chips import measured_chip
from plantune.kernels.cuda.image_layout import change_design
from plantune.space.arch import Arch

COSTS = "conversion"  # their table in the files of search spaces
KINDS = ("", "odd_", "strided_")


@dataclass(frozen=True)
class ConversionCost:
    """Of a change of layout, by its size and kind: `odd` ones move single elements one way,
    `strided` ones are torch's.
    """

    launch_us: float
    bytes_per_us: float
    odd_bytes_per_us: float
    strided_bytes_per_us: float
    on_gpu: bool = False

    def time_us(self, type_: TensorType) -> float:
        """Of an image that goes from one layout into the other; none if both are the same."""
        if len(type_.shape) != 4 or not moves(type_, *LAYOUTS):
            return 0.0
        return self.launch_us + 2 * type_.size_bytes / self._rate(type_)

    def _rate(self, type_: TensorType) -> float:
        if not self.on_gpu:
            return self.bytes_per_us
        design = change_design(type_.shape, type_.torch_dtype, "nhwc")
        if design is None:
            return self.strided_bytes_per_us
        return self.odd_bytes_per_us if design.is_odd else self.bytes_per_us

    def cast_us(self, source: TensorType, result: TensorType, *, odd: bool) -> float:
        """Of a kernel of ours that casts, whether or not it changes the layout."""
        rate = self.odd_bytes_per_us if odd else self.bytes_per_us
        return self.launch_us + (source.size_bytes + result.size_bytes) / rate


def conversion_cost(arch: Arch) -> ConversionCost:
    """What it costs on the chip of an arch."""
    cost = arch.cost(COSTS)
    share = 1.0
    if arch.chip is not None:
        share = arch.chip.memory_gb_per_s / measured_chip().memory_gb_per_s
    plain, odd, strided = (
        share * cost.get(f"{word}bytes_per_us", cost["bytes_per_us"]) for word in KINDS
    )
    return ConversionCost(cost["launch_us"], plain, odd, strided, on_gpu=arch.kind == "cuda")
