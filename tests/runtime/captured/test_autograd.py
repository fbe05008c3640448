"""Backward passes through the tuned module."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from plantune import optimize
from plantune.errors import WeightsChanged


@pytest.fixture
def model(small, images, tuned):
    return tuned(small, images, "train")


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


@pytest.fixture
def same_gradients(close):
    def check(model, reference):
        expected = gradients(reference)
        for name, value in gradients(model).items():
            if expected[name] is None:
                assert value is None, name
            else:
                close(value, expected[name])

    return check


class TestInput:
    """Between forward and backward."""

    def test_freed_and_its_memory_used_again(self, model, small, images, same_gradients):
        small(images).square().sum().backward()
        x = images.clone()
        y = model(x)
        del x
        gc.collect()
        garbage = [torch.full_like(images, float("nan")) for _ in range(50)]
        y.square().sum().backward()
        same_gradients(model, small)
        assert len(garbage) == 50

    @pytest.mark.parametrize("wrt_input", [False, True])
    def test_overwritten_raises_as_eager_does(self, wrt_input, named, images, tuned, close):
        module = named(conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU())
        model = tuned(module, images, "train")
        for either in (module, model):
            x = images.clone().requires_grad_(wrt_input) * 1
            y = either(x)
            with torch.no_grad():
                x.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        close(model(images), module(images))

    def test_overwritten_is_harmless_where_no_gradient_reads_it(
        self, model, small, images, same_gradients
    ):
        """Space to depth comes first here, and its gradient needs no input."""
        for module in (model, small):
            x = images.clone()
            y = module(x)
            x.zero_()
            y.square().sum().backward()
        same_gradients(model, small)

    def test_a_copied_one_may_be_overwritten(self, model, small, images, same_gradients):
        small(images).sum().backward()
        x = images.transpose(2, 3).contiguous().transpose(2, 3)
        y = model(x)
        x.zero_()
        y.sum().backward()
        same_gradients(model, small)


class TestOrder:
    """Passes may overlap in any way that autograd allows."""

    def test_backward_twice_with_retain_graph(self, model, small, images, same_gradients):
        for module in (model, small):
            y = module(images).square().sum()
            y.backward(retain_graph=True)
            y.backward(retain_graph=True)
            y.backward()
        same_gradients(model, small)

    def test_backward_twice_without_it_raises_as_eager_does(self, model, small, images):
        for module in (model, small):
            y = module(images).sum()
            y.backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                y.backward()

    def test_another_forward_does_not_disturb_a_retained_graph(
        self, model, small, images, same_gradients
    ):
        for module in (model, small):
            y = module(images)
            y.sum().backward(retain_graph=True)
            module(images * 5 + 1).sum().backward()
            y.square().sum().backward()
        same_gradients(model, small)

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
    def test_several_forwards_before_the_backwards(self, order, plan, small, images, tuned, close):
        model = tuned(small, images, "train", plan)
        found = []
        for module in (model, small):
            losses = [module(images + i).square().sum() for i in range(3)]
            parameters = list(module.parameters())
            found.append([torch.autograd.grad(losses[i], parameters) for i in order])
        for ours, theirs in zip(*found, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                close(a, b)

    def test_gradients_accumulate(self, model, small, images, same_gradients):
        for module in (model, small):
            for i in range(3):
                module(images * (i + 1)).square().mean().backward()
        same_gradients(model, small)

    def test_one_backward_through_two_calls(self, model, small, images, same_gradients):
        for module in (model, small):
            (module(images) * module(images + 1)).sum().backward()
        same_gradients(model, small)

    def test_a_call_without_gradients_between(self, model, small, images, same_gradients):
        for module in (model, small):
            y = module(images)
            with torch.no_grad():
                module(images * 7)
            y.square().sum().backward()
        same_gradients(model, small)

    def test_gradients_of_chosen_sources(self, model, small, images, close):
        found = []
        for module in (model, small):
            x = images.clone().requires_grad_()
            wanted = [module.layers[1][0].fixup_scale, x]
            found.append(torch.autograd.grad(module(x).sum(), wanted))
            assert all(value is None for value in gradients(module).values())
        for ours, theirs in zip(*found, strict=True):
            close(ours, theirs)

    def test_checkpointing_runs_it_again(self, model, small, images, same_gradients):
        for module in (model, small):
            y = torch.utils.checkpoint.checkpoint(module, images, use_reentrant=False)
            y.square().sum().backward()
        same_gradients(model, small)

    def test_the_first_call_in_a_checkpoint_proves_the_plan(self, small, images, same_gradients):
        """The proof has a backward pass of its own, which waited for ever for the checkpoint."""
        model = optimize(small, images, mode="train", fallback="silent")
        model.run_from(replace(model.plan, origin="measured"))
        for module in (model, small):
            y = torch.utils.checkpoint.checkpoint(module, images, use_reentrant=False)
            y.square().sum().backward()
        assert model.last_call().how == "planned"
        same_gradients(model, small)

    def test_hooks_see_only_what_the_call_saves(self, small, images):
        model = optimize(small, images, mode="train", fallback="silent")
        model.run_from(replace(model.plan, origin="measured"))
        seen, counts = [], []
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, id):
                model(images)
            counts.append(len(seen))
        assert counts[1] == 2 * counts[0]

    def test_the_first_call_where_hooks_are_forbidden(self, small, images, same_gradients):
        model = optimize(small, images, mode="train", fallback="silent")
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            for module in (model, small):
                module(images).square().sum().backward()
        same_gradients(model, small)

    def test_an_output_changed_in_place(self, model, small, images, same_gradients):
        y = model(images)
        y.mul_(2)
        y.sum().backward()
        (small(images) * 2).sum().backward()
        same_gradients(model, small)

    @pytest.mark.parametrize(
        "seed",
        [
            lambda y: torch.ones(()).expand(y.shape),
            lambda y: torch.randn(y.shape[::-1]).permute(3, 2, 1, 0),
            lambda y: torch.randn(y.shape).contiguous(memory_format=torch.channels_last),
        ],
        ids=["expanded", "transposed", "channels last"],
    )
    def test_an_output_gradient_of_any_layout(self, seed, model, small, images, same_gradients):
        dy = seed(small(images))
        for module in (model, small):
            module(images).backward(dy)
        same_gradients(model, small)

    def test_an_output_gradient_after_a_view(self, named, images, tuned, same_gradients):
        class Halves(nn.Module):
            def forward(self, x):
                return x.view(2, 4, 2, 31, 62)

        module = named(conv=nn.Conv2d(3, 4, 3), halves=Halves())
        model = tuned(module, images, "train")
        dy = torch.randn(2, 4, 31, 2, 62).transpose(2, 3)
        for either in (model, module):
            either(images).backward(dy)
        same_gradients(model, module)


class TestFrozen:
    """`requires_grad` counts as it is in each call."""

    def test_toggled_between_calls(self, plan, small, images, tuned, same_gradients):
        model = tuned(small, images, "train", plan)
        frozen = ["stem.1.weight", "layers.0.0.fixup_scale", "layers.2.0.downsample.1.weight"]
        for wanted in (False, True, False):
            for module in (model, small):
                module.zero_grad()
                for name in frozen:
                    module.get_parameter(name).requires_grad_(wanted)
                module(images).square().sum().backward()
            assert (model.stem[1].weight.grad is not None) == wanted
            same_gradients(model, small)

    def test_all_of_them_leaves_no_graph(self, model, images):
        model.requires_grad_(False)
        assert not model(images).requires_grad
        model.requires_grad_(True)
        assert model(images).requires_grad

    def test_all_of_them_but_not_the_input(self, model, small, images, close):
        found = []
        for module in (model, small):
            module.requires_grad_(False)
            x = images.clone().requires_grad_()
            module(x).square().sum().backward()
            found.append(x.grad)
        close(*found)

    def test_a_parameter_that_nothing_reads_has_no_gradient(self, named, images, tuned):
        module = named(conv=nn.Conv2d(3, 4, 3))
        module.register_parameter("spare", nn.Parameter(torch.zeros(1)))
        model = tuned(module, images, "train")
        model(images).sum().backward()
        assert model.spare.grad is None
        assert model.conv.weight.grad is not None


class TestRefused:
    def test_double_backward(self, model, small, images, close):
        x = images.clone().requires_grad_()
        with pytest.raises(NotImplementedError, match="double backward"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        close(model(images), small(images))

    @pytest.mark.parametrize("change", ["in place", "replaced", "loaded", "stepped"])
    def test_weights_changed_before_backward(self, change, model, images, close):
        model(images).sum().backward()
        y = model(images)
        conv = model.layers[1][0].conv2
        with torch.no_grad():
            if change == "in place":
                conv.weight.mul_(2)
            elif change == "replaced":
                conv.weight = nn.Parameter(conv.weight * 2)
            elif change == "loaded":
                model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
            else:
                torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(WeightsChanged, match="forward again"):
            y.sum().backward()
        with torch.no_grad():
            close(model(images), model.reference(images))

    def test_only_the_pass_before_the_change_is_lost(self, model, small, images, same_gradients):
        y = model(images)
        for module in (model, small):
            with torch.no_grad():
                module.layers[1][0].conv2.weight.mul_(2)
        model(images).sum().backward()
        with pytest.raises(WeightsChanged):
            y.sum().backward()
        small(images).sum().backward()
        same_gradients(model, small)

    def test_running_statistics_are_not_such_weights(self, images, tuned, close):
        layers = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        model = tuned(nn.Sequential(*layers), images, "train")
        first, second = model(images).pow(3).sum(), model(images + 1).pow(3).sum()
        first.backward()
        second.backward()
        model.zero_grad()
        model(images).pow(3).sum().backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model.reference(images).pow(3).sum().backward()
        for ours, p in zip(expected, model.reference.parameters(), strict=True):
            close(ours, p.grad)


def test_no_grad_in_train_mode_gives_the_same_values(model, small, images, close):
    with torch.no_grad():
        y = model(images)
    assert not y.requires_grad
    close(y, small(images))
    assert torch.equal(y, model(images))
