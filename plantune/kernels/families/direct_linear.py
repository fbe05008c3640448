"""Linear layers by `csrc/cpu/direct_conv.cpp`: each row of the input is an image of one pixel."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from plantune.graph import Step
from plantune.kernels.cpu import direct
from plantune.kernels.cpu.folded import Epilogue
from plantune.kernels.family import Attrs, Binding, Frame, refuse
from plantune.kernels.patterns.expression import defined_function
from plantune.kernels.patterns.linear_layer import LinearLayer, linear_layer_of


class DirectLinear(direct.DirectFamily[LinearLayer]):
    """Without a config."""

    name: ClassVar = "direct_linear"

    def defined(self, parts: LinearLayer) -> str:
        return defined_function(() if parts.activation is None else (parts.activation,))

    def read(self, step: Step) -> LinearLayer:
        layer = linear_layer_of(step)
        dtype = layer.product.types[0].dtype
        refuse(
            {
                f"it is written for float32, got {dtype}": dtype != "float32",
                "it reads the left matrix by rows": bool(layer.product.attrs["transpose_a"]),
                "the right matrix is no weight": layer.b not in step.constants,
                "the bias is no weight": layer.bias not in (None, *step.constants),
                "there is nothing to compute": 0 in layer.sizes,
            }
        )
        return layer

    def can_be_guessed(self, parts: LinearLayer, config: Attrs) -> bool:
        _, outputs, depth = parts.sizes
        return direct.is_large(depth, outputs)

    def bind(self, parts: LinearLayer, config: Attrs, frame: Frame) -> Binding:
        values, built, y = frame.values, frame.built, frame.values[parts.y]
        count, outputs, depth = parts.sizes
        conv = direct.Conv(count, 1, 1, depth, 1, 1, outputs, 1, 1, 1, 1, 0, 0, 1, 1)
        prepared = list[Tensor | None]()

        def refresh() -> None:
            weight = values[parts.b]
            rows = weight if parts.product.attrs["transpose_b"] else weight.t()
            bias = None if parts.bias is None else values[parts.bias].contiguous()
            filters = rows.reshape(outputs, depth, 1, 1)
            prepared[:] = direct.panels(filters, built.width(outputs)), bias

        def launch(stream: int) -> None:
            weight, bias = prepared
            assert weight is not None
            bias_at = None if bias is None else bias.data_ptr()
            end = Epilogue(bias_at, None, None, parts.activation is not None, 0.0)
            built.run(conv, values[parts.a].data_ptr(), weight.data_ptr(), end, y.data_ptr())

        return Binding(launch, refresh)


FAMILY = DirectLinear()
