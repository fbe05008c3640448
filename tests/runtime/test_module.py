"""The tuned module's calls."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from plantune import UnplannedCall, optimize
from plantune.errors import InputMismatch

from .awkward import AWKWARD


@pytest.fixture
def model(small, images, tuned):
    return tuned(small, images)


@pytest.fixture
def planned():
    """Fails where a call leaves the plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnplannedCall)
        yield


class TestUnknownShapes:
    @pytest.mark.parametrize("batch", [0, 1, 3, 80])
    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_another_batch_is_right_with_one_warning(
        self, batch, mode, small, images, tuned, close
    ):
        model = tuned(small, images, mode)
        x = torch.randn(batch, 3, 64, 64)
        with pytest.warns(UnplannedCall, match=rf"\(2, 3, 64, 64\), got \({batch}, 3"):
            close(model(x), small(x))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            close(model(x), small(x))
        assert caught == []

    def test_the_warning_points_at_the_call(self, model):
        with pytest.warns(UnplannedCall) as caught:
            model(torch.randn(1, 3, 64, 64))
        assert caught[0].filename == __file__

    def test_the_ragged_last_batch_of_an_epoch_trains(self, small, images, tuned, close):
        model = optimize(small, images, mode="train", fallback="silent")
        data = torch.randn(7, 3, 64, 64)
        pair = [(m, torch.optim.SGD(m.parameters(), lr=1e-3)) for m in (small, model)]
        for batch in data.split(2):
            for module, optimizer in pair:
                optimizer.zero_grad()
                module(batch).square().mean().backward()
                optimizer.step()
        for ours, theirs in zip(model.parameters(), small.parameters(), strict=True):
            close(ours, theirs)

    @pytest.mark.parametrize("size", [(32, 32), (64, 128)])
    def test_another_image_size_is_right(self, size, small, images, close):
        model = optimize(small, images, fallback="silent")
        x = torch.randn(2, 3, *size)
        close(model(x), small(x))

    def test_fallback_error_refuses_it_and_stays_usable(self, small, images, close):
        model = optimize(small, images, fallback="error")
        with pytest.raises(InputMismatch, match=r"made for input \(2, 3, 64, 64\), got \(3, 3"):
            model(torch.randn(3, 3, 64, 64))
        close(model(images), small(images))

    @pytest.mark.parametrize("fallback", ["silent", "error"])
    def test_no_fallback_but_warn_warns(self, fallback, small, images):
        model = optimize(small, images, fallback=fallback)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(images)
            if fallback == "silent":
                model(torch.randn(1, 3, 64, 64))

    @pytest.mark.usefixtures("planned")
    def test_channels_last_in_gives_the_same_values(self, plan, small, images, tuned, close):
        model = tuned(small, images, plan=plan)
        expected = model(images)
        close(model(images.contiguous(memory_format=torch.channels_last)), expected)
        made_for_it = tuned(small, images.contiguous(memory_format=torch.channels_last), plan=plan)
        assert made_for_it.pool().graph.inputs[0][1].layout == "nhwc"
        for x in (images, images.contiguous(memory_format=torch.channels_last)):
            close(made_for_it(x), expected)
        assert made_for_it(images).is_contiguous()

    @pytest.mark.usefixtures("planned")
    def test_rows_of_pixels_are_read_from_any_layout(self, named, images, tuned, close):
        """A product over pixels views the image as a matrix, which one layout alone allows."""
        module = named(conv=nn.Conv2d(3, 8, 1))
        nhwc = images.contiguous(memory_format=torch.channels_last)
        for example in (images, nhwc):
            model = tuned(module, example, plan="hand")
            assert model.plan.choices[-1].candidate.family == "gemm"
            for x in (images, nhwc, images.transpose(2, 3).contiguous().transpose(2, 3)):
                close(model(x), module(images))

    @pytest.mark.usefixtures("planned")
    def test_gradients_are_the_same_for_channels_last(self, small, images, tuned, results, close):
        model = tuned(small, images, "train")
        nhwc = images.contiguous(memory_format=torch.channels_last)
        expected = results(small, images, wrt_input=True)
        for name, value in results(model, nhwc, wrt_input=True).items():
            close(value, expected[name])

    @pytest.mark.parametrize("shape", [(2, 4, 64, 64), (3, 64, 64), (2, 3, 63, 64), ()])
    def test_what_eager_refuses_is_refused_as_eager_does(self, shape, small, images):
        model = optimize(small, images, fallback="silent")
        x = torch.randn(shape)
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            small(x)
        with pytest.raises(type(theirs.value)) as ours:
            model(x)
        assert str(ours.value) == str(theirs.value)


