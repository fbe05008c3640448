"""Convolutions of references, each as one product of matrices where torch makes one an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Up to so many pixels torch's way in float64 on a CPU takes longer: six times on 2x2 images of 512
# channels.
SMALL_PIXELS = 16


class OneProduct(TorchFunctionMode):
    """Inside, small images are convolved all at once."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.conv2d:
            return convolved(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def convolved(x: Tensor, w: Tensor, **geometry: Any) -> Tensor:
    """The same as `torch.conv2d`, but for the order of sums."""
    padding, dilation, stride = (geometry[key] for key in ("padding", "dilation", "stride"))
    height, width = (
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (w.shape[2 + i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    )
    slow = x.dtype == torch.float64 and x.device.type == "cpu" and geometry["groups"] == 1
    if not slow or height * width > SMALL_PIXELS or not x.numel():
        return torch.conv2d(x, w, **geometry)
    columns = torch.nn.functional.unfold(x, w.shape[2:], dilation, padding, stride)
    rows = columns.transpose(1, 2).reshape(len(x) * height * width, -1)
    y = (rows @ w.reshape(len(w), -1).t()).view(len(x), height, width, len(w))
    return y.permute(0, 3, 1, 2).contiguous()
