"""A plan draws the random numbers that eager would draw, and its gradients follow those."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune import optimize
from plantune.errors import WrongResult
from plantune.kernels import torch_ops
from plantune.plans.guess import framework_plan
from plantune.runtime.proof.recheck import recheck
from plantune.space.search_space import load_search_space

SPACE = load_search_space("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::plantune.runtime.load.TrainingMode")


class Noisy(nn.Module):
    """Drops channels, paths, weights and elements, and is noisy in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(3, 8, 3), nn.Dropout2d(0.3)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(288, 6), nn.RReLU(), nn.Dropout(0.4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.drop(self.conv(x)))
        y = y + y * y.new_empty((len(y), 1, 1, 1)).bernoulli_(0.5).div_(0.5)
        return F.log_softmax(self.head(y) + 0.1 * F.dropout(y.mean((1, 2, 3))[:, None], 0.2), 1)


class Attentive(nn.Module):
    """Eager draws in the order of memory: here all that draws is stored row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 32, 0.3)
        self.cell = nn.GRU(64, 5, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.layer(x.flatten(2)))[0]


NETWORKS = [Noisy, Attentive]


@pytest.fixture
def x(images: Tensor) -> Tensor:
    return images[..., :8, :8].contiguous()


def planned(module: nn.Module, x: Tensor, mode: str) -> nn.Module:
    graph = optimize(module, x, mode=mode).pool().graph
    plan = framework_plan(graph, SPACE, network="random")
    return optimize(module, x, mode=mode, plan=plan)


def seeded(module: nn.Module, x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return module(x)


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("training", [False, True])
def test_inference_after_a_seed_is_eagers(make, training, randomise, x):
    module = randomise(make()).train(training)
    tuned = planned(module, x, "infer")
    with torch.no_grad():
        for seed in (1, 2):
            torch.testing.assert_close(seeded(tuned, x, seed), seeded(module, x, seed))
            # The generators stand where they stood.
            torch.testing.assert_close(tuned(x), seeded(module, x, seed) * 0 + module(x))
        assert tuned.last_call().how == "planned"


@pytest.mark.parametrize("make", NETWORKS)
def test_training_after_a_seed_is_eagers(make, randomise, x):
    module = randomise(make()).train()
    tuned, reference = planned(module, x, "train"), copy.deepcopy(module)
    for seed in (1, 2):  # gradients add up
        ours, theirs = seeded(tuned, x, seed), seeded(reference, x, seed)
        torch.testing.assert_close(ours, theirs)
        dy = torch.randn(ours.shape)
        for _ in range(2):
            ours.backward(dy, retain_graph=True)
            theirs.backward(dy, retain_graph=True)
        for own, their in zip(tuned.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.grad, their.grad, rtol=1e-4, atol=1e-5)
    assert tuned.last_call().how == "planned"


def test_two_passes_before_their_gradients(x):
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5)).train()
    tuned = planned(module, torch.ones(2, 3, 8, 8, requires_grad=True), "train")
    inputs = [torch.ones(2, 3, 8, 8, requires_grad=True) for _ in range(2)]
    outputs = [tuned(x) for x in inputs]
    for y in reversed(outputs):
        y.sum().backward()
    assert not torch.equal(*outputs)
    for source, y in zip(inputs, outputs, strict=True):
        assert torch.equal(source.grad.flatten(1), y)


def test_an_output_that_is_changed_in_place_spoils_no_gradient(x):
    module = nn.Sequential(nn.Flatten(), nn.Softmax(1)).train()
    tuned = planned(module, x.clone().requires_grad_(), "train")
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, dy = tuned(ours), torch.randn(2, 192)
    with torch.no_grad():
        y.detach().zero_()
    y.backward(dy)
    module(theirs).backward(dy)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_right_plan_is_proved_and_moves_no_number(make, mode, x):
    module = make().train()
    pool = planned(module, x, mode).pool()
    before = torch.get_rng_state()
    recheck(pool.checked, module)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_wrong_plan_is_found_under_random_numbers(mode, x, monkeypatch):
    module = Noisy().train()
    pool = planned(module, x, mode).pool()
    monkeypatch.setitem(
        torch_ops.WRITERS,
        "relu",
        lambda node, y: lambda x: torch.clamp(x, min=0, out=y).mul_(1.001),
    )
    with pytest.raises(WrongResult, match="is off by"):
        recheck(pool.checked, module)
