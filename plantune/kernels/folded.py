"""A convolution on a CPU: scale and offset are folded into its weight and bias at each refresh."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from plantune.kernels.family import Values
from plantune.kernels.patterns.epilogue import ConvEpilogue, folded_constants


class Folded:
    """The weight as `pack` makes it, the bias of each channel, and the least value."""

    weight: Tensor
    bias: Tensor | None
    least: float | None

    def __init__(
        self,
        epilogue: ConvEpilogue,
        values: Values,
        pack: Callable[[Tensor], Tensor],
        bias_shape: tuple[int, ...] = (-1,),
    ) -> None:
        self._epilogue, self._values = epilogue, values
        self._pack, self._bias_shape = pack, bias_shape

    def refresh(self) -> None:
        """Takes the weights as they are now."""
        weight, bias, self.least = folded_constants(self._epilogue, self._values)
        self.weight = self._pack(weight)
        self.bias = None if bias is None else bias.view(self._bias_shape)
