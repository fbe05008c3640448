"""Values in another layout: by a kernel of ours on a GPU, by torch where that cannot."""

from __future__ import annotations

import torch

from plantune.devices.cuda import recording
from plantune.kernels.cuda.image_layout import LayoutChange, layout_change
from plantune.kernels.family import Values
from plantune.runtime.program.schedule import Conversion
from plantune.space.arch import Arch


class Converter:
    """Writes a value into its memory for another layout, each time it is called."""

    def __init__(
        self, conversion: Conversion, values: Values, arch: Arch, device: torch.device
    ) -> None:
        self._conversion, self._values, self._device = conversion, values, device
        result = values[conversion.result]
        self._change: LayoutChange | None = None
        if device.type == "cuda":
            shape = tuple(result.shape)
            self._change = layout_change(shape, result.dtype, conversion.layout, arch)

    @property
    def label(self) -> str:
        """Under which its launch is recorded, as that of a step is under the step's name."""
        return self._conversion.result

    @property
    def source(self) -> str:
        return self._conversion.source

    @property
    def is_kernel(self) -> bool:
        """Whether a kernel of ours does it, which can be told of another place of the source."""
        return self._change is not None

    def __call__(self) -> None:
        result, source = self._values[self._conversion.result], self._values[self.source]
        recording.label(self.label)
        if self._change is not None and self._change.turns(source, result):
            stream = torch.cuda.current_stream(self._device).cuda_stream
            self._change.launch(stream, result, source)
        else:
            result.copy_(source)
