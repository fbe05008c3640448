"""What the backend refuses, and which options it knows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plantune import UnplannedCall

from .compiled import Net, assert_alike, compiled, image, refused


class TestRefused:
    """What no plan can run is run as it was captured, and that is said once."""

    def test_results_that_share_memory(self):
        module = nn.Linear(3, 4)

        def views(x: Tensor) -> Tensor:
            whole = module(x)
            part = whole[:1]
            torch._dynamo.graph_break()
            part.zero_()
            return whole

        fast, x = compiled(views), torch.randn(2, 3)
        with torch.no_grad():
            with pytest.warns(UnplannedCall, match="shares memory") as warned:
                ours = [fast(x), fast(x)]
            assert_alike(ours, [views(x), views(x)])
        told = [warning for warning in warned if warning.category is UnplannedCall]  # not torch's
        assert len(told) == len(refused())
        assert {warning.filename for warning in told} == {__file__}

    def test_results_beside_each_other_in_memory_are_not_refused(self):
        module = nn.Linear(3, 4)
        fast, x = compiled(lambda x: module(x).chunk(2, -1)), torch.randn(2, 3)
        assert_alike(fast(x), module(x).chunk(2, -1))
        assert refused() == []

    def test_a_number_that_is_another_in_each_call(self):
        module, x = nn.Linear(3, 3), torch.randn(2, 3)
        fast = compiled(lambda x, scale: module(x) * scale)
        assert_alike(fast(x, 1.0), module(x))
        with pytest.warns(UnplannedCall, match="scale.*give it as a tensor"):
            assert_alike(fast(x, 0.5), module(x) * 0.5)

    def test_an_input_that_is_written(self):
        module = nn.Linear(3, 3)
        fast, x = compiled(lambda x: module(x.mul_(2))), torch.ones(2, 3)
        with torch.no_grad():
            with pytest.warns(UnplannedCall, match="in-place op on the input"):
                ours = fast(x)
            assert_alike((ours, x), (module(x), 2 * torch.ones(2, 3)))

    def test_nothing_but_weights(self):
        module = nn.Linear(3, 3)
        with pytest.warns(UnplannedCall, match="no tensor among its inputs"):
            assert_alike(
                compiled(lambda: module.weight.square().sum())(), module.weight.square().sum()
            )

    def test_checkpoints(self):
        module = Net()
        ours = copy.deepcopy(module)
        fast = compiled(lambda x: checkpoint(ours, x, use_reentrant=False))
        x = image()
        fast(x).sum().backward()
        module(x).sum().backward()
        assert_alike(ours.conv.weight.grad, module.conv.weight.grad)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"bugdet": 60}, "unknown options: bugdet; known: budget"),
            ({"budget": -1}, "budget must be a number"),
            ({"budget": True}, "budget must be a number"),
            ({"budget": float("inf")}, "budget must be a number"),
        ],
    )
    def test_others_are_refused(self, options, says):
        with pytest.raises(Exception, match=says):
            compiled(nn.Linear(3, 3), options=options)(torch.randn(2, 3))

    def test_modes_of_torch_change_nothing(self):
        module, x = nn.Linear(3, 3), torch.randn(2, 3)
        assert_alike(compiled(module, mode="max-autotune")(x), module(x))
        with pytest.raises(Exception, match="mode must be one of"):
            compiled(nn.Linear(3, 4), mode="fastest")(x)
        with pytest.raises(Exception, match="ither mode or options"):
            compiled(module, mode="max-autotune", options={"budget": 1})