class TestAwkwardInputs:
    """Any tensor of the right shape runs from the plan and counts by its values."""

    @pytest.mark.usefixtures("planned")
    def test_a_view_is_read_right_and_never_written(self, plan, small, images, tuned):
        model = tuned(small, images, plan=plan)
        for name, awkward in AWKWARD.items():
            x = awkward(images)
            copied = x.detach().clone(memory_format=torch.contiguous_format)
            assert torch.equal(model(x), model(copied)), name
            assert torch.equal(x, copied), name
            assert not torch.equal(model(x), model(x + 1)), name

    @pytest.mark.usefixtures("planned")
    def test_a_view_gets_the_gradient_of_its_base(self, small, images, tuned, close):
        model = tuned(small, images, "train")
        bases = [torch.cat([images, images], 3).requires_grad_() for _ in range(2)]
        for module, base in zip((small, model), bases, strict=True):
            module(base[..., ::2]).square().sum().backward()
        close(bases[1].grad, bases[0].grad)
        assert not bases[1].grad[..., 1::2].any()

    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_a_plan_for_one_image(self, mode, small, tuned, close, results):
        x = torch.randn(1, 3, 64, 64)
        model = tuned(small, x, mode)
        # The stride of a batch of one is free, and torch calls it contiguous.
        odd = x.as_strided(x.shape, (7, *x.stride()[1:]))
        close(model(odd), small(x))
        if mode == "train":
            close(results(model, odd)["stem.1.weight"], results(small, x)["stem.1.weight"])

    def test_a_plan_for_no_image(self, small, tuned):
        x = torch.randn(0, 3, 64, 64)
        assert tuned(small, x)(x).shape == small(x).shape

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
    def test_another_dtype_is_refused_by_name(self, dtype, model, images):
        with pytest.raises(InputMismatch, match=f"needs a torch.float32 tensor.*got {dtype}"):
            model(images.to(dtype))

    def test_another_device_is_refused_by_name(self, model, images):
        with pytest.raises(InputMismatch, match=r"on cpu, got torch\.float32 on meta"):
            model(images.to("meta"))

    @pytest.mark.parametrize("thing", [None, 1.0, [[0.0]], "x"])
    def test_no_tensor_is_refused(self, thing, model):
        with pytest.raises(InputMismatch, match="must be a tensor, got"):
            model(thing)

    @pytest.mark.parametrize("count", [0, 2])
    def test_the_number_of_arguments_is_the_modules(self, count, model, images):
        with pytest.raises(TypeError, match="argument"):
            model(*([images] * count))

    def test_infinite_and_missing_values_come_out_as_eagers(self, plan, small, images, tuned):
        model = tuned(small, images, plan=plan)
        images[0, 1, 5, 5] = float("nan")
        y, expected = model(images), small(images)
        assert torch.equal(y.isnan(), expected.isnan())
        assert y[0].isnan().any()
        assert not y[1].isnan().any()


class TestOutputs:
    """A result is the caller's own."""

    def test_a_result_keeps_its_values_over_later_calls(self, plan, small, images, tuned):
        model = tuned(small, images, plan=plan)
        first = model(images)
        kept = first.clone()
        second = model(images + 1)
        assert torch.equal(first, kept)
        assert not torch.equal(second, kept)
        first.fill_(0)
        assert torch.equal(model(images), kept)

    def test_a_gradient_keeps_its_values_over_later_calls(self, small, images, tuned):
        model = tuned(small, images, "train")
        parameters = list(model.parameters())
        first = torch.autograd.grad(model(images).sum(), parameters)
        kept = [g.clone() for g in first]
        torch.autograd.grad(model(images * 3 + 1).sum(), parameters)
        assert all(map(torch.equal, first, kept))

    def test_infer_records_no_gradient_and_train_does(self, small, images, tuned):
        assert not tuned(small, images, "infer")(images).requires_grad
        model = tuned(small, images, "train")
        assert model(images).requires_grad
        with torch.no_grad():
            assert not model(images).requires_grad
        with torch.inference_mode():
            assert model(images).is_inference()

    @pytest.mark.parametrize("mode", ["infer", "train"])
    def test_inference_mode_takes_turns(self, mode, plan, small, images, tuned, close):
        model = tuned(small, images, mode, plan)
        expected = small(images)
        for context in (torch.inference_mode, torch.no_grad, torch.enable_grad) * 2:
            with context():
                close(model(images), expected)

    def test_a_module_made_in_inference_mode_follows_its_weights(self, small, images, tuned, close):
        with torch.inference_mode():
            model = tuned(copy.deepcopy(small), images, plan="hand")
            model(images)
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.mul_(1.1)
            model.refresh()  # torch keeps no version of such tensors
            close(model(images), model.reference(images))
        with torch.no_grad():
            close(model(images), model.reference(images))


