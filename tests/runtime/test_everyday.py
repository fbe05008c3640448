"""Modules that people have every day and of which plantune has no op: taken, and right."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune import TunedModule, optimize
from plantune.backend import Piece, piece
from plantune.devices.machine import cpu_environment
from plantune.graph.nested import kind_of, mapped, tensors_in
from plantune.graph.tracing.arguments import Arguments
from plantune.plans.database.rows import COMPLETE, StoredPlan
from plantune.plans.database.validation import check_stored_plan
from plantune.plans.guess import framework_plan
from plantune.runtime.proof.recheck import recheck
from plantune.runtime.watched.copies import copied
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


class Similarity(nn.Module):
    """Two towers, as in retrieval."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 5), nn.Linear(4, 5)
        self.similarity = nn.CosineSimilarity()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"similarity": self.similarity(self.left(x), self.right(y))}


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor | None = None) -> Tensor:
        seen, _ = self.attention(x, memory, memory, padding, need_weights=False)
        return self.norm(x + seen)


@dataclass
class Reading:
    states: Tensor
    pooled: tuple[Tensor, Tensor | None]
    loss: Tensor | None = None


class Words(nn.Module):
    """Words and which of them count, as a language model is called."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, ids: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> Reading:
        states = self.head(self.table(ids)) * scale
        weights = torch.ones_like(states[..., :1]) if mask is None else mask[..., None].float()
        pooled = (states * weights).sum(1) / weights.sum(1)
        return Reading(states, (pooled, None))


@dataclass
class Example:
    """How a module is called."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(*args: Any, **kwargs: Any) -> Example:
        return Example(args, kwargs)

    def again(self) -> Example:
        """With other numbers, and rows of integers in another order."""
        return Example(mapped(_another, self.args), mapped(_another, self.kwargs))


