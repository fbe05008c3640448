"""A training step is what eager's statements are, one after the other."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from plantune import LossScale, TrainStep, optimize

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=1e-2, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, 0.1, 0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, betas=(0.8, 0.95), weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_follows_eager(model, twin, eager, batches, assert_alike, name):
    other = twin(model)
    ours, theirs = (OPTIMIZERS[name](m.parameters()) for m in (model, other))
    step = TrainStep(model, cross_entropy, ours)
    for x, y in batches:
        torch.testing.assert_close(step(x, y), eager(other, theirs, x, y))
    assert_alike(model, other)
    for mine, wanted in zip(
        ours.state_dict()["state"].values(), theirs.state_dict()["state"].values(), strict=True
    ):
        torch.testing.assert_close(mine, wanted)


def test_schedulers_that_move_every_number_are_followed(model, twin, eager, batches, assert_alike):
    """OneCycleLR moves betas, too."""
    other = twin(model)
    pairs = []
    for module in (model, other):
        body = [*module[0].parameters(), *module[1].parameters()]
        head = module[-1].parameters()
        groups = [{"params": body}, {"params": head, "weight_decay": 0.3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.01, 0.1], total_steps=25)
        pairs.append((optimizer, scheduler))
    (ours, mine), (theirs, their) = pairs
    step = TrainStep(model, cross_entropy, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in batches:
            step(x, y)
            mine.step()
            eager(other, theirs, x, y)
            their.step()
    assert_alike(model, other)


def test_a_tuned_module_keeps_its_plan(model, twin, eager, batches, assert_alike):
    x, y = batches[0]
    tuned, other = optimize(model, x, mode="train"), twin(model)
    step = TrainStep(tuned, cross_entropy, torch.optim.SGD(tuned.parameters(), 0.1))
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    for x, y in batches[:5]:
        step(x, y)
        eager(other, theirs, x, y)
    assert_alike(tuned.reference, other)


def test_evaluation_between_steps_sees_the_new_weights(model, batches):
    step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    seen = []
    for x, y in batches[:3]:
        step(x, y)
        model.eval()
        seen.append(model(x).detach())
        assert torch.equal(seen[-1], model(x))
        model.train()
    assert not torch.equal(seen[0], seen[1])


def test_every_size_of_a_batch_counts(model, twin, eager, batches, assert_alike):
    """The last batch of an epoch is smaller."""
    other = twin(model)
    step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    for (x, y), size in zip(batches, (8, 3, 8, 5, 1, 2, 7, 3), strict=False):
        step(x[:size], y[:size])
        eager(other, theirs, x[:size], y[:size])
    assert_alike(model, other)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, a, b):
        return self.layer(a) + b, self.layer(b @ self.layer.weight)


class TestLosses:
    def test_several_inputs_and_targets_of_a_loss_with_its_own_tensors(self, twin, assert_alike):
        """As PPO's: it gives back numbers beside the loss. What it does not read stays."""
        model = TwoInputs()
        other = twin(model)
        ours = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1)
        theirs = torch.optim.AdamW(other.parameters(), 0.1, weight_decay=0.1)

        def loss(outputs, target, advantage, *, clip=0.2):
            first, second = outputs
            ratio = (first - target).exp().clamp(1 - clip, 1 + clip)
            value = -(ratio * advantage).mean() + second.square().mean()
            return value, {"ratio": ratio.mean(), "clip": clip}

        step = TrainStep(model, loss, ours)
        for _ in range(5):
            a, b, target, advantage = (torch.randn(6, n) for n in (4, 3, 3, 3))
            value, rest = step((a, b), target, advantage)
            theirs.zero_grad()
            wanted, numbers = loss(other(a, b), target, advantage)
            wanted.backward()
            theirs.step()
            torch.testing.assert_close(value, wanted.detach())
            torch.testing.assert_close(rest["ratio"], numbers["ratio"].detach())
            assert rest["clip"] == 0.2
            assert not value.requires_grad
            assert not rest["ratio"].requires_grad
        assert_alike(model, other)
        assert not ours.state[model.unused.weight]

    def test_a_loss_may_have_parameters(self, model, batches):
        class Tempered(nn.Module):
            def __init__(self):
                super().__init__()
                self.temperature = nn.Parameter(torch.ones(()))

            def forward(self, y, target):
                return cross_entropy(y / self.temperature, target)

        loss = Tempered()
        parameters = [*model.parameters(), *loss.parameters()]
        step = TrainStep(model, loss, torch.optim.SGD(parameters, 0.1))
        step(*batches[0])
        assert loss.temperature != 1

    @pytest.mark.parametrize(
        ("loss", "said"),
        [
            (lambda y, t: (y - 1).square(), "got a tensor of shape"),
            (lambda y, t: 3.0, "got 3.0"),
            (lambda y, t: y.detach().sum(), "depends on the parameters"),
        ],
    )
    def test_what_is_no_loss_is_refused(self, model, batches, loss, said):
        step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(ValueError, match=said):
            step(*batches[0])