class Several(nn.Module):
    """Two results, one of which twice, and the input itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)

    def forward(self, x):
        y = self.first(x)
        return y, self.second(y), y, x


class TestSeveralOutputs:
    def test_each_comes_back_in_its_place(self, images, tuned, close):
        module = Several()
        got, expected = tuned(module, images)(images), module(images)
        assert type(got) is tuple
        for ours, theirs in zip(got, expected, strict=True):
            close(ours, theirs)

    @pytest.mark.parametrize("used", [[0], [1], [2], [3], [0, 2], [1, 3], [0, 1, 2, 3]])
    def test_any_part_of_them_can_be_differentiated(self, used, images, tuned, close):
        """What is not used has no part in the gradient."""
        module = Several()
        model = tuned(module, images, "train")
        found = []
        for m in (module, model):
            m.zero_grad()
            x = images.clone().requires_grad_()
            outputs = m(x)
            sum((place + 2) * outputs[place].square().sum() for place in used).backward()
            found.append([x.grad, *(p.grad for p in m.parameters())])
        for ours, theirs in zip(*reversed(found), strict=True):
            close(torch.zeros(()) if theirs is None else theirs, _or_zero(ours, theirs))


def _or_zero(ours, theirs):
    """Eager leaves None where the tuned module may say zero."""
    if theirs is not None:
        return ours
    return torch.zeros(()) if ours is None else ours.abs().max()


class TestHooks:
    """A plan calls no submodule, so a hook on one sends the call through the framework."""

    def test_a_hook_that_changes_an_output_counts_until_it_is_removed(
        self, model, small, images, close
    ):
        before = model(images)
        hook = model.layers[1].register_forward_hook(lambda m, args, out: out * 2)
        with pytest.warns(UnplannedCall, match="hooks"):
            changed = model(images)
        twice = small.layers[1].register_forward_hook(lambda m, args, out: out * 2)
        close(changed, small(images))
        twice.remove()
        hook.remove()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(model(images), before)

    @pytest.mark.parametrize(
        "kind",
        ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"],
    )
    def test_every_kind_of_hook_on_a_submodule_is_called(self, kind, small, images):
        model = optimize(small, images, mode="train", fallback="silent")
        model(images)
        calls = []
        getattr(model.layers[0][0].conv1, f"register_{kind}")(lambda *args: calls.append(1))
        model(images.clone().requires_grad_()).sum().backward()
        assert calls == [1]

    def test_a_hook_that_the_original_had_is_called(self, small, images):
        calls = []
        small.register_forward_hook(lambda m, args, out: calls.append(1))
        model = optimize(small, images, fallback="silent")
        model(images)
        assert calls == [1]

    def test_a_hook_for_all_modules_is_called(self, small, images):
        model = optimize(small, images, fallback="silent")
        model(images)
        seen = []
        hook = nn.modules.module.register_module_forward_hook(
            lambda m, args, out: seen.append(type(m).__name__)
        )
        try:
            model(images)
        finally:
            hook.remove()
        assert (seen.count("FixupBlock"), seen.count("SEResNet9Fixup")) == (4, 1)
        assert "TunedModule" not in seen

    @pytest.mark.usefixtures("planned")
    def test_hooks_on_the_tuned_module_itself_run_round_the_plan(self, model, images):
        before = model(images)
        model.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        model.register_forward_hook(lambda m, args, out: out * 2)
        changed = model(images - 1)
        torch.testing.assert_close(changed, before * 2, rtol=1e-4, atol=1e-4)

    @pytest.mark.usefixtures("planned")
    def test_hooks_on_parameters_see_their_gradients(self, small, images, tuned):
        model = tuned(small, images, "train")
        seen = []
        weight = model.layers[2][0].conv2.weight
        weight.register_hook(lambda g: g * 2)
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        model(images).sum().backward()
        small(images).sum().backward()
        torch.testing.assert_close(
            seen[0], small.layers[2][0].conv2.weight.grad * 2, rtol=1e-4, atol=1e-4
        )