def _another(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_floating_point():
        return torch.randn_like(leaf)
    return leaf.flip(0) if leaf.dim() > 1 else leaf  # offsets go up


IDS = torch.tensor([[1, 10, 3, 0], [4, 4, 0, 0]])
TWO_INPUTS = {
    "bilinear": (
        lambda: nn.Bilinear(4, 5, 3),
        lambda: Example.of(torch.randn(2, 4), torch.randn(2, 5)),
    ),
    "cosine similarity": (
        Similarity,
        lambda: Example.of(torch.randn(3, 6), torch.randn(3, 4)),
    ),
    "cross attention": (
        CrossAttention,
        lambda: Example.of(torch.randn(2, 3, 8), memory=torch.randn(2, 5, 6)),
    ),
    "cross attention with padding": (
        CrossAttention,
        lambda: Example.of(
            torch.randn(2, 3, 8), torch.randn(2, 5, 6), torch.arange(5) >= torch.tensor([[4], [2]])
        ),
    ),
    "embedding": (Words, lambda: Example.of(IDS)),
    "embedding and mask": (Words, lambda: Example.of(ids=IDS, mask=IDS > 0, scale=0.5)),
    "bag of words": (
        lambda: nn.EmbeddingBag(11, 6, mode="sum"),
        lambda: Example.of(IDS.flatten(), torch.tensor([0, 3, 5])),
    ),
}  # fmt: skip
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


def of_image(images: Tensor) -> Example:
    return Example.of(images[..., :8, :8].contiguous())


CASES = {
    **{name: (make, None) for name, make in EVERYDAY.items()},
    **TWO_INPUTS,
}
each = pytest.mark.parametrize(("make", "call"), CASES.values(), ids=CASES)


def planned(module: nn.Module, call: Example, mode: str) -> TunedModule:
    """`module` run from its default plan, as a program of steps."""
    module.train(mode == "train")
    graph = optimize(module, *call.args, mode=mode, **call.kwargs).pool().graph
    plan = framework_plan(graph, load_search_space("cpu"), network="everyday")
    return optimize(module, *call.args, mode=mode, plan=plan, **call.kwargs)


def gradients(module: nn.Module, call: Example) -> tuple[Any, list[Tensor]]:
    """What the module returns, and the gradients of all that has one, for fixed seeds."""
    sources = mapped(
        lambda leaf: (
            leaf.clone().requires_grad_(leaf.is_floating_point())
            if isinstance(leaf, Tensor)
            else leaf
        ),
        (call.args, call.kwargs),
    )
    result = module(*sources[0], **sources[1])
    outputs = tensors_in(result)
    draw = torch.Generator().manual_seed(1)
    seeds = [torch.randn(y.shape, generator=draw).to(y.device) for y in outputs]
    sum((y * seed).sum() for y, seed in zip(outputs, seeds, strict=True)).backward()
    found = [leaf.grad for leaf in (*module.parameters(), *tensors_in(sources))]
    return result, [g for g in found if g is not None]


def alike(ours: Any, theirs: Any, **bounds: float) -> None:
    assert kind_of(ours, type) == kind_of(theirs, type)
    torch.testing.assert_close(tensors_in(ours), tensors_in(theirs), **bounds)


@each
def test_inference(make, call, randomise, images):
    module, x = randomise(make()).eval(), call() if call else of_image(images)
    tuned = planned(module, x, "infer")
    for _ in range(2):
        with torch.no_grad():
            alike(tuned(*x.args, **x.kwargs), module(*x.args, **x.kwargs))
        assert tuned.last_call().how == "planned"
        x = x.again()
        randomise(module).eval()
        tuned.load_state_dict(module.state_dict())


@each
def test_training(make, call, randomise, images):
    module, x = randomise(make()), call() if call else of_image(images)
    tuned = planned(module, x, "train")
    reference = copy.deepcopy(module).train()
    alike(gradients(tuned, x), gradients(reference, x), rtol=1e-4, atol=1e-5)
    assert tuned.last_call().how == "planned"
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(dict(tuned.named_buffers())[name], buffer)


@each
def test_its_plan_is_proved(make, call, randomise, images):
    """As one from elsewhere is before its first use, on numbers that make sense."""
    module, x = randomise(make()), call() if call else of_image(images)
    tuned = planned(module, x, "infer")
    arguments = Arguments.of(module, x.args, x.kwargs)
    pool = tuned.pool()
    recheck(pool.checked, module, arguments=arguments)


@pytest.fixture
def pieces(monkeypatch) -> Iterator[WeakSet[Piece]]:
    """What Dynamo captures in this test; it leaves out recurrent layers if it is not told."""
    monkeypatch.setattr(piece, "_alive", found := WeakSet())
    with torch._dynamo.config.patch(allow_rnn=True):
        yield found
    torch._dynamo.reset()


@each
def test_through_torch_compile(make, call, randomise, images, pieces):
    """In inference and in training."""
    module, x = randomise(make()).eval(), call() if call else of_image(images)
    compiled = torch.compile(module, backend="plantune")
    with torch.no_grad():
        alike(compiled(*x.args, **x.kwargs), module(*x.args, **x.kwargs))
    reference = copy.deepcopy(module).train()
    compiled.train()
    alike(gradients(compiled, x), gradients(reference, x), rtol=1e-4, atol=1e-5)
    alike(list(module.buffers()), list(reference.buffers()))
    assert len(pieces) >= 2
    assert [each.why_not for each in pieces if each.stats()[1]] == []


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["infer", "train"])
@each
def test_as_a_graph_on_a_gpu(make, call, mode, randomise, images):
    def on_gpu(leaf: Any) -> Any:
        return leaf.cuda() if isinstance(leaf, Tensor) else leaf

    module = randomise(make()).cuda().train(mode == "train")
    x = call() if call else of_image(images)
    x = Example(mapped(on_gpu, x.args), mapped(on_gpu, x.kwargs))
    tuned = optimize(module, *x.args, mode=mode, **x.kwargs)
    for _ in range(3):
        x = x.again()
        reference = copied(module)
        reference.load_state_dict(tuned.state_dict())
        tuned.zero_grad()
        if mode == "train":
            ours, theirs = gradients(tuned, x), gradients(reference, x)
        else:
            with torch.no_grad():
                ours, theirs = (m(*x.args, **x.kwargs) for m in (tuned, reference))
        assert kind_of(ours, type) == kind_of(theirs, type)
        for own, their in zip(tensors_in(ours), tensors_in(theirs), strict=True):
            # TF32 has 10 bits, and cuDNN's algorithms round it in different places.
            assert (own - their).norm() <= 3e-3 * their.norm() + 1e-4
        assert tuned.last_call().how == "captured"
        randomise(tuned)


def test_its_plan_can_be_shared(images):
    """Whoever imports a plan checks the names of its nodes."""
    tuned = planned(EVERYDAY["cat, GELU, GroupNorm"](), of_image(images), "train")
    stored = StoredPlan(1, tuned.pool().plan, cpu_environment(), COMPLETE, "2026-11-22T00:00:00Z")
    check_stored_plan(stored)
