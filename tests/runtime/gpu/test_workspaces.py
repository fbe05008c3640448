"""Others may give cuBLAS's workspaces back: captured products go on writing there, and only there.

torch.compile does so for the whole process when it records graphs; these calls are its.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from plantune import TrainStep, optimize
from plantune.devices.cuda import workspaces

from ...training.on_gpu import captured

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


def assert_writes_to_no_other(model, reference, x, off):
    give_back()
    others = tensors_in_its_place()
    for _ in range(3):
        x.normal_()
        assert off(model(x), reference(x)) < 0.01
    assert_untouched(others)


@torch.no_grad()
def test_replays_write_to_no_tensor_of_others(head, x, off):
    model = optimize(head, x)
    model(x)
    assert_writes_to_no_other(model, head, x, off)


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


class Tall(nn.Sequential):
    """The gradient of its weight is a product that cuBLAS splits, in a thread of autograd's."""

    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.ReLU())


def mean_square(made, wanted):
    return (made.float() - wanted.float()).square().mean()


def through_a_product(made, wanted):
    """A loss that multiplies, over all samples."""
    return (made.flatten(1).T @ wanted.flatten(1)).float().square().mean() / len(made)


STEPS = {
    "a model's forward pass": (Head, (8, 1 << 16), (8, 64), mean_square),
    "its backward pass": (Tall, (1 << 16, 64), (1 << 16, 64), mean_square),
    "the loss": (Tall, (1 << 16, 64), (1 << 16, 64), through_a_product),
}


@pytest.mark.filterwarnings("ignore::plantune.UnplannedCall")
@pytest.mark.parametrize("planned", [True, False], ids=["with a plan", "without"])
@pytest.mark.parametrize("case", STEPS)
def test_nor_where_a_step_holds_products_of_torchs_own(case, planned, off, monkeypatch):
    """Op by op, then the capture, then replays."""
    if not planned:
        monkeypatch.setenv("PLANTUNE_DISABLE", "1")
    make, shape, wanted_shape, loss = STEPS[case]
    ours = make().cuda().half()
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in (ours, theirs)]
    step = TrainStep(ours, loss, optimizers[0])
    x = torch.randn(shape, device="cuda", dtype=torch.float16)
    wanted = torch.randn(wanted_shape, device="cuda", dtype=torch.float16)
    for _ in range(3):
        step(x, wanted)
    assert captured(step)
    give_back()
    others = tensors_in_its_place()
    for _ in range(3):
        x.normal_()
        theirs.load_state_dict(ours.state_dict())
        found, expected = step(x, wanted), loss(theirs(x), wanted)
        optimizers[1].zero_grad()
        expected.backward()
        optimizers[1].step()
        assert off(found, expected) < 0.01
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert off(one, other) < 0.01
    assert_untouched(others)


class Batched(nn.Module):
    """Products that are ops under torch's own names."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 1 << 16, 64) / 256)

    def forward(self, x):
        return torch.baddbmm(self.weight[:, :8], x.flatten(1)[None], self.weight)


@torch.no_grad()
def test_nor_where_a_plan_runs_an_op_of_torchs(x, off):
    module = Batched().cuda().half().eval()
    model = optimize(module, x, fallback="error")
    model(x)
    assert_writes_to_no_other(model, module, x, off)


@torch.no_grad()
def test_a_network_without_products_keeps_no_workspace(x):
    module = nn.Sequential(nn.Conv2d(1 << 10, 8, 3), nn.ReLU()).cuda().half().eval()
    before = {*workspaces._kept}
    optimize(module, x, fallback="error")(x)
    new = {key: pool for key, pool in workspaces._kept.items() if key not in before}
    assert not any(segment["total_size"] for pool in new.values() for segment in pool.snapshot())