class TestMemory:
    def test_values_and_gradients_of_the_callers_stay(self, model, batches):
        step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
        x, y = batches[0]
        cross_entropy(model(x), y).backward()
        held = [parameter.grad for parameter in model.parameters()]
        kept = [grad.clone() for grad in held]
        values = [step(*batch) for batch in batches[:3]]
        copies = [value.clone() for value in values]
        step(*batches[3])
        assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
        assert all(map(torch.equal, held, kept))
        assert all(map(torch.equal, values, copies))
        assert not torch.equal(values[0], values[1])

    def test_weights_stay_in_their_memory_and_strides(self, model, batches):
        model.to(memory_format=torch.channels_last)
        places = [(p.data_ptr(), p.stride()) for p in model.parameters()]
        step = TrainStep(model, cross_entropy, torch.optim.AdamW(model.parameters(), 0.1))
        before = [p.detach().clone() for p in model.parameters()]
        step(*batches[0])
        assert places == [(p.data_ptr(), p.stride()) for p in model.parameters()]
        assert not any(map(torch.equal, before, model.parameters()))


class TestParameters:
    def test_a_group_that_is_added_is_trained(self, model, batches):
        optimizer = torch.optim.SGD(model[-1].parameters(), 0.1)
        step = TrainStep(model, cross_entropy, optimizer)
        first = model[0].weight
        before = first.detach().clone()
        step(*batches[0])
        assert torch.equal(first, before)
        optimizer.add_param_group({"params": [first]})
        step(*batches[1])
        assert not torch.equal(first, before)

    def test_frozen_ones_stay_until_they_thaw(self, model, batches):
        step = TrainStep(model, cross_entropy, torch.optim.AdamW(model.parameters(), 0.1))
        first = model[0].weight
        first.requires_grad_(False)
        before = first.detach().clone()
        step(*batches[0])
        assert torch.equal(first, before)
        first.requires_grad_(True)
        step(*batches[1])
        assert not torch.equal(first, before)

    def test_without_any_it_is_refused(self, model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.requires_grad_(False)
        with pytest.raises(ValueError, match="none of the optimizer's parameters requires a"):
            TrainStep(model, cross_entropy, optimizer)


class TestClipping:
    def test_it_is_that_of_torch(self, model, twin, batches, assert_alike):
        other = twin(model)
        theirs = torch.optim.SGD(other.parameters(), 0.5)
        ours = torch.optim.SGD(model.parameters(), 0.5)
        step = TrainStep(model, cross_entropy, ours, max_norm=0.3)
        for x, y in batches:
            step(x, y)
            theirs.zero_grad()
            cross_entropy(other(x), y).backward()
            norm = nn.utils.clip_grad_norm_(other.parameters(), 0.3)
            theirs.step()
            torch.testing.assert_close(step.gradient_norm, norm)
        assert_alike(model, other)


class TestMicroBatches:
    def test_they_are_the_mean_of_their_parts(self, twin, batches, assert_alike):
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
        other = twin(model)
        ours, theirs = (torch.optim.Adam(m.parameters(), 0.01) for m in (model, other))

        def loss(y, target):
            return cross_entropy(y, target), {"rows": y, "largest": y.max()}

        step = TrainStep(model, loss, ours, micro_batches=4)
        for x, y in batches[:5]:
            value, rest = step(x, y)
            wanted = other(x)
            theirs.zero_grad()
            total = cross_entropy(wanted, y)
            total.backward()
            theirs.step()
            torch.testing.assert_close(value, total.detach())
            torch.testing.assert_close(rest["rows"], wanted.detach())
        assert_alike(model, other)

    def test_unequal_parts_are_refused(self, model, batches):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = TrainStep(model, cross_entropy, optimizer, micro_batches=3)
        with pytest.raises(ValueError, match="a batch of 8 has no 3 equal micro-batches"):
            step(*batches[0])


def overflows(y, target, factor):
    """Gradients are infinite where `factor` is."""
    return cross_entropy(y, target) * factor


class TestScale:
    def test_steps_and_scales_are_those_of_torchs_scaler(self, model, twin, batches, assert_alike):
        other = twin(model)
        ours, theirs = (torch.optim.AdamW(m.parameters(), 0.01) for m in (model, other))
        scale = LossScale(8.0, growth_interval=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        step = TrainStep(model, overflows, ours, scale=scale, max_norm=0.5)
        skipped = []
        for index, (x, y) in enumerate(batches):
            factor = torch.tensor(float("inf") if index in (2, 9, 10) else 1.0)
            step(x, y, factor)
            skipped.append(bool(step.found_inf))
            theirs.zero_grad()
            scaler.scale(overflows(other(x), y, factor)).backward()
            scaler.unscale_(theirs)
            nn.utils.clip_grad_norm_(other.parameters(), 0.5)
            scaler.step(theirs)
            scaler.update()
            assert scale.state_dict() == scaler.state_dict()
        assert [index for index, skip in enumerate(skipped) if skip] == [2, 9, 10]
        assert_alike(model, other)
        taken = {int(state["step"]) for state in ours.state.values()}
        assert taken == {17}

    @pytest.mark.parametrize(
        "wrong", [{"init_scale": 0.0}, {"growth_factor": 1.0}, {"growth_interval": 0}]
    )
    def test_numbers_without_sense_are_refused(self, wrong):
        with pytest.raises(ValueError, match="got"):
            LossScale(**wrong)


def eager_step_under_autocast(loss, optimizer):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss()
    value.backward()
    optimizer.step()
    return value.detach()


def test_autocast_is_that_of_torch(model, twin, batches):
    other = twin(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, other))
    step = TrainStep(model, cross_entropy, ours, autocast=torch.bfloat16)
    for x, y in batches[:4]:
        value = step(x, y)
        wanted = eager_step_under_autocast(lambda x=x, y=y: cross_entropy(other(x), y), theirs)
        torch.testing.assert_close(value, wanted, rtol=2e-2, atol=2e-2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-2)


def test_one_region_of_the_callers_autocast_round_all_steps(model, twin, batches):
    """Eager has one for each step: what a region keeps of weights must not outlive one."""

    class Head(nn.Linear):
        def forward(self, y, target):
            return cross_entropy(super().forward(y), target)

    head, seen = Head(5, 5), []
    other, its_head = twin(model), twin(head)
    ours, theirs = (
        torch.optim.SGD([*m.parameters(), *h.parameters()], 0.5)
        for m, h in ((model, head), (other, its_head))
    )
    ours.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    step = TrainStep(model, head, ours)
    with torch.autocast("cpu", torch.bfloat16):
        values = [step(x, y) for x, y in batches[:4]]
    for value, (x, y) in zip(values, batches, strict=False):
        wanted = eager_step_under_autocast(lambda x=x, y=y: its_head(other(x), y), theirs)
        torch.testing.assert_close(value, wanted, rtol=1e-2, atol=1e-2)
    assert seen == [False] * 4


def test_a_saved_state_resumes_exactly(twin, batches):
    """Dropout draws the same numbers, the scale grows at the same step."""

    def made(module):
        optimizer = torch.optim.AdamW(module.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        scale = LossScale(4.0, growth_interval=2)
        return TrainStep(module, cross_entropy, optimizer, scale=scale, max_norm=1.0), scheduler

    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.5), nn.Linear(16, 5))
    other = twin(model)
    step, scheduler = made(model)
    for x, y in batches[:5]:
        step(x, y)
        scheduler.step()
    file = io.BytesIO()
    torch.save([model.state_dict(), step.state_dict(), scheduler.state_dict()], file)
    wanted = [step(x, y) for x, y in batches[5:9]]
    file.seek(0)
    weights, state, of_scheduler = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    again, scheduler = made(other)
    again.load_state_dict(state)
    scheduler.load_state_dict(of_scheduler)
    assert all(map(torch.equal, wanted, [again(x, y) for x, y in batches[5:9]]))
    assert again.scale.state_dict() == step.scale.state_dict()


def test_a_state_with_a_scale_needs_one(model):
    step = TrainStep(model, cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    state = {**step.state_dict(), "scale": LossScale().state_dict()}
    with pytest.raises(ValueError, match="with the same `scale`"):
        step.load_state_dict(state)


@pytest.mark.parametrize("wrong", [{"micro_batches": 0}, {"max_norm": 0.0}])
def test_settings_without_sense_are_refused(model, wrong):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="got 0"):
        TrainStep(model, cross_entropy, optimizer, **wrong)


def test_the_phases_of_a_step_are_told_in_their_order(model, twin, batches, assert_alike):
    other = twin(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, other))
    step, told = TrainStep(model, cross_entropy, ours, micro_batches=2), []
    x, y = batches[0]
    value = step.marked(told.append, x, y)
    assert told == ["forward", "backward", "forward", "backward", "optimizer"]
    pairs = zip(x.split(4), y.split(4), strict=True)
    halves = [cross_entropy(other(part), target) for part, target in pairs]
    loss = torch.stack(halves).mean()
    loss.backward()
    theirs.step()
    torch.testing.assert_close(value, loss.detach())
    assert_alike(model, other)
