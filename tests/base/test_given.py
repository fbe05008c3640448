"""What a public function cannot take is refused in one line: the argument, what it may be, what was
got.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from plantune import LAMB, LossScale, TrainStep, load_model, optimize, tune
from plantune.backend import plantune as backend
from plantune.base.given import MOST_SHOWN, require_number, require_whole, shown

NAN, INF = float("nan"), float("inf")
X = torch.randn(2, 3)


def optimized(**given: Any) -> object:
    return optimize(nn.Linear(3, 4).eval(), X, **given)


def searched(**given: Any) -> object:
    return tune(nn.Linear(3, 4).eval(), X, **{"budget": 1, **given})


def loaded(**given: Any) -> object:
    how = {"name": "se_resnet9_fixup", "batch": 1, **given}
    return load_model(how.pop("name"), **how)  # type: ignore[arg-type]


def stepped(**given: Any) -> object:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return TrainStep(model, nn.functional.mse_loss, optimizer, **given)


def scaled(**given: Any) -> object:
    return LossScale(**given)


def made(**given: Any) -> object:
    return LAMB([*nn.Linear(2, 2).parameters()], **given)


def compiled(**given: Any) -> object:
    return backend(torch.fx.symbolic_trace(nn.Linear(3, 4)), [X], **given)


MODE = "one of infer, train"
FALLBACK = "one of warn, error, silent"
FLAG = "True or False"
PLAN = "a plantune.Plan, the path of an exported one, or None"
FLOATS = "one of torch.float16, torch.bfloat16, torch.float32, torch.float64"
NORM = "a number above 0, or None"
SECONDS = "a number of seconds above 0"
ONE_OR_MORE = "a whole number, 1 or more"
NOT_NEGATIVE = "a number, 0 or more"
REFUSED: list[tuple[Callable[..., object], str, str, list[Any]]] = [
    (optimized, "mode", MODE, ["fast", None, ["infer"]]),
    (optimized, "plan", PLAN, [3, b"x.db", {}]),
    (optimized, "frozen", FLAG, ["yes", None, 2]),
    (optimized, "share", FLAG, ["no", 1]),
    (optimized, "consistent", FLAG, ["x", None]),
    (optimized, "fallback", FALLBACK, ["x", None, 1]),
    (optimized, "pad_to", "a whole number of samples, or several", ["4", 2.5]),
    (searched, "budget", SECONDS, ["60", 0, -1, NAN, INF, True, None, []]),
    (searched, "progress", FLAG, ["no", 1]),
    (searched, "mode", MODE, ["x"]),
    (loaded, "name", "the name of a network", [3, None, nn.Linear]),
    (loaded, "batch", "a positive integer, or several of them", [0, "4", 2.0, [], True, None]),
    (loaded, "in_channels", ONE_OR_MORE, [0, "3", 2.5, None, True]),
    (loaded, "dtype", FLOATS, ["float16", torch.int32, torch.complex64, float]),
    (loaded, "parameters", FLOATS, ["float32", torch.int8]),
    (loaded, "device", "a torch.device or the name of one", ["gpu", 3.5, []]),
    (loaded, "weights", "a state_dict, or the path of a saved one", [3, []]),
    (loaded, "plan", PLAN, [3]),
    (loaded, "frozen", FLAG, ["x"]),
    (stepped, "max_norm", NORM, [[1.0], "1", 0, -1, NAN, True, torch.tensor(1.0)]),
    (stepped, "micro_batches", ONE_OR_MORE, [0, "2", 1.5, True, None]),
    (stepped, "scale", "a plantune.LossScale or None", [3, True]),
    (stepped, "autocast", "a torch.dtype of floats, or None", ["float16", torch.int32]),
    (stepped, "process_group", "a process group, such as", ["nccl", True]),
    (stepped, "reduce_dtype", "torch.float16, torch.bfloat16 or None", ["x", torch.float64]),
    (stepped, "deadline_s", SECONDS, ["x", -1, 0, NAN, None, True]),
    (scaled, "init_scale", "a finite number above 0", ["x", 0, NAN, INF, True, None]),
    (scaled, "growth_factor", "a finite number above 1", ["x", 1, INF]),
    (scaled, "backoff_factor", "a number between 0 and 1", [None, 2, 0]),
    (scaled, "growth_interval", ONE_OR_MORE, [0, 1.5, "x", True]),
    (made, "lr", NOT_NEGATIVE, ["x", -1, None, NAN, [1]]),
    (made, "eps", NOT_NEGATIVE, ["x", -1]),
    (made, "weight_decay", NOT_NEGATIVE, [None, -0.5]),
    (made, "betas", "two numbers from 0 to below 1", [0.9, (0.9,), ("a", "b"), (0.9, 1.0)]),
    (made, "maximize", FLAG, ["x"]),
    (compiled, "mode", "one of default, reduce-overhead", ["x", 3]),
    (compiled, "options", "a dict such as {'budget': 60}", [[1], 3]),
]
EACH = [(call, name, wanted, got) for call, name, wanted, every in REFUSED for got in every]


@pytest.mark.parametrize(("call", "name", "wanted", "got"), EACH)
def test_an_argument_is_refused_by_its_name(
    call: Callable[..., object], name: str, wanted: str, got: Any
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(**{name: got})
    text = str(caught.value)
    assert text.startswith(f"{name} must be {wanted}")
    assert text.endswith(f"got {shown(got)}")
    assert "\n" not in text


@pytest.mark.parametrize("budget", ["x", -1, True, INF])
def test_an_option_of_the_backend_is_refused_by_its_name(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget must be a number of seconds, 0 or more, got"):
        compiled(options={"budget": budget})


@pytest.mark.parametrize(
    "name", ["mode", "plan", "frozen", "share", "consistent", "fallback", "pad_to"]
)
def test_an_input_of_the_module_by_a_name_of_optimizes_own(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is optimize's own, got a tensor: give the mod"):
        optimized(**{name: X})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb", r"'a\nb'"),
        (nn.Linear, "the class Linear"),
        (torch.ones(2), "a Tensor"),
        (torch.float16, "torch.float16"),
        (nn.Identity(), "an Identity"),
        (None, "None"),
        ({"lr": [1.0]}, "{'lr': [1.0]}"),
        ([torch.ones(2)], "a list"),
        ({"weight": torch.ones(2)}, "a dict"),
    ],
)
def test_what_was_got_is_shown_in_a_few_words(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_long_value_is_cut() -> None:
    assert len(shown([*range(1000)])) == MOST_SHOWN


def test_what_is_right_passes() -> None:
    require_number("x", 1, "above 0", lambda x: x > 0)
    require_number("x", 0.5, "above 0", lambda x: x > 0)
    require_whole("n", 1, 1)
    stepped(max_norm=INF, micro_batches=2, autocast=torch.bfloat16, deadline_s=5)
    made(lr=torch.tensor(0.1))
