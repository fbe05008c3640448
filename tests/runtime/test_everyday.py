"""Modules that people have every day and of which plantune has no op: taken, and right."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune import TunedModule, optimize
from plantune.default_plans import default_plan
from plantune.machine import cpu_environment
from plantune.plan_db.rows import COMPLETE, StoredPlan
from plantune.plan_db.validation import check_stored_plan
from plantune.runtime.copies import copied
from plantune.space.search_space import load_search_space


class Block(nn.Module):
    """Two ways through an image, joined, as Inception and DenseNet join them."""

    def __init__(self, activation: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 3, padding="same"), nn.Conv2d(3, 8, 1)
        self.activation, self.norm = activation, norm

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.left(x), self.right(x)], 1)
        return self.activation(self.norm(joined))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).transpose(1, 2).reshape(2, 16, 12)
        q, k, v = self.qkv(self.norm(rows)).chunk(3, -1)
        return rows + self.out(F.scaled_dot_product_attention(q, k, v))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = cell(64, 7, batch_first=True), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        states, last = self.cell(x.flatten(2))
        return (self.head(F.softmax(states, -1)), *(last if isinstance(last, tuple) else (last,)))


class Codes(nn.Module):
    """What a policy does with discrete observations."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = nn.Embedding(5, 6), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x[:, 0] > 0).long() + 2) * self.bias


EVERYDAY = {
    "cat, GELU, GroupNorm": lambda: Block(nn.GELU(), nn.GroupNorm(4, 16)),
    "cat, SiLU, BatchNorm": lambda: Block(nn.SiLU(inplace=True), nn.BatchNorm2d(16)),
    "ReLU6, InstanceNorm": lambda: Block(nn.ReLU6(), nn.InstanceNorm2d(16, affine=True)),
    "Hardswish, norm without weights": lambda: Block(
        nn.Hardswish(), nn.BatchNorm2d(16, affine=False)
    ),
    "LayerNorm, attention": Attention,
    "GRU, softmax": lambda: Recurrent(nn.GRU),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "embedding": Codes,
    "Conv1d": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 4, 3, stride=2), nn.Tanh()),
    "transposed convolution": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2),
    "upsampling": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=2)),
    "adaptive pooling": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(7)),
    "ceil_mode": lambda: nn.MaxPool2d(3, 2, ceil_mode=True),
    "depthwise": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.Dropout(0.0)),
}  # fmt: skip


def planned(module: nn.Module, x: Tensor, mode: str) -> TunedModule:
    """`module` run from its default plan, as a program of steps."""
    module.train(mode == "train")
    graph = optimize(module, x, mode=mode).pool().graph
    plan = default_plan(graph, load_search_space("cpu"), network="everyday")
    return optimize(module, x, mode=mode, plan=plan)


def leaves(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    source = x.clone().requires_grad_()
    outputs = leaves(module(source))
    draw = torch.Generator().manual_seed(1)
    seeds = [torch.randn(y.shape, generator=draw).to(y.device) for y in outputs]
    sum((y * seed).sum() for y, seed in zip(outputs, seeds, strict=True)).backward()
    found = [parameter.grad for parameter in module.parameters()]
    return [*outputs, *(g for g in (*found, source.grad) if g is not None)]


@pytest.mark.parametrize("make", EVERYDAY.values(), ids=EVERYDAY)
def test_inference(make, randomise, images):
    module, x = randomise(make()).eval(), images[..., :8, :8].contiguous()
    tuned = planned(module, x, "infer")
    for _ in range(2):
        with torch.no_grad():
            expected = module(x)
            torch.testing.assert_close(tuned(x), expected)
        assert tuned.last_call().how == "planned"
        x = torch.randn_like(x)
        randomise(module).eval()
        tuned.load_state_dict(module.state_dict())


@pytest.mark.parametrize("make", EVERYDAY.values(), ids=EVERYDAY)
def test_training(make, randomise, images):
    module, x = randomise(make()), images[..., :8, :8].contiguous()
    tuned = planned(module, x, "train")
    reference = copy.deepcopy(module).train()
    for ours, theirs in zip(gradients(tuned, x), gradients(reference, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(dict(tuned.named_buffers())[name], buffer)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("make", EVERYDAY.values(), ids=EVERYDAY)
def test_as_a_graph_on_a_gpu(make, mode, randomise, images):
    module = randomise(make()).cuda().train(mode == "train")
    tuned = optimize(module, images[..., :8, :8].cuda(), mode=mode)
    for _ in range(3):
        x = torch.randn(2, 3, 8, 8, device="cuda")
        reference = copied(module)
        reference.load_state_dict(tuned.state_dict())
        tuned.zero_grad()
        if mode == "train":
            ours, theirs = gradients(tuned, x), gradients(reference, x)
        else:
            with torch.no_grad():
                ours, theirs = leaves(tuned(x)), leaves(reference(x))
        for own, their in zip(ours, theirs, strict=True):
            # TF32 has 10 bits, and cuDNN's algorithms round it in different places.
            assert (own - their).norm() <= 3e-3 * their.norm() + 1e-4
        assert tuned.last_call().how == "captured"
        randomise(tuned)


def test_its_plan_can_be_shared(images):
    """Whoever imports a plan checks the names of its nodes."""
    tuned = planned(EVERYDAY["cat, GELU, GroupNorm"](), images[..., :8, :8].contiguous(), "train")
    stored = StoredPlan(1, tuned.pool().plan, cpu_environment(), COMPLETE, "2026-11-22T00:00:00Z")
    check_stored_plan(stored)
