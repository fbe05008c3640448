"""What is said of modules and calls that no plan serves: enough to know what to write instead."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import plantune
from plantune import UnplannedCall, layers, optimize
from plantune.errors import InputMismatch, UnsupportedModule
from plantune.graph.nested import leaves
from plantune.runtime.load import TrainingMode
from plantune.runtime.watched.modes import heeds_training

X = torch.randn(2, 3)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, shift: float | None = None, *, scale: float = 1.0) -> Tensor:
        return self.layer(x) * scale + (0 if shift is None else shift)


class Named(Scaled):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return self.layer(x["x"])


class Apart(Scaled):
    """Holds a tensor that is no buffer, in a module within."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.mean = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - self.layer.mean)


def test_constants_in_other_places_are_told_by_them() -> None:
    tuned = optimize(Scaled().eval(), X, scale=2.0)
    said = r"input \(\(2, 3\) float32, scale=2.0\), got \(\(2, 3\) float32, 2.0\)"
    with pytest.warns(UnplannedCall, match=said):
        tuned(X, 2.0)


def test_other_structures_are_told_by_their_types() -> None:
    tuned = optimize(Named().eval(), OrderedDict(x=X))
    with pytest.warns(UnplannedCall, match=r"OrderedDict\(.*\), got \(\{'x': \(2, 3\) float32\}\)"):
        tuned({"x": X})


def test_an_error_does_not_say_that_something_ran() -> None:
    tuned = optimize(nn.Linear(3, 3).eval(), X, fallback="error")
    with pytest.raises(InputMismatch, match=r"got \(1, 3\); fallback='error' keeps the framework"):
        tuned(X[:1])


@pytest.mark.parametrize("given", [torch.relu, nn.Linear])
def test_what_is_no_module_is_told(given: object) -> None:
    with pytest.raises(TypeError, match=r"takes an nn\.Module that is made, got"):
        optimize(given, X)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_torch_has_made_of_others() -> None:
    module = nn.Linear(3, 3).eval()
    with pytest.raises(UnsupportedModule, match=r"give module\._orig_mod"):
        optimize(torch.compile(module), X)  # type: ignore[arg-type]
    scripted = optimize(torch.jit.script(module), X)
    with pytest.warns(UnplannedCall, match="TorchScript keeps its parameters"):
        torch.testing.assert_close(scripted(X), module(X))


def test_a_tensor_that_is_no_buffer_is_named() -> None:
    with pytest.raises(UnsupportedModule, match=r"as a buffer\), self\.layer\.mean, cannot be"):
        optimize(Apart().eval(), X)


class Drops(Scaled):
    """Asks in a function inside of its forward, and holds what has any attribute."""

    ops = torch.ops

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return sum(nn.functional.dropout(self.layer(y), 0.5, self.training) for y in [x, x])


class DropsNothing(nn.Dropout):
    """Its own code asks for the mode, whatever torch's does."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x + 1


class Frozen(nn.Sequential):
    """Keeps its norm as it is, as fine-tuning does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())


class Made(nn.Module):
    """Its own code reads another module's mode, and no result depends on that."""

    @classmethod
    def of(cls, layer: nn.Module) -> Made:
        made: Made = cls().train(layer.training)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def encoder(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


SEQUENCES = torch.randn(2, 5, 4)
WITHOUT = {
    "layers without a mode": (nn.Sequential(nn.Linear(3, 3), nn.Tanh()), X),
    "LSTM": (nn.LSTM(4, 3), SEQUENCES),
    "GRU of two layers": (nn.GRU(4, 3, num_layers=2), SEQUENCES),
    "RNN": (nn.RNN(4, 3), SEQUENCES),
    "a layer for episodes": (layers.EpisodicGRU(4, 3), SEQUENCES),
    "Dropout(0)": (nn.Dropout(0.0), X),
    "AlphaDropout(0)": (nn.AlphaDropout(0.0), X),
    "RReLU of one slope": (nn.RReLU(0.2, 0.2), X),
    "BatchNorm without statistics": (nn.BatchNorm1d(3, track_running_stats=False), X),
    "InstanceNorm": (nn.InstanceNorm1d(5), SEQUENCES),
    "Transformer without dropout": (encoder(0.0), SEQUENCES),
    "a norm that is in eval mode": (Frozen(), X),
    "a class method that reads a mode": (Made(), X),
}
WITH = {
    "Dropout": (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), X),
    "BatchNorm": (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), X),
    "LSTM that drops": (nn.LSTM(4, 3, num_layers=2, dropout=0.5), SEQUENCES),
    "InstanceNorm with statistics": (nn.InstanceNorm1d(5, track_running_stats=True), SEQUENCES),
    "RReLU": (nn.RReLU(), X),
    "Transformer": (encoder(0.1), SEQUENCES),
    "its own code": (Drops(), X),
    "its own code, on a layer of torch's": (DropsNothing(0.0), X),
}


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():  # often: what dropped once may be what eval mode gives
        every = [leaves(module(x)) for _ in range(8)]
    return [made for each in every for made in each if isinstance(made, Tensor)]


@pytest.mark.parametrize(("module", "x"), WITHOUT.values(), ids=WITHOUT)
def test_a_mode_that_makes_no_difference_is_not_warned_of(module: nn.Module, x: Tensor) -> None:
    assert not heeds_training(module)
    assert module.training
    ours = results(module, x)
    theirs = results(copy.deepcopy(module).eval(), x)
    torch.testing.assert_close(ours, theirs)  # and the mode does make none
    optimize(module, x)


@pytest.mark.parametrize(("module", "x"), WITH.values(), ids=WITH)
def test_a_mode_that_makes_a_difference_is_warned_of(module: nn.Module, x: Tensor) -> None:
    with pytest.warns(TrainingMode, match="is in training mode") as said:
        optimize(module, x)
    assert [each.filename for each in said] == [__file__]
    theirs = results(copy.deepcopy(module).eval(), x)
    assert not all(map(torch.equal, results(module, x), theirs))


@pytest.mark.parametrize("name", ["plan", "pad_to"])
def test_a_search_is_given_no_plan(name: str) -> None:
    with pytest.raises(TypeError, match=f"tune takes no {name}"):
        plantune.tune(nn.Linear(3, 3).eval(), X, **{name: 4})
