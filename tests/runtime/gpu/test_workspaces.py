"""Others may give cuBLAS's workspaces back: captured products go on writing there, and only there.

torch.compile does so for the whole process when it records graphs; these calls are its.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plantune import optimize

pytestmark = pytest.mark.gpu
WORKSPACE_BYTES = 32 << 20


class Head(nn.Module):
    """A product so long and narrow that cuBLAS splits it, and adds the parts up in a workspace."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1 << 16, 64)

    def forward(self, x):
        return torch.relu(self.layer(x.flatten(1)))


@pytest.fixture
def head():
    return Head().cuda().half().eval()


@pytest.fixture
def x():
    return torch.randn(8, 1 << 10, 8, 8, device="cuda", dtype=torch.float16)


def give_back():
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def tensors_in_its_place():
    """Enough that one of them gets that memory if anybody can."""
    return [torch.full((WORKSPACE_BYTES,), 7, dtype=torch.uint8, device="cuda") for _ in range(32)]


def assert_untouched(tensors):
    torch.cuda.synchronize()
    assert all(bool((tensor == 7).all()) for tensor in tensors)


@torch.no_grad()
def test_replays_write_to_no_tensor_of_others(head, x, off):
    model = optimize(head, x)
    model(x)
    give_back()
    others = tensors_in_its_place()
    for _ in range(3):
        x.normal_()
        assert off(model(x), head(x)) < 0.01
    assert_untouched(others)


@torch.no_grad()
def test_nor_where_another_graph_is_captured_afterwards(head, x, off):
    model = optimize(head, x)
    model(x)
    give_back()
    for _ in range(40):  # with another address in each, and then in turns
        off(model(x), head(x))
    others = tensors_in_its_place()
    give_back()
    others += tensors_in_its_place()
    for _ in range(40):
        x.normal_()
        assert off(model(x), head(x)) < 0.01
    assert_untouched(others)


def test_nor_in_training(head, x, off):
    model = optimize(head, x, mode="train")
    model(x).sum().backward()
    give_back()
    others = tensors_in_its_place()
    weight = model.reference.layer.weight
    for _ in range(3):
        x.normal_()
        gradients = []
        for module in (model, model.reference):
            weight.grad = None
            module(x).sum().backward()
            gradients.append(weight.grad)
        assert off(*gradients) < 0.01
    assert_untouched(others)
