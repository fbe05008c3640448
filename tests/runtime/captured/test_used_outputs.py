"""Backward passes from some of the outputs, and from many gradients at once."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn


class TwoHeads(nn.Module):
    """What an actor and critic has: one body, an output for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.policy = nn.Linear(8, 4)
        self.value = nn.Linear(8, 1)

    def forward(self, x):
        y = torch.relu(self.body(x))
        return self.policy(y), self.value(y)


@pytest.fixture
def x():
    return torch.randn(5, 6)


@pytest.fixture
def pair(x, tuned):
    module = TwoHeads()
    return tuned(module, x, "train"), deepcopy(module).train()


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def assert_alike(pair, close):
    ours, theirs = map(gradients, pair)
    for name, expected in theirs.items():
        if expected is None:
            assert ours[name] is None, name
        else:
            close(ours[name], expected)


def test_hooks_of_a_parameter_that_nothing_reads_are_not_called(x, tuned, close):
    """They would get None, which few can take."""
    module = TwoHeads()
    module.unused = nn.Linear(8, 2)
    pair = (tuned(module, x, "train"), deepcopy(module).train())
    for module in pair:
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        policy, value = module(x)
        (policy.square().sum() + value.sum()).backward()
    assert pair[0].last_call().how == "planned"
    assert_alike(pair, close)


class TestOutputsThatALossLeavesOut:
    @pytest.mark.parametrize("used", [0, 1])
    def test_what_they_alone_depend_on_has_no_gradient(self, used, pair, x, close):
        for module in pair:
            module(x)[used].square().sum().backward()
        assert sum(grad is None for grad in gradients(pair[0]).values()) == 2
        assert_alike(pair, close)

    def test_so_an_optimizer_leaves_it_alone(self, pair, x, close):
        """With zeros its weights would decay."""
        for module in pair:
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
            for used in (0, 1, 0, 0):
                optimizer.zero_grad()
                module(x)[used].square().sum().backward()
                optimizer.step()
        assert pair[0].last_call().how == "planned"
        for ours, theirs in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            close(ours, theirs)

    def test_one_after_the_other(self, pair, x, close):
        for module in pair:
            policy, value = module(x)
            policy.square().sum().backward(retain_graph=True)
            value.sum().backward()
        assert_alike(pair, close)

    def test_an_input_that_only_they_depend_on(self, tuned, x, close):
        class Apart(nn.Module):
            def forward(self, x):
                return x[:2] * 2, x.exp()

        module = Apart()
        model = tuned(module, x, "train")
        found = []
        for either in (model, model, model, module):
            z = x.clone().requires_grad_()
            found.append(torch.autograd.grad(either(z)[0].sum(), z)[0])
        close(found[-2], found[-1])


class TestManyAtOnce:
    def test_batched_gradients(self, pair, x, close):
        seeds = torch.randn(3, 5, 1)
        ours, theirs = (
            torch.autograd.grad(
                m(x)[1], list(m.parameters()), seeds, is_grads_batched=True, allow_unused=True
            )
            for m in pair
        )
        assert pair[0].last_call().how == "planned"
        assert [grad is None for grad in ours] == [grad is None for grad in theirs]
        for one, other in zip(ours, theirs, strict=True):
            if other is not None:
                close(one, other)

    @pytest.mark.parametrize("at", [0, 1])
    def test_in_a_vmap_with_one_that_is_the_same_for_all(self, at, pair, x, close):
        seeds, same = torch.randn(3, 5, 4).movedim(0, at), torch.randn(5, 1)

        def of(module):
            outputs, parameters = module(x), list(module.parameters())
            return torch.vmap(
                lambda seed: torch.autograd.grad(
                    outputs, parameters, (seed, same), retain_graph=True
                ),
                in_dims=at,
            )(seeds)

        for ours, theirs in zip(*map(of, pair), strict=True):
            close(ours, theirs)

    def test_the_pass_is_given_back_after_the_last(self, pair, x):
        model = pair[0]
        for _ in range(3):
            y = model(x)[1]
            torch.autograd.grad(y, model.body.weight, torch.randn(3, 5, 1), is_grads_batched=True)
        assert model.stats().instances == 1
