"""What a stranger's network may do beside layers: taken and right, or refused with a reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune import TunedModule, optimize
from plantune.errors import UnsupportedModule
from plantune.graph.nested import tensors_in
from plantune.plans.guess import framework_plan
from plantune.runtime.calls.framework import UnplannedCall
from plantune.space.search_space import load_search_space


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)


class Flags(Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        return y, y > 0, x.isnan()


class OwnDtypes(Linear):
    """Tensors that it makes are float32, whatever its weights are."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tensor_split(torch.arange(4) % 2, 1)[0]
        return torch.zeros(2, 3).index_add(0, rows, self.layer(x))


class Halves(nn.Module):
    """Most of its rounding is that of a layer in 16 bits, its result is not."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x.bfloat16()).float())


class Queue(Linear):
    """Scores against what earlier batches left."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        y, before = self.layer(x), self.rows.clone()
        self.rows.copy_(torch.cat([y.detach(), self.rows[:-4]]))
        return y @ before.T


class Teacher(nn.Module):
    """What it learns from is made without gradients, by layers that could have some."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.student(x)
        with torch.no_grad():
            target = self.teacher(x)
            mask = torch.zeros_like(target)
            mask[:, 1:] = (target[:, 1:] > 0).float()
            same = y.contiguous()
            y.to(y.dtype)
        mask[0] = y[0]
        return ((y - target) * mask).square(), target, same


class Codes(nn.Module):
    """A codebook of a VQ-VAE, whose codes follow the averages of what chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("codes", torch.randn(5, 3))
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("seen", torch.zeros(4, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.encode(x)
        nearest = (y[:, None] - self.codes).square().sum(-1).argmin(-1)
        chosen = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hits = nn.functional.one_hot(nearest, 5).float()
                self.counts.mul_(0.9).add_(hits.sum(0), alpha=0.1)
                self.codes.lerp_(hits.T @ y / self.counts[:, None], 0.1)
                self.seen[1:3] = y[:2]
                self.seen[0].add_(x[0])
                self.seen.view(2, 6)[1, 3:].mul_(0.5)
        straight = y + (chosen - y).detach()
        return self.decode(straight) + self.seen.mean(0), (y - chosen.detach()).square().mean()


class Averages(Linear):
    """A batch norm whose statistics are the averages of all batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


# Of the numbers that a constant may have most.
ORDER = [*range(0, 36, 2), *range(1, 36, 2)]


class Numbers(Linear):
    """Orders of channels and small tables, as they stand in the code of a forward."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x[:, [2, 1, 0]] - torch.tensor([0.4, 0.5, 0.6]))
        weights = torch.tensor([[1, 0, 2], [3, 1, 1]], dtype=x.dtype)
        z = y @ weights.T * torch.tensor(0.5)
        z[[0, 3, 1]] *= 2
        return (
            z,
            y[[0, 2, 1, 1]],
            y * y.new_tensor([1, 2, 3]),
            x.repeat(1, 12)[:, ORDER],
            torch.tensor([True, False]) & (z > 0),
        )


class Instances(Linear):
    """Instance norms whose statistics follow the images, as old style networks have them."""

    def __init__(self) -> None:
        super().__init__()
        moving: dict[str, Any] = {"track_running_stats": True, "momentum": 0.3}
        self.norm = nn.InstanceNorm1d(3, affine=True, **moving)
        self.plain = nn.InstanceNorm1d(3, **moving)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([x, self.layer(x), x * x], -1)
        return self.plain(self.norm(rows).tanh() + rows)


class Counts(Linear):
    """Its first tensors are no floats, or more exact ones, as those of an observation's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.randn(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.layer(x - self.mean.float()) * self.calls


class Levels(nn.Module):
    """Has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("levels", torch.tensor([3, 4, 5]))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.levels).round()


class Chooses(Linear):
    """A policy's distributions, which look at the values of their arguments in eager."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        actions, moves = torch.distributions.Categorical(logits=y), y.tanh()
        normal = torch.distributions.Normal(moves, y.exp())
        return actions.log_prob(y.argmax(-1)), actions.entropy(), normal.log_prob(x).sum(-1)


class Spectral(nn.Module):
    """Each forward in training writes better vectors into buffers, by `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
        self.register_buffer("x", torch.randn(3))  # the name that graphs give to an input
        self.register_buffer("x_", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        torch.mul(self.x, 0.5, out=self.x_)
        return self.layer(x - self.x) * self.x_


def planned(module: nn.Module, x: Tensor, mode: str) -> TunedModule:
    graph = optimize(module, x, mode=mode).pool().graph
    plan = framework_plan(graph, load_search_space("cpu"), network="unusual")
    return optimize(module, x, mode=mode, plan=plan)


@pytest.mark.parametrize(
    "kind",
    [
        Flags,
        OwnDtypes,
        Halves,
        Queue,
        Teacher,
        Codes,
        Averages,
        Numbers,
        Chooses,
        Spectral,
        Instances,
    ],
)
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_it_is_taken_and_right(kind: type[nn.Module], mode: str) -> None:
    """Its plan is proved first, then three batches come."""
    module = kind().train(mode == "train")
    tuned = planned(module, torch.randn(4, 3), mode)
    reference = copy.deepcopy(module)
    for _ in range(3):
        x = torch.randn(4, 3)
        ours, theirs = (_run(each, x, mode) for each in (tuned, reference))
        bounds = {"rtol": 2e-2, "atol": 2e-2} if kind is Halves else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(ours, theirs, **bounds)
        assert tuned.last_call().how == "planned"


def _run(module: nn.Module, x: Tensor, mode: str) -> list[Tensor]:
    """What it returns, its gradients and its buffers."""
    module.zero_grad()
    with torch.set_grad_enabled(mode == "train"):
        made = tensors_in(module(x))
    if mode == "train":
        sum(y.square().sum() for y in made if y.requires_grad).backward()
        made.append(torch.tensor([y.requires_grad for y in made]))
    gradients = [torch.tensor([]) if p.grad is None else p.grad for p in module.parameters()]
    return [*(y.detach() for y in made), *gradients, *(b.clone() for b in module.buffers())]


class Hooked(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return y


class Derived(Linear):
    def forward(self, x: Tensor) -> Any:
        return torch.func.vmap(torch.func.grad(lambda row: self.layer(row).tanh().sum()))(x)


class Directed(Linear):
    def forward(self, x: Tensor) -> Any:
        return torch.func.jvp(self.layer, (x,), (torch.ones_like(x),))


class Turned(torch.autograd.Function):
    """Turns gradients round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Adversary(Linear):
    def forward(self, x: Tensor) -> Any:
        return Turned.apply(self.layer(x))


class Energy(Linear):
    def forward(self, x: Tensor) -> Any:
        energy = self.layer(x).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


class _NoopSaveInputs(torch.autograd.Function):
    """As a checkpoint of older versions of torch has one: what it makes is never read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return torch.empty(0)


_NoopSaveInputs.__module__ = "torch.utils.checkpoint"


class Checkpointed(Linear):
    def forward(self, x: Tensor) -> Any:
        _NoopSaveInputs.apply(torch.empty(0, requires_grad=True), x)
        return self.layer(x)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Energy, "it takes gradients itself, by torch.autograd"),
        (Hooked, "register_hook"),
        (Derived, "torch.func"),
        (Directed, "torch.func"),
    ],
)
def test_what_no_plan_can_follow_is_refused(kind: type[nn.Module], said: str) -> None:
    with pytest.raises(UnsupportedModule, match=said):
        optimize(kind(), torch.randn(2, 3), mode="train")


def test_what_keeps_inputs_for_a_checkpoint_is_not_refused() -> None:
    module, x = Checkpointed(), torch.randn(4, 3)
    tuned, reference = planned(module, x, "train"), copy.deepcopy(module)
    torch.testing.assert_close(_run(tuned, x, "train"), _run(reference, x, "train"))
    assert tuned.last_call().how == "planned"


def test_a_backward_of_its_own_does_not_matter_in_inference() -> None:
    module, x = Adversary().eval(), torch.randn(4, 3)
    tuned = planned(module, x, "infer")
    torch.testing.assert_close(tuned(x), module(x))
    assert tuned.last_call().how == "planned"


@pytest.mark.parametrize("made_with_gradients", [True, False])
def test_no_grad_counts_in_a_module_that_is_not_training(made_with_gradients: bool) -> None:
    """Its gradients were those of a forward without it."""
    module, x = Teacher().eval(), torch.randn(4, 3)
    reference = copy.deepcopy(module)
    with torch.set_grad_enabled(made_with_gradients):
        tuned = planned(module, x, "train")
    for ours, theirs in zip(_run(tuned, x, "train"), _run(reference, x, "train"), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert tuned.last_call().how == "planned"


def test_dropout_of_no_samples_keeps_their_shape() -> None:
    """Torch returns its input then, whose memory the plan let go; a backward pass raised."""
    module, x = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), torch.randn(0, 3)
    tuned = planned(module, x, "train")
    made = tuned(x)
    assert made.shape == (0, 2)
    made.sum().backward()
    assert tuned[0].weight.grad.unique().tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_inputs_may_be_of_another_dtype_than_buffers(dtype: torch.dtype) -> None:
    module, x = Levels(), torch.randn(4, 3)
    module.levels = module.levels.to(dtype)
    tuned = planned(module.eval(), x, "infer")
    torch.testing.assert_close(tuned(x), module(x))
    assert tuned.last_call().how == "planned"


def test_distributions_look_at_values_again_after_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile, in whichever test of this process, turned it off for good.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    optimize(Chooses().eval(), torch.randn(4, 3))
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        torch.distributions.Normal(0.0, -torch.ones(2))


@pytest.mark.parametrize("kind", [Derived, Directed])
def test_a_refused_derivative_leaves_torch_as_it_was(kind: type[nn.Module]) -> None:
    """Through the backend, whose graph enters torch.func's levels by calls, the framework runs."""
    module, x = kind().eval(), torch.randn(2, 3)
    compiled = torch.compile(module, backend="plantune")
    with torch.no_grad(), pytest.warns(UnplannedCall):
        made = compiled(x)
    with torch.no_grad():
        torch.testing.assert_close(made, module(x))
    torch._dynamo.reset()


def test_complex_inputs_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModule, match="complex64 is not one of"):
        optimize(nn.Linear(3, 3), torch.randn(2, 3, dtype=torch.cfloat))
