"""Forward and backward of a step that is captured: plans see leaves of the pass's own."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from plantune import TrainStep, UnplannedCall, optimize
from plantune.plans.guess import COMPILED, hand_plan
from plantune.runtime.captured.own_leaves import leaves_of, own_leaf, standing_in
from plantune.runtime.captured.rehearsal import rehearsing
from plantune.training.loss_pass import LossPass


@pytest.fixture
def tuned(model, batches, monkeypatch):
    monkeypatch.setattr(
        "plantune.runtime.calls.choose.guessed_plan",
        lambda *args, **options: hand_plan(*args, **options, without=COMPILED),
    )
    return optimize(model, batches[0][0], mode="train", share=True)


def gradients_of(found):
    return lambda number, gradients: found.append(gradients)


def test_gradients_through_plans_and_past_them_add_up(tuned, model, batches):
    """A loss may use weights of the model's, and have some of its own."""
    head, unused = nn.Linear(5, 5), nn.Parameter(torch.ones(3))

    def loss(y, target):
        penalty = sum(p.square().sum() for p in model.parameters())
        return nn.functional.cross_entropy(head(y), target) + 0.1 * penalty

    parameters = [*model.parameters(), *head.parameters(), unused]
    (x, y), found = batches[0], []
    for captured in (False, True):
        # With batch statistics each pass moves the running ones alone.
        passes = LossPass(tuned, loss, parameters, captured=captured)
        with rehearsing():
            passes.run((x,), (y,), None, gradients_of(found))
    assert tuned.stats().planned == 2
    plain, own = found
    assert plain[-1] is own[-1] is None
    for one, other in zip(plain[:-1], own[:-1], strict=True):
        torch.testing.assert_close(one, other)
    exact = torch.autograd.grad(loss(model(x), y), parameters[:-1])
    for one, other in zip(own[:-1], exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_plan_asks_nothing_of_a_graph_that_somebody_keeps(tuned, model, batches, monkeypatch):
    """Its nodes are of another stream."""
    x, y = batches[0]
    kept = tuned(x).square().sum()
    nodes = {p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()}
    seen = set()

    def loss(outputs, target):
        seen.update(function for function, _ in outputs.grad_fn.next_functions if function)
        return nn.functional.cross_entropy(outputs, target)

    for captured in (False, True):
        seen.clear()
        passes = LossPass(tuned, loss, [*model.parameters()], captured=captured)
        with rehearsing():
            passes.run((x,), (y,), None, lambda number, gradients: None)
        assert len(seen) == len(nodes)
        assert seen.isdisjoint(nodes) == captured
    assert kept.requires_grad


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loss_may_ask_for_gradients_of_parameters(tuned, model, batches, parts):
    """As a penalty does: of what the step's own call of the model made, and of another one."""
    (x, y), found, calls = batches[0], [], []
    tuned = tuned if parts == 1 else optimize(model, x[: len(x) // parts], mode="train", share=True)
    weight = next(model.parameters())

    def loss(outputs, target):
        calls.append(1)
        (early,) = torch.autograd.grad(outputs.square().mean(), weight, retain_graph=True)
        return nn.functional.cross_entropy(outputs, target) + (early.detach() * weight).sum()

    passes = LossPass(tuned, loss, [*model.parameters()], parts, captured=True)
    for way in (nullcontext, rehearsing, rehearsing):  # op by op, and twice before a capture
        with way():
            passes.run((x,), (y,), None, gradients_of(found))
    assert len(calls) == 3 * parts + 1
    for at in range(parts, len(found)):
        for one, other in zip(found[at % parts], found[at], strict=True):
            torch.testing.assert_close(one, other)


def test_other_errors_of_a_loss_are_its_own(tuned, model, batches):
    def loss(outputs, target):
        raise RuntimeError("no such thing")

    passes = LossPass(tuned, loss, [*model.parameters()], captured=True)
    with rehearsing(), pytest.raises(RuntimeError, match="no such thing"):
        passes.run(batches[0][:1], batches[0][1:], None, gradients_of([]))


def test_hooks_of_parameters_are_called(tuned, model, batches):
    x, y = batches[0]
    weight, called, found = next(model.parameters()), [], []
    handle = weight.register_hook(lambda gradient: called.append(1) or 2 * gradient)
    passes = LossPass(tuned, nn.functional.cross_entropy, [weight], captured=True)
    with rehearsing():
        passes.run((x,), (y,), None, gradients_of(found))
        handle.remove()
        passes.run((x,), (y,), None, gradients_of(found))
    assert called == [1]
    torch.testing.assert_close(found[0][0], 2 * found[1][0])


def test_leaves_stand_in_for_one_thread_and_one_pass():
    weight = nn.Parameter(torch.ones(2))
    leaf = own_leaf(weight)
    assert leaf.data_ptr() == weight.data_ptr()
    with standing_in({id(weight): leaf}):
        assert next(iter(leaves_of([weight]))) is leaf
    assert next(iter(leaves_of([weight]))) is weight


@pytest.mark.parametrize("parts", [1, 2])
def test_sparse_gradients_of_an_embedding(parts, twin, assert_alike):
    """No plan runs it, which is said; the optimizer sees dense ones."""
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 5))
    other = twin(model)
    x, y = torch.randint(9, (6, 2)), torch.randint(5, (6,))
    theirs = torch.optim.SGD(other.parameters(), 0.1, 0.9)
    ours = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    step = TrainStep(model, nn.functional.cross_entropy, ours, micro_batches=parts)
    with pytest.warns(UnplannedCall, match="sparse gradients"):
        step(x, y)
    step(x, y)
    for _ in range(2):
        theirs.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        theirs.step()
    assert_alike(model, other)
