"""Results lie in memory as eager's do, so `.view` after a call works where it works in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plantune import optimize
from plantune.plans.plan import FROZEN_ROUTES, LIVE_ROUTES, PROGRAM
from plantune.runtime.program import result_strides
from plantune.runtime.program.result_strides import MOST_ASKED

from ..strides import NHWC, PREFERENCES, plan_everything, run_beside_eager


@pytest.fixture(params=PREFERENCES)
def planned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_everything(monkeypatch, request.param)


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("seed", range(30))
def test_of_any_network(seed: int) -> None:
    run_beside_eager(seed)


@pytest.mark.slow
@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("seed", range(30, 400))
def test_of_many_networks(seed: int) -> None:
    run_beside_eager(seed)


class Pixels(nn.Module):
    """Logits of each pixel, as most losses want them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).permute(0, 2, 3, 1)


def strides(module: nn.Module, x: Tensor) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(module(x).stride())


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 6, 6)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each time that eager was asked."""
    found: list[int] = []
    ask = result_strides.strides_in_eager

    def noted(*args: Any) -> Any:
        found.append(len(found))
        return ask(*args)

    monkeypatch.setattr(result_strides, "strides_in_eager", noted)
    return found


@pytest.mark.usefixtures("planned")
class TestAsEagerHasThem:
    def test_a_view_that_works_in_eager_works(self, x: Tensor) -> None:
        tuned = optimize(Pixels().eval(), x)
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            tuned(x).view(-1, 8)
        tuned.to(memory_format=NHWC)
        assert tuned(x).view(-1, 8).shape == (72, 8)
        assert tuned.last_call().how == "planned"

    def test_whatever_the_module_was_made_for(self, x: Tensor) -> None:
        images = (x, x.contiguous(memory_format=NHWC))
        for example in images:
            tuned = optimize(Pixels().eval(), example)
            found = [strides(tuned, each) for each in (*images, *images)]
            assert found == [(288, 6, 1, 36), (288, 48, 8, 1)] * 2

    def test_an_input_of_other_strides_is_asked_for_once(self, x: Tensor, asked: list[int]) -> None:
        tuned = optimize(Pixels().eval(), x)
        for _ in range(3):
            strides(tuned, x)
            strides(tuned, x.contiguous(memory_format=NHWC))
        assert len(asked) == 2

    def test_heads_are_never_asked_for(self, x: Tensor, asked: list[int]) -> None:
        class Policy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(64, 5)

            def forward(self, x: Tensor) -> tuple[Tensor, ...]:
                y = self.linear(self.conv(x).flatten(1))
                return y.softmax(-1), y.relu().unsqueeze(1)

        module = Policy().eval()
        tuned = optimize(module.to(memory_format=NHWC), x)
        for image in (x, x.contiguous(memory_format=NHWC)):
            assert [y.stride() for y in tuned(image)] == [(5, 1), (5, 5, 1)]
        assert asked == []

    def test_ever_new_strides_stop_being_asked_for(self, x: Tensor, asked: list[int]) -> None:
        tuned, wide = optimize(Pixels().eval(), x), torch.randn(2, 3, 6, 60)
        for width in range(6, 40):
            cut = wide[..., :width].contiguous()[..., :6]
            torch.testing.assert_close(tuned(cut), tuned.reference(cut), rtol=1e-4, atol=1e-4)
        assert len(asked) == MOST_ASKED

    def test_of_forms_that_differ_in_nothing_else(self, x: Tensor) -> None:
        module = Pixels().eval()
        module.dense = False
        module.forward = lambda x: (
            Pixels.forward(module, x).contiguous() if module.dense else Pixels.forward(module, x)
        )
        tuned = optimize(module, x, share=True)
        found = []
        for dense in (False, True, False, True):
            tuned.dense = dense
            found.append(strides(tuned, x))
        assert found == [(288, 6, 1, 36), (288, 48, 8, 1)] * 2


@pytest.mark.usefixtures("planned")
class TestToAsk:
    def test_changes_nothing(self, x: Tensor, asked: list[int]) -> None:
        class Noisy(Pixels):
            def forward(self, x: Tensor) -> Tensor:
                return F.dropout(super().forward(x), training=self.training)

        module = Noisy().train()
        tuned, twin = optimize(module, x, mode="train"), copy.deepcopy(module)
        for each in (tuned, twin):
            torch.manual_seed(3)
            y = each(x)
            each(x.contiguous(memory_format=NHWC))
            y.square().sum().backward()  # what it reads must be as it was
        assert len(asked) == 2
        for (name, ours), theirs in zip(tuned.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=name)
        torch.testing.assert_close(tuned.conv.bias.grad, twin.conv.bias.grad, rtol=1e-3, atol=1e-4)

    def test_may_fail(self, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        """Then results come in rows."""

        def fail(*args: Any) -> None:
            raise torch.OutOfMemoryError("none is left")

        monkeypatch.setattr(result_strides, "strides_in_eager", fail)
        tuned = optimize(Pixels().eval(), x)
        torch.testing.assert_close(tuned(x), tuned.reference(x), rtol=1e-4, atol=1e-4)
        assert strides(tuned, x) == (288, 48, 8, 1)
        assert tuned.last_call().how == "planned"


def test_what_nothing_else_needs_is_not_copied(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one view of what torch made is handed out itself."""
    plan_everything(monkeypatch, "rows")
    module = nn.Identity()
    module.forward = lambda x: F.scaled_dot_product_attention(x, x, x).transpose(2, 3)
    tuned = optimize(module, x)
    assert strides(tuned, x) == strides(module, x)
    program = tuned.pool().lend().instance.program
    assert program._owned == {*program.graph.outputs}


class TestRoutesOfTheFramework:
    @pytest.mark.parametrize("route", sorted({*LIVE_ROUTES, *FROZEN_ROUTES} - {PROGRAM}))
    @pytest.mark.parametrize("seed", range(500, 504))
    def test_of_any_network(self, seed: int, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those in channels_last too."""
        plan_everything(monkeypatch, "rows", route)
        run_beside_eager(seed, how=route)
