"""Tensors side by side in one piece of memory."""

from __future__ import annotations

import torch

from plantune.runtime.program.flat import FlatLayout, is_dense


def test_views_have_the_strides_of_their_tensors_and_share_no_place():
    tensors = {
        "filter": torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last),
        "scalar": torch.randn(()),
        "half": torch.randn(5).half(),
        "turned": torch.randn(6, 5).t(),
        "gaps": torch.randn(4, 6)[:, ::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "nothing": torch.randn(0, 2),
    }
    layout = FlatLayout.of(tensors)
    buffers = layout.buffers(torch.device("cpu"))
    views = layout.views(buffers)
    for index, view in enumerate(views.values(), 1):
        view.fill_(index)
    for index, (name, tensor) in enumerate(tensors.items(), 1):
        view = views[name]
        assert (view.shape, view.dtype) == (tensor.shape, tensor.dtype)
        assert bool((view == index).all()), "no other one writes there"
        assert not view.numel() or view.data_ptr() % 16 == 0
        assert view.stride() == (tensor if is_dense(tensor) else tensor.contiguous()).stride()
    assert sum(buffer.numel() for buffer in buffers.values()) == sum(layout.sizes.values())


def test_what_is_dense():
    x = torch.randn(2, 3, 4, 5)
    assert is_dense(x.permute(3, 1, 0, 2))
    assert is_dense(torch.randn(1, 3)[:, :])
    assert is_dense(torch.randn(8, 3)[2:4])
    assert not is_dense(x[..., ::2])
    assert not is_dense(torch.randn(3).expand(3, 3))
