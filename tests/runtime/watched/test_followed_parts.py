"""What a module that follows another one keeps as its own, refuses, and has in its copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune import TunedModule, optimize
from plantune.errors import UnsupportedModule

from .followed import Lora, Net, alike, called, of


@pytest.fixture
def module() -> nn.Module:
    return Net().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4)


@pytest.fixture
def tuned(module: nn.Module, x: Tensor) -> TunedModule:
    return of(module, x, share=True)


class TestOwn:
    """What the tuned module keeps."""

    def test_its_mode_as_a_whole(self, tuned: TunedModule, module: nn.Module, x: Tensor) -> None:
        module.train()
        called(tuned, x)
        assert not any(part.training for part in tuned.modules())
        module.fc = Lora(module.fc)  # in training mode
        called(tuned, x)
        assert not any(part.training for part in tuned.modules())

    def test_a_part_that_is_set_to_eval_mode(self, module: nn.Module, x: Tensor) -> None:
        learner = optimize(module.train(), x, mode="train", share=True)
        before = module.bn.running_mean.clone()
        module.bn.eval()
        torch.testing.assert_close(learner(x), module(x))
        assert not learner.bn.training
        torch.testing.assert_close(module.bn.running_mean, before)
        module.eval()  # for an evaluation between
        learner(x)
        assert learner.training
        module.train()
        learner(x)
        assert learner.bn.training

    def test_an_actor_that_joins_in_the_modules_mode(
        self, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        module.train()
        tuned.train()
        module.bn.eval()
        called(tuned, x)
        assert tuned.training
        assert not tuned.bn.training

    def test_what_was_changed_in_it_alone(
        self, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        tuned.scale = 5.0
        tuned.body[0] = nn.Tanh()
        module.bn.eps = 0.25
        wanted = copy.deepcopy(module)
        wanted.scale = 5.0
        wanted.body[0] = nn.Tanh()
        alike(tuned, wanted, x)
        module.scale = 2.0
        wanted.scale = 2.0
        alike(tuned, wanted, x)

    def test_a_call_of_the_module_changes_nothing(
        self, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        """Else each would have the tuned one traced again."""
        called(module, x)
        called(tuned, x)
        signature = tuned._calls._table.signature
        for _ in range(3):
            called(module, torch.randn(3, 4))
            called(tuned, x)
        assert tuned._calls._table.signature is signature
        assert tuned.last_call().how == "planned"

    def test_an_object_is_read_again_by_refresh(
        self, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        alike(tuned, module, x)
        module.settings.sign = -1.0
        tuned.refresh()
        alike(tuned, module, x)


class TestErrors:
    def test_what_cannot_be_copied_is_named(
        self, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        module.fc.rows = (row for row in range(3))
        for _ in range(2):
            with pytest.raises(UnsupportedModule, match=r"cannot follow a change of self\.fc: "):
                tuned(x)
        del module.fc.rows
        alike(tuned, module, x)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_torchscript_cannot_share(self, x: Tensor) -> None:
        scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 5))).eval()
        with pytest.raises(UnsupportedModule, match="cannot share its weights: copies of what"):
            optimize(scripted, x, share=True)


class TestCopies:
    @pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
        ids=["deepcopy", "pickle"],
    )
    @pytest.mark.parametrize("first", [0, 1])
    def test_a_copy_of_both_follows_its_own_module(
        self, duplicate: Any, first: int, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        pair = (module, tuned) if first == 0 else (tuned, module)
        two = duplicate(pair)
        other, its = two[first], two[1 - first]
        other.fc = nn.Linear(4, 5)
        other.bn.eps = 0.5
        alike(its, other, x)
        alike(tuned, module, x)
        assert not torch.allclose(called(its, x), called(tuned, x))

    @pytest.mark.parametrize("way", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
    def test_a_copy_alone_shares_nothing(
        self, way: Any, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        module.fc = Lora(module.fc)
        other = way(tuned)
        before = called(other, x)
        alike(other, module, x)
        with torch.no_grad():
            module.fc.up.mul_(2)
        module.scale = 2.0
        torch.testing.assert_close(called(other, x), before)


def put_lora(m: Any) -> None:
    m.fc = Lora(m.fc)


def scaled(m: Any) -> None:
    m.scale = 3.0


def test_it_is_seen_under_torch_compile(tuned: TunedModule, module: nn.Module, x: Tensor) -> None:
    compiled = torch.compile(tuned, backend="eager")
    for change in (lambda m: None, put_lora, scaled):
        change(module)
        torch.testing.assert_close(called(compiled, x), called(module, x))


def test_modules_that_do_not_share_have_nothing_of_it(module: nn.Module, x: Tensor) -> None:
    tuned = of(module, x)
    assert "_mirror" not in vars(tuned)
    assert type(tuned).__call__ is TunedModule.__call__
