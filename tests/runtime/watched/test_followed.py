"""What changes in a module after `optimize(module, share=True)` is seen, as on a tuned one itself.

Each change is made to the module; the tuned one then computes what it does, and runs as one would
that was changed so itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from plantune import TunedModule, optimize

from .followed import Lora, Net, Twice, alike, called, of

Change = Callable[[Any], object]


def double(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 2


def spectral(m: Any) -> None:
    parametrizations.spectral_norm(m.fc)


def loaded(m: Any) -> None:
    state = {k: torch.rand_like(t) if t.dim() else t for k, t in m.state_dict().items()}
    m.load_state_dict(state, assign=True)


def emptied(m: Any) -> None:
    m.to_empty(device="cpu")
    for tensor in (*m.parameters(), *m.buffers()):
        tensor.detach().fill_(1)


def put(m: Any) -> None:
    m.body[1] = nn.Linear(5, 6)


def moved(m: Any) -> None:
    m.body.insert(1, nn.Tanh())


def left_out(m: Any) -> None:
    del m.body[0]


def hooked(m: Any) -> None:
    m.handle = m.fc.register_forward_hook(double)


CHANGES: dict[str, Change] = {
    "pruned": lambda m: prune.l1_unstructured(m.fc, "weight", 0.5),
    "parametrized": lambda m: parametrize.register_parametrization(m.fc, "weight", Twice()),
    "weight_norm": lambda m: parametrizations.weight_norm(m.fc),
    "spectral_norm": spectral,
    "LoRA": lambda m: setattr(m, "fc", Lora(m.fc)),
    "another layer": lambda m: setattr(m, "head", nn.Linear(6, 3)),
    "another layer in a Sequential": put,
    "a layer more in a Sequential": moved,
    "a layer less in a Sequential": left_out,
    "one layer in the place of another": lambda m: setattr(m.body, "2", m.body[0]),
    "no bias any more": lambda m: setattr(m.fc, "bias", None),
    "another parameter": lambda m: setattr(m.fc, "weight", nn.Parameter(torch.randn(5, 4))),
    "another buffer": lambda m: setattr(m.bn, "running_var", torch.rand(5) + 0.5),
    "loaded with assign": loaded,
    "made empty and filled": emptied,
    "a float": lambda m: setattr(m, "scale", 3.0),
    "an attribute of torch's layer": lambda m: setattr(m.bn, "eps", 0.5),
    "a list": lambda m: m.shifts.append(7.0),
    "a dict": lambda m: m.how.update(power=0),
    "another object": lambda m: setattr(m, "settings", SimpleNamespace(sign=-1.0)),
    "a hook": hooked,
}
UNDONE: dict[str, tuple[Change, Change]] = {
    "pruned": (CHANGES["pruned"], lambda m: prune.remove(m.fc, "weight")),
    "pruned twice": (
        lambda m: [prune.random_unstructured(m.fc, "weight", 0.3) for _ in range(2)],
        lambda m: prune.remove(m.fc, "weight"),
    ),
    "parametrized": (
        CHANGES["parametrized"],
        lambda m: parametrize.remove_parametrizations(m.fc, "weight"),
    ),
    "weight_norm": (
        CHANGES["weight_norm"],
        lambda m: parametrize.remove_parametrizations(m.fc, "weight"),
    ),
    "LoRA": (CHANGES["LoRA"], lambda m: setattr(m, "fc", m.fc.base)),
    "a hook": (hooked, lambda m: m.handle.remove()),
    "an attribute": (
        lambda m: setattr(m.fc, "forward", lambda x: x[:, :1].expand(-1, 5) * 2),
        lambda m: delattr(m.fc, "forward"),
    ),
}


@pytest.fixture
def module() -> nn.Module:
    return Net().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4)


@pytest.fixture
def tuned(module: nn.Module, x: Tensor) -> TunedModule:
    return of(module, x, share=True)


class TestSeen:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    @pytest.mark.parametrize("called_before", [False, True])
    def test_a_change_counts_in_the_next_call(
        self, change: Change, called_before: bool, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        if called_before:
            alike(tuned, module, x)
        before = called(module, x)
        change(module)
        ours = called(tuned, x)  # before a call of the module itself
        after = called(module, x)
        torch.testing.assert_close(ours, after)
        same = before.shape == after.shape and torch.allclose(before, after)
        assert same == (change is CHANGES["weight_norm"])

    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_it_runs_as_one_that_was_changed_itself(
        self, change: Change, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        itself = of(copy.deepcopy(module), x)
        for each in (tuned, itself):
            called(each, x)
        change(module)
        change(itself.reference)
        for each in (tuned, itself):
            called(each, x)
        how, why = (t.last_call().how for t in (tuned, itself)), tuned.last_call().reason
        assert len({*how}) == 1, why

    @pytest.mark.parametrize(("change", "undo"), UNDONE.values(), ids=UNDONE)
    @pytest.mark.parametrize("called_between", [False, True])
    def test_a_change_that_is_undone(
        self,
        change: Change,
        undo: Change,
        called_between: bool,
        tuned: TunedModule,
        module: nn.Module,
        x: Tensor,
    ) -> None:
        alike(tuned, module, x)
        change(module)
        if called_between:
            alike(tuned, module, x)
        undo(module)
        alike(tuned, module, x)
        assert tuned.last_call().how == "planned"
        assert [*tuned.state_dict()] == [*module.state_dict()]

    @pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
    @pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
    def test_norms_of_weights_by_hooks(
        self, kind: str, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        alike(tuned, module, x)
        getattr(nn.utils, kind)(module.fc)
        alike(tuned, module, x)
        getattr(nn.utils, f"remove_{kind}")(module.fc)
        alike(tuned, module, x)
        assert tuned.last_call().how == "planned"

    def test_one_that_was_pruned_before(self, module: nn.Module, x: Tensor) -> None:
        prune.l1_unstructured(module.fc, "weight", 0.5)
        tuned = optimize(module, x, share=True, fallback="silent")
        alike(tuned, module, x)
        prune.remove(module.fc, "weight")
        alike(tuned, module, x)

    @pytest.mark.parametrize("change", [CHANGES["LoRA"], CHANGES["a float"], CHANGES["pruned"]])
    def test_where_no_plan_is_stored(self, change: Change, module: nn.Module, x: Tensor) -> None:
        """There the framework runs it, and looks at nothing for many calls."""
        tuned = optimize(module, x, share=True)
        for _ in range(8):
            alike(tuned, module, x)
        change(module)
        for _ in range(8):
            alike(tuned, module, x)

    def test_another_dtype(self, tuned: TunedModule, module: nn.Module, x: Tensor) -> None:
        alike(tuned, module, x)
        module.double()
        assert {p.dtype for p in tuned.parameters()} == {torch.float64}
        alike(tuned, module, x.double())

    def test_a_parameter_that_is_deleted(
        self, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        alike(tuned, module, x)
        del module.fc.bias
        for each in (module, tuned):
            with pytest.raises(AttributeError, match="'Linear' object has no attribute 'bias'"):
                called(each, x)

    def test_the_module_itself_parametrized(self, x: Tensor) -> None:
        layer = nn.Linear(4, 5).eval()
        tuned = of(layer, x, share=True)
        alike(tuned, layer, x)
        parametrize.register_parametrization(layer, "weight", Twice())
        alike(tuned, layer, x)

    @pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
    def test_a_recurrent_layers_weights(self, cell: type[nn.RNNBase]) -> None:
        x, layer = torch.randn(2, 3, 4), cell(4, 5, batch_first=True).eval()
        tuned = optimize(layer, x, share=True)
        for change in (
            lambda: setattr(
                layer,
                "weight_ih_l0",
                nn.Parameter(torch.rand_like(layer.bias_ih_l0)[:, None].repeat(1, 4)),
            ),
            lambda: layer.load_state_dict(
                {k: v * 2 for k, v in layer.state_dict().items()}, assign=True
            ),
        ):
            change()
            with torch.no_grad():
                torch.testing.assert_close(tuned(x)[0], layer(x)[0])

    def test_gradients_reach_what_came_in(self, module: nn.Module, x: Tensor) -> None:
        tuned = optimize(module.train(), x, mode="train", share=True)
        tuned(x).sum().backward()
        module.fc = Lora(module.fc)
        module.zero_grad()
        tuned(x).sum().backward()
        ours = {name: p.grad.clone() for name, p in module.named_parameters()}
        module.zero_grad()
        module(x).sum().backward()
        theirs = {name: p.grad for name, p in module.named_parameters()}
        assert "fc.up" in ours
        torch.testing.assert_close(ours, theirs)

    def test_parts_are_found_before_a_call(self, tuned: TunedModule, module: nn.Module) -> None:
        module.fc = Lora(module.fc)
        names = [name for name, _ in module.named_parameters()]
        assert [name for name, _ in tuned.named_parameters()] == names
        assert [*map(id, tuned.parameters())] == [*map(id, module.parameters())]
        module.head = nn.Sequential(module.head)
        assert [n for n, _ in tuned.named_modules()] == [n for n, _ in module.named_modules()]
        module.body.append(nn.Tanh())
        assert len(tuned.body) == 4
        module.extra = nn.Tanh()
        assert "extra" in dict(tuned.named_children())
        module.last = nn.Tanh()
        assert "(last): Tanh()" in repr(tuned)

    def test_weights_of_what_came_in_are_shared(
        self, tuned: TunedModule, module: nn.Module, x: Tensor
    ) -> None:
        module.fc = Lora(module.fc)
        alike(tuned, module, x)
        with torch.no_grad():
            module.fc.up.mul_(3)
            tuned.fc.base.weight.mul_(2)
        alike(tuned, module, x)
