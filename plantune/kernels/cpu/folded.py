"""A convolution on a CPU: the scale is folded into its weight at each refresh."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from plantune.devices.cuda.structs import fields
from plantune.graph.ops.functions import FUNCTIONS
from plantune.graph.ops.pointwise import along_axis
from plantune.kernels.family import Values
from plantune.kernels.patterns.epilogue import ConvEpilogue


class Epilogue(ctypes.Structure):
    """The struct of that name in `csrc/cpu/lanes.hpp`."""

    _fields_ = fields("bias residual unshifted applies:int offset:float")


class Folded:
    """The weight as `pack` makes it, the bias of each channel, and the offset.

    relu(v) + offset is max(v + offset, offset): the bias has that offset too, unless it stays
    `apart`.
    """

    weight: Tensor
    bias: Tensor | None
    offset: float

    def __init__(
        self,
        epilogue: ConvEpilogue,
        values: Values,
        pack: Callable[[Tensor], Tensor],
        bias_shape: tuple[int, ...] = (-1,),
        *,
        apart: bool = False,
    ) -> None:
        self.function = epilogue.only_function()
        self._epilogue, self._values = epilogue, values
        self._pack, self._bias_shape = pack, bias_shape
        folds = self.function == "relu" and not apart
        self._biases = (epilogue.bias, epilogue.offset if folds else None)

    def refresh(self) -> None:
        """Takes the weights as they are now."""
        epilogue, values = self._epilogue, self._values
        weight = values[epilogue.conv.inputs[1]]
        if epilogue.scale is not None:
            weight = weight * along_axis(values[epilogue.scale], 4, 0)
        self.weight, self.bias = self._pack(weight), None
        for name in self._biases:
            if name is not None:
                each = values[name].flatten().expand(epilogue.conv.types[0].shape[1])
                each = each.contiguous().view(self._bias_shape)
                self.bias = each if self.bias is None else self.bias + each
        self.offset = 0.0 if epilogue.offset is None else values[epilogue.offset].item()

    def finish(self, y: Tensor) -> None:
        """What follows the sums, in place; their bias has the offset of a ReLU."""
        if self.function == "relu":
            y.clamp_(min=self.offset)
        elif self.function is not None:
            FUNCTIONS[self.function].torch(y, out=y)
            if self._epilogue.offset is not None:
                y.add_(self.offset)

    def after_sums(self, residual: int | None, unshifted: int | None = None) -> Epilogue:
        """The same for kernels that do it themselves; the offset is `apart`, the residual at an
        address, and what is not shifted by the offset leaves at another.
        """
        bias = None if self.bias is None else self.bias.data_ptr()
        return Epilogue(bias, residual, unshifted, self.function is not None, self.offset)
