"""A tuned module says what it takes, as its reference does, and what it cannot be made into."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plantune import TunedModule, load_model, optimize
from plantune.errors import UnsupportedModule

X = torch.randn(2, 3)


class Classifier(nn.Module):
    """As those of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(
        self, input_ids: Tensor, /, mask: Tensor | None = None, *, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.layer(input_ids)
        logits = logits if mask is None else logits * mask
        loss = {} if labels is None else {"loss": (logits - labels).square().mean()}
        return {**loss, "logits": logits}


def wanted(module: nn.Module) -> inspect.Signature:
    return inspect.signature(module.forward)


@pytest.fixture
def module() -> Classifier:
    return Classifier().eval()


@pytest.fixture
def tuned(module: Classifier) -> TunedModule:
    return optimize(module, X, labels=torch.zeros(2, 4))


WAYS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda tuned: tuned,
    "a deep copy": copy.deepcopy,
    "a copy": copy.copy,
    "through pickle": lambda tuned: pickle.loads(pickle.dumps(tuned)),
    "through pickle's oldest form": lambda tuned: pickle.loads(pickle.dumps(tuned, protocol=0)),
    "twice through pickle": lambda t: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(t)))),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_it_takes_what_its_reference_takes(
    way: Callable[[Any], Any], tuned: TunedModule, module: Classifier
) -> None:
    other = way(tuned)
    assert inspect.signature(other.forward) == wanted(module)
    assert inspect.signature(other) == wanted(module)
    assert isinstance(other, TunedModule)
    named = {"labels": torch.zeros(2, 4)}
    torch.testing.assert_close(dict(other.forward(X, **named)), module(X, **named))
    torch.testing.assert_close(dict(other(X, **named)), module(X, **named))


def test_a_trainer_finds_the_columns_and_the_labels(tuned: TunedModule) -> None:
    """As transformers' `_set_signature_columns_if_needed` and `find_labels` look for them."""
    assert list(inspect.signature(tuned.forward).parameters) == ["input_ids", "mask", "labels"]
    of_class = inspect.signature(tuned.__class__.forward).parameters
    assert [name for name in of_class if "label" in name] == ["labels"]


def test_each_forward_has_its_own(tuned: TunedModule) -> None:
    other = optimize(nn.Linear(3, 4).eval(), X)
    assert list(inspect.signature(other.forward).parameters) == ["input"]
    assert type(optimize(nn.Linear(3, 2).eval(), X)) is type(other)
    assert "input_ids" in inspect.signature(tuned.forward).parameters
    own = inspect.signature(TunedModule.forward)
    assert list(own.parameters) == ["self", "args", "kwargs"]


def test_a_forward_that_was_replaced(module: Classifier) -> None:
    def forward(pixels: Tensor) -> Tensor:
        return pixels * 2

    module.forward = forward  # type: ignore[assignment,method-assign]
    tuned = optimize(module, X)
    assert list(inspect.signature(tuned.forward).parameters) == ["pixels"]
    torch.testing.assert_close(tuned(X), X * 2)


def test_casting_parameters_hides_no_signature() -> None:
    model = load_model("se_resnet9_fixup", batch=1, dtype=torch.float64, parameters=torch.float32)
    assert list(inspect.signature(model.forward).parameters) == ["x"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_has_no_signature_to_take() -> None:
    tuned = optimize(torch.jit.script(nn.Linear(3, 4).eval()), X, fallback="silent")
    assert type(tuned) is TunedModule
    assert tuned(X).shape == (2, 4)


def test_nothing_stays_of_a_class_that_is_gone() -> None:
    class Passing(Classifier):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.layer(x)

    tuned = optimize(Passing().eval(), X)
    assert list(inspect.signature(tuned.forward).parameters) == ["x"]
    kinds = [weakref.ref(Passing), weakref.ref(type(tuned))]
    del tuned, Passing
    for _ in range(2):  # the second class is let go of with the first one
        gc.collect()
    assert [kind() for kind in kinds] == [None, None]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("within", [False, True])
def test_torch_jit_script_says_no(within: bool, tuned: TunedModule) -> None:
    given = nn.Sequential(nn.ReLU(), tuned) if within else tuned
    with pytest.raises(UnsupportedModule, match=r"tuned Classifier .* give it tuned\.reference"):
        torch.jit.script(given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_it_names_instead_works() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
    tuned = optimize(module, X)
    for made in (torch.jit.script(tuned.reference), torch.jit.trace(tuned, X)):
        torch.testing.assert_close(made(X), module(X))
